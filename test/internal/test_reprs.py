"""Representations of the library's records, which errors and debuggers print, hold no weights."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

import pytest
import torch

import collectors
import weight_update
from weight_update import WeightChunk
from weight_update.encodings.patch.changes import ByteRange, Segment
from weight_update.encodings.patch.gaps import Gaps
from weight_update.sender.buffers import EncodedUpdate, VersionId
from weight_update.strategy.named_weights import NamedWeights
from weight_update.wire.frames import Kind

MORE = {"cli", "testing", "__main__", "serving.vllm."}  # they need more packages
PAYLOAD = torch.arange(100, dtype=torch.uint8)


def records() -> list[Any]:
    """Return the dataclasses of both packages."""
    found = {}
    for package in (weight_update, collectors):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not any(module.name.startswith(f"weight_update.{name}") for name in MORE):
                for one in vars(importlib.import_module(module.name)).values():
                    if isinstance(one, type) and dataclasses.is_dataclass(one):
                        found[f"{one.__module__}.{one.__qualname__}"] = one
    return [found[name] for name in sorted(found)]


def test_no_record_shows_a_field_of_tensors() -> None:
    classes = records()
    assert len(classes) > 40
    shown = [
        f"{one.__qualname__}.{field.name}"
        for one in classes
        for field in dataclasses.fields(one)
        if field.repr and "torch.Tensor" in str(field.type)
    ]
    assert shown == []


@pytest.mark.parametrize(
    "record",
    [
        EncodedUpdate(VersionId(3), [WeightChunk(Kind.COMMIT, {"version": 3}, PAYLOAD)], []),
        NamedWeights({"weight": PAYLOAD}, {"extra": PAYLOAD}),
        ByteRange(0, PAYLOAD),
        Segment(Gaps(0, 1, PAYLOAD.numpy(), 2), PAYLOAD),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_representation_is_short(record: Any) -> None:
    assert "tensor(" not in repr(record)
    assert len(repr(record)) < 200
