"""Copies between tensors on a GPU, as integers; what they do on a GPU is tested in test_gpu.py."""

from __future__ import annotations

import pytest
import torch

from weight_update.encodings import dense
from weight_update.testing import random_bits
from weight_update.wire.schema import DTYPES


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_IS_CUDA", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_bit_is_copied(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: set[torch.dtype] = set()
    copy = torch._foreach_copy_

    def note(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool) -> None:
        copied.update(one.dtype for one in (*targets, *sources))
        copy(targets, sources, non_blocking=non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", note)
    sources = [random_bits((5, 7), dtype, 1), random_bits((8, 6), dtype, 2)[:, ::2]]
    targets = [torch.zeros_like(source) for source in sources]
    dense.copy_together(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.contiguous().view(torch.uint8), source.contiguous().view(torch.uint8))
    assert copied <= dense._COPIED_EXACTLY


def test_views_that_are_not_computed_yet() -> None:
    source = torch.randn(4, dtype=torch.complex64)
    targets = [torch.zeros(4, dtype=torch.complex64), torch.zeros(4)]
    dense.copy_together(targets, [source.conj(), source.conj().imag])
    assert torch.equal(targets[0], source.conj().resolve_conj())
    assert torch.equal(targets[1], -source.imag)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.int32])
def test_other_dtypes_are_converted(to: torch.dtype) -> None:
    targets = [torch.zeros(3, dtype=to), torch.zeros(3)]
    dense.copy_together(targets, [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4, 5, 6])])
    assert targets[0].float().tolist() == [1.0, 2.0, 3.0]
    assert targets[1].tolist() == [4.0, 5.0, 6.0]


class Stream:
    """A stream that counts how often it was waited for."""

    waits = 0

    def synchronize(self) -> None:
        Stream.waits += 1


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("to_cpu", [True, False])
def test_copies_to_or_from_the_cpu_are_done_on_return(
    to_cpu: bool, contiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch copies in two steps if the tensor on the CPU is not contiguous; only it can wait in between."""
    there, here = torch.zeros(4, 6), torch.ones(4, 6) if contiguous else torch.ones(6, 4).t()
    target, source = (here, there) if to_cpu else (there, here)
    queued: list[bool] = []
    copy = torch._foreach_copy_

    def note(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool) -> None:
        queued.append(non_blocking)
        copy(targets, sources, non_blocking=non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", note)
    monkeypatch.setattr(dense, "_IS_CUDA", lambda one: one is there)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(Stream, "waits", 0)
    dense.copy_together([target], [source])
    assert torch.equal(target, source)
    assert queued == [contiguous]
    assert Stream.waits == 1
