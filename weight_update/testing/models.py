"""Weights that find bugs: every dtype, odd shapes, ties, odd memory, and bit patterns that compare badly."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from weight_update.strategy.strategy import WeightStrategy
from weight_update.wire.schema import DTYPES

# torch warns once in a process that complex32 is experimental; tests treat warnings as errors.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.empty(1, dtype=torch.complex32)


def random_bits(shape: Iterable[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bits; floating dtypes get NaNs of all payloads, infinities and -0.0."""
    shape = tuple(shape)
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def special_floats() -> torch.Tensor:
    """Return float32 values whose bits are easily lost: NaNs of both kinds and signs, -0.0, tiny ones."""
    patterns = [0x7FC00000, 0x7FC01234, 0x7F800001, 0x7FFFFFFF, 0x80000000, 0x00000001, 0x7F800000]
    negative = [0xFFC00000, 0xFFFFFFFF, 0xFF800001]
    return torch.tensor(patterns + negative, dtype=torch.uint32).view(torch.float32)


class Zoo(nn.Module):
    """A module that has everything a module may have; its forward pass is a cheap sum.

    Parameters of every dtype, a scalar, a 0-element and a non-contiguous one; two names of one parameter;
    persistent and non-persistent buffers; extra state in the root and in a child.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        for name, dtype in DTYPES.items():
            value = random_bits((3, 5), dtype, seed)
            self.register_parameter(f"of_{name}", nn.Parameter(value, requires_grad=False))
        self.scalar: nn.Parameter = nn.Parameter(torch.tensor(float(seed)))
        self.nothing: nn.Parameter = nn.Parameter(torch.empty(0, 4))
        self.transposed: nn.Parameter = nn.Parameter(
            random_bits((6, 4), torch.float32, seed).t(), requires_grad=False
        )
        self.strided: nn.Parameter = nn.Parameter(
            random_bits((9,), torch.int64, seed)[::2], requires_grad=False
        )
        self.special: nn.Parameter = nn.Parameter(special_floats(), requires_grad=False)
        self.inner: nn.Linear = nn.Linear(4, 4)
        self.output: nn.Linear = nn.Linear(4, 4)
        for layer in (self.inner, self.output):
            scramble(layer, seed, finite=True)
        self.output.weight = self.inner.weight
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("mask", random_bits((7,), torch.bool, seed))
        self.register_buffer("cache", random_bits((2, 2), torch.float64, seed), persistent=False)
        self.noted: Noted = Noted(seed)
        self.note: Any = {"seed": seed, "blob": bytes([seed % 256, 0, 255]), "pair": (1, None, True, 0.5)}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.output(self.inner(x)))


class Noted(nn.Module):
    """A child with extra state of its own, a tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.count = torch.tensor([seed, -1])

    def get_extra_state(self) -> torch.Tensor:
        return self.count

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = state


class Brittle(nn.Module):
    """A network whose extra state can be made to fail in a worker."""

    def __init__(self, seed: int = 0, *, refuses: str = "poison") -> None:
        super().__init__()
        self.net, self.note, self.refuses = mlp(seed), "fresh", refuses

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state
        if state == self.refuses:
            raise ValueError(f"{state} refused")


class Stack(nn.Module):
    """Twelve layers that all hold one number; its forward pass reads every one and takes its time."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.full((64,), value)) for _ in range(12)])

    def forward(self, pause: float) -> list[float]:
        """Return the numbers seen, layer by layer."""
        seen = []
        for layer in self.layers:
            seen.append(float(layer.detach()[-1]))
            time.sleep(pause)
        return seen


def mlp(seed: int = 0) -> nn.Sequential:
    """Return a small network, the same for the same seed."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    scramble(net, seed, finite=True)
    return net


def small_views(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors that are lazy views: conjugated, negated, expanded, sliced with a step."""
    values = random_bits((4, 3), torch.complex64, seed)
    values = torch.view_as_complex(torch.nan_to_num(torch.view_as_real(values)).contiguous())
    return {
        "conjugated": values.conj(),
        "negated": torch._neg_view(values.real),
        "imaginary_of_conjugated": values.conj().imag,
        "expanded": torch.arange(3.0).expand(2, 3),
        "stepped": torch.arange(20)[1::3],
    }


def scramble(module: nn.Module, seed: int, *, finite: bool = False) -> None:
    """Write new random bits into every tensor of ``module`` in place, as an optimizer step would.

    Args:
        module: changed in place; its extra state is left alone.
        seed: equal seeds write equal bits.
        finite: normally distributed numbers instead of bits, for networks that are to compute.
    """
    tensors = [*module.parameters(), *module.buffers()]
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            position = 1000 * seed + number
            if finite:
                generator = torch.Generator().manual_seed(position)
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor.copy_(random_bits(tensor.shape, tensor.dtype, position))


def fingerprint(weights: Any, strategy: WeightStrategy | None = None) -> dict[str, str]:
    """Return dtype, shape and SHA-256 of every tensor's bytes, by name, and the extra state as text.

    Two fingerprints are equal if and only if the weights are equal bit for bit.
    """
    named = (strategy or WeightStrategy()).named(weights)
    found = {name: _describe(tensor) for name, tensor in named.tensors.items()}
    found.update({name: repr(state) for name, state in named.extra.items()})
    return found


def _describe(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return f"{plain.dtype} {list(plain.shape)} {hashlib.sha256(raw).hexdigest()}"
