"""Copies of tensors: the same bits by the compiled loop and by torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from weight_update.encodings import dense
from weight_update.encodings.bucket import copy_bytes
from weight_update.encodings.dense import copy_tensors

needs_library = pytest.mark.skipif(dense.library is None, reason="there was no compiler at installation")


@pytest.fixture(params=[pytest.param(True, marks=needs_library), False], ids=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Copy everything as if it were large, with or without the compiled loop."""
    for name, value in {"_LARGE": 0, "_LARGE_ON_ONE": 0, "_FOR_ONE": 1, "_EACH": 0}.items():
        monkeypatch.setattr(dense, name, value)
    monkeypatch.setattr(dense, "_PIECE", 1000)  # pieces end within tensors, and hold several
    if not request.param:
        monkeypatch.setattr(dense, "library", None)
    return bool(request.param)


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_bits(compiled: bool, threads: int, serial: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(5)
    sizes = [0, 1, 15, 16, 63, 64, 65, 333, 1000, 2000, 4097, 10_000]
    shifts = [(0, 0), (1, 0), (0, 1), (3, 5), (15, 17), (8, 8)]  # of the targets and sources, from 64 bytes
    for to_shift, from_shift in shifts:
        targets, sources, memory = [], [], []
        for size in sizes:
            flat = torch.full((size + 192,), 0xA5, dtype=torch.uint8)
            first = -flat.data_ptr() % 64 + to_shift
            memory.append((flat, first, size))
            targets.append(flat[first : first + size])
            random = torch.randint(0, 256, (size + 64,), generator=generator, dtype=torch.uint8)
            sources.append(random[from_shift : from_shift + size])
        copy_tensors(targets, sources, "test", serial=serial)
        for (flat, first, size), source in zip(memory, sources, strict=True):
            assert torch.equal(flat[first : first + size], source)
            assert (flat[:first] == 0xA5).all(), "nothing before the target is written"
            assert (flat[first + size :] == 0xA5).all(), "nothing behind the target is written"


def test_tensors_that_need_more_than_a_copy(compiled: bool) -> None:
    base = torch.randn(40, 50)
    sources = [
        base.t(),
        base.double(),
        torch.randn(30, 20).requires_grad_(),
        torch.randn(7, dtype=torch.complex64).conj(),
        torch.complex(base, base).imag.neg(),
        torch.nn.Parameter(base.clone()),
        torch.tensor(3.0),
    ]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.complex64, torch.float32, torch.float32]
    targets = [torch.empty(s.shape, dtype=d) for s, d in zip(sources, [*dtypes, torch.float32], strict=True)]
    copy_tensors(targets, sources, "test")
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.detach().to(target.dtype))


class Scaled(torch.Tensor):
    """A tensor without memory of its own, as quantizing libraries have them."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: int = 2) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, values: torch.Tensor, scale: int = 2) -> None:
        self.values, self.scale = values, scale

    def unscaled(self) -> torch.Tensor:
        """Return the values that operations see; with a scale of 1 the memory that they may write."""
        return self.values if self.scale == 1 else self.scale * self.values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        whole = [one.unscaled() if isinstance(one, Scaled) else one for one in tree_leaves(args)]
        return func(*tree_unflatten(whole, tree_structure(args)), **(kwargs or {}))


@pytest.mark.usefixtures("compiled")
def test_tensors_without_memory() -> None:
    target, values = torch.zeros(3, 4), torch.randn(3, 4)
    copy_tensors([target], [Scaled(values)], "test")
    assert torch.equal(target, 2 * values)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("serial", [False, True])
def test_targets_without_memory(serial: bool) -> None:
    inner, values = torch.zeros(3, 4), torch.randn(3, 4)
    copy_tensors([Scaled(inner, 1)], [values], "test", serial=serial)
    assert torch.equal(inner, values)


@pytest.mark.usefixtures("compiled")
def test_tensors_that_overlap() -> None:
    flat = torch.arange(100.0)
    with pytest.raises(
        RuntimeError, match="some elements of the input tensor and the written-to tensor refer"
    ):
        copy_tensors([flat[1:91]], [flat[:90]], "test")
    copy_tensors([flat[:50], flat[:50]], [flat[50:], flat[:50]], "test")  # beside each other, and the same
    assert torch.equal(flat[:50], flat[50:])


@pytest.mark.usefixtures("compiled")
def test_nan_payloads_and_signed_zeros() -> None:
    bits = torch.tensor([0x7F800001, 0x7FC12345, -0x80000000, -0x3FFFFF], dtype=torch.int32).repeat(100)
    target = torch.empty(400)
    copy_tensors([target], [bits.view(torch.float32)], "test")
    assert torch.equal(target.view(torch.int32), bits)


@needs_library
def test_gather() -> None:
    sources = [np.arange(n, dtype=np.uint8) for n in (5, 1, 300)]
    out = np.zeros(400, np.uint8)
    offsets, sizes = np.array([10, 0, 64], np.uint64), np.array([5, 1, 300], np.int64)
    addresses = np.array([one.ctypes.data for one in sources], np.uint64)
    dense.copy_memory(out.ctypes.data + offsets, addresses, sizes, 0, 306, past_caches=False)
    expected = np.zeros(400, np.uint8)
    for offset, source in zip((10, 0, 64), sources, strict=True):
        expected[offset : offset + len(source)] = source
    assert np.array_equal(out, expected)


@needs_library
@pytest.mark.usefixtures("compiled")
def test_plain_tensors_are_not_copied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    sources = [torch.randn(10), torch.nn.Parameter(torch.randn(3, 4)), torch.randn(5, 2)[2:]]
    targets = [torch.empty_like(source) for source in sources]
    if dense.library is None:
        with pytest.raises(TypeError):
            copy_tensors(targets, sources, "test")
    else:
        copy_tensors(targets, sources, "test")
        assert all(map(torch.equal, targets, sources))


@pytest.mark.parametrize("size", [64, 9 << 20])
@pytest.mark.parametrize("library", [pytest.param(dense.library, marks=needs_library), None])
def test_bytes_are_not_copied_by_torch(size: int, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch takes four times as long for a bucket of 4 MB, and eight times as long for one of 64 bytes."""
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    monkeypatch.setattr(dense, "library", library)
    source, target = (
        torch.arange(size, dtype=torch.int64).to(torch.uint8),
        torch.zeros(size, dtype=torch.uint8),
    )
    copy_bytes(target, source)
    assert torch.equal(target, source)
