"""The encodings keep their contract; names that are not known."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from weight_update import (
    BucketEncoding,
    DeltaEncoding,
    DenseEncoding,
    PatchEncoding,
    WeightSchema,
    WeightStrategy,
)
from weight_update.encodings import (
    Encoding,
    Lend,
    decoder_for,
    read_delta,
    register_encoding,
    resolve_encoding,
)
from weight_update.encodings.base import _registry
from weight_update.encodings.bucket import _BucketDecoder
from weight_update.encodings.dense import _DenseDecoder, _DenseEncoder
from weight_update.encodings.patch.encoding import PatchTracker
from weight_update.encodings.patch.format import Patch
from weight_update.errors import FormatError
from weight_update.testing import EncodingContract


class TestDenseEncoding(EncodingContract):
    def make_encoding(self) -> Encoding:
        return DenseEncoding()


class TestBucketEncoding(EncodingContract):
    def make_encoding(self) -> Encoding:
        return BucketEncoding()


class TestSmallBuckets(EncodingContract):
    def make_encoding(self) -> Encoding:
        return BucketEncoding(bucket_size=64)


class TestBucketsThatAreKept(EncodingContract):
    def make_encoding(self) -> Encoding:
        return BucketEncoding(bucket_size=128, load_instant=False)


class TestPatchEncoding(EncodingContract):
    def make_encoding(self) -> Encoding:
        return PatchEncoding()


class TestPatchEncodingAsRlinfHasIt(EncodingContract):
    def make_encoding(self) -> Encoding:
        return PatchEncoding(layout="coo")


class TestRelativePatches(EncodingContract):
    def make_encoding(self) -> Encoding:
        return PatchEncoding(values="relative", compression="zstd", init_sync_bucket_size=256)


def _tracks_everything(encoding: PatchEncoding, schema: WeightSchema, tracked: Any) -> PatchTracker:
    return PatchTracker(encoding, schema, None)


def _no_changes(tracker: PatchTracker, version: int, lend: Lend) -> torch.Tensor:
    return tracker.encode(tracker.compare(tracker.weights()), version, version, lend)


@pytest.mark.parametrize(
    ("broken", "method", "result", "test"),
    [
        (BucketEncoding, "payload_sizes", lambda self, schema: [64], "test_chunks"),
        (_BucketDecoder, "stream", lambda self, index, payload: [], "test_chunks"),
        (Patch, "kept", lambda self: self, "test_changes"),
        (Patch, "touched", lambda self, schema: [0], "test_changes"),
        (Patch, "elements_of", lambda self, meta: torch.empty(0, dtype=torch.int64), "test_changes"),
        (PatchTracker, "bootstrap", _no_changes, "test_first_changes"),
        (PatchTracker, "copy", lambda self: self, "test_copy_of_a_tracker"),
        (PatchEncoding, "tracker", _tracks_everything, "test_tracked_weights"),
    ],
)
def test_the_contract_notices(
    broken: type, method: str, result: Any, test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = TestPatchEncoding()
    getattr(contract, test)()
    monkeypatch.setattr(broken, method, result)
    with pytest.raises((AssertionError, FormatError, RuntimeError)):
        getattr(contract, test)()


def _zero(self: _DenseDecoder, payloads: list[torch.Tensor]) -> list[torch.Tensor]:
    return self._cache.views(payloads[0].zero_())


def _fed_into_the_same_memory(
    self: _DenseDecoder, index: int, payload: torch.Tensor, allocate: Lend
) -> torch.Tensor:
    if not hasattr(self, "memory"):
        self.memory = payload.clone()
    return self.memory.copy_(payload)


def _into_the_same_memory(self: _DenseEncoder, tensors: list[torch.Tensor], lend: Lend) -> list[torch.Tensor]:
    if not hasattr(self, "memory"):
        self.memory = lend(self._schema.nbytes)
    return [self.memory]


def _without_conversion(self: _DenseEncoder, tensors: list[torch.Tensor], lend: Lend) -> list[torch.Tensor]:
    payload = lend(self._schema.nbytes)
    for view, tensor in zip(self._schema.views(payload), tensors, strict=True):
        view.copy_(tensor.view(torch.int32).view(view.dtype)[..., : view.shape[-1]])
    return [payload]


@pytest.mark.parametrize(
    ("broken", "method", "result", "test", "message"),
    [
        (
            DenseEncoding,
            "payload_sizes",
            lambda *_: [64],
            "chunks",
            r"payload_sizes\(\) announced other sizes",
        ),
        (_DenseDecoder, "decode", lambda *_: [], "many_updates", r"decode\(\) returns one tensor for each"),
        (_DenseEncoder, "encode", lambda *_: [torch.empty(64)], "memory_is_exactly_lent", "memory from lend"),
        (_DenseEncoder, "encode", _into_the_same_memory, "memory_is_exactly_lent", "memory from lend"),
        (_DenseEncoder, "encode", _without_conversion, "other_dtype", "encoded and converted"),
        (_DenseDecoder, "decode", _zero, "many_updates", "the payload was changed"),
        (_DenseDecoder, "feed", _fed_into_the_same_memory, "many_updates", "the update before"),
        (DenseEncoding, "receiver_copies", True, "many_updates", "receiver_copies is True"),
    ],
)
def test_the_contract_says_what_an_encoding_did_wrong(
    broken: type, method: str, result: Any, test: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken, method, result)
    with pytest.raises(AssertionError, match=message):
        getattr(TestDenseEncoding(), f"test_{test}")()


SCHEMA = WeightSchema.of({"a": torch.zeros(2)})


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown encoding 'dens' \(known encodings: .*dense"):
        WeightStrategy(encoding="dens")


def test_unknown_name_on_the_wire() -> None:
    with pytest.raises(FormatError, match=r"unknown encoding 'dense/9' \(known: .*dense/1"):
        decoder_for("dense/9", SCHEMA)


@pytest.mark.parametrize(
    ("place", "form", "value", "message"),
    [
        (0, "4s", b"WUPD", "not a bucket: starts with b'WUPD"),
        (4, "<B", 2, "not a bucket"),
        (8, "16s", b"float61", "not a bucket"),
        (24, "<Q", 64, "a bucket of 128 bytes says it holds 64 to 64"),
        (32, "<Q", 1 << 63, "a bucket of 128 bytes says it holds 0 to"),
        (40, "<Q", 128, "got a bucket of bytes 0 to 64"),
    ],
    ids=["magic number", "load_instant", "dtype", "start", "stop", "total"],
)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "stream"])
def test_a_lying_head_of_a_bucket(whole: bool, place: int, form: str, value: Any, message: str) -> None:
    (payload,) = BucketEncoding().encoder(SCHEMA).encode([torch.ones(2)], torch.ByteTensor)
    decoder = decoder_for("bucket/1", SCHEMA)
    decode = (lambda: decoder.decode([payload])) if whole else (lambda: decoder.stream(0, payload))
    decode()
    struct.pack_into(form, payload.numpy(), place, value)
    with pytest.raises(FormatError, match=message):
        decode()


def test_all_weights_are_no_delta() -> None:
    with pytest.raises(FormatError, match=r"unknown encoding 'dense/1' \(known: "):
        read_delta("dense/1", torch.zeros(8, dtype=torch.uint8), SCHEMA)


def test_own_encoding_is_found_by_both_ends() -> None:
    @register_encoding
    class Own(DenseEncoding):
        name = "own/7"

    assert isinstance(resolve_encoding("own"), Own)
    assert decoder_for("own/7", SCHEMA).decode([torch.zeros(64, dtype=torch.uint8)])[0].tolist() == [0, 0]


def test_tied_tensors_travel_once() -> None:
    weight = torch.ones(1000)
    tied = WeightSchema.of({"a": weight, "b": weight})
    apart = WeightSchema.of({"a": weight, "b": weight.clone()})
    assert apart.nbytes == 2 * tied.nbytes
    assert tied.dense_bytes == weight.nbytes


def test_an_own_delta_encoding_need_not_know_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(DeltaEncoding):
        name = "own_delta/1"

        @classmethod
        def read(cls, payload: torch.Tensor, schema: WeightSchema) -> Any:
            return payload, schema

    monkeypatch.setitem(_registry, Own.name, Own)
    payload = torch.zeros(3, dtype=torch.uint8)
    assert read_delta(Own.name, payload, SCHEMA, torch.device("cuda:1")) == (payload, SCHEMA)


class _Early(PatchTracker):
    """A tracker that remembers weights when it compares them, not when receivers are sent them."""

    def compare(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        difference = super().compare(tensors)
        self.advance(difference)
        return difference


class _ByValue(PatchTracker):
    """A tracker for which 0.0 and -0.0 are the same."""

    def compare(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        return super().compare([None if one is None else one.detach() + 0 for one in tensors])


class _Referring(PatchTracker):
    """A tracker that keeps the weights themselves until it advances."""

    def compare(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        self.given = tensors
        return super().compare(tensors)

    def advance(self, difference: Any) -> None:
        super().advance(super().compare(self.given))


@dataclass(frozen=True)
class _Mistaken(PatchEncoding):
    """Patches with a tracker that makes a mistake."""

    kind: ClassVar[type[PatchTracker]]

    def tracker(self, schema: WeightSchema, tracked: Any) -> PatchTracker:
        return self.kind(self, schema, tracked)


class _Careless(PatchEncoding):
    """Patches that are not checked before they are read."""

    @classmethod
    def read_for(cls, payload: torch.Tensor, schema: WeightSchema, device: torch.device) -> Any:
        try:
            return super().read_for(payload, schema, device)
        except FormatError as error:
            raise IndexError(str(error)) from error


@pytest.mark.parametrize(
    ("kind", "test", "message"),
    [
        (_Early, "update_that_was_not_committed", "decoded weights differ .*: the update after a lost one"),
        (_ByValue, "bits_that_compare_equal", "decoded weights differ .*: 0.0 to -0.0"),
        (
            _Referring,
            "weights_that_change_before_the_commit",
            "the result of compare.. refers to the weights",
        ),
    ],
)
def test_the_contract_says_what_a_tracker_did_wrong(
    kind: type[PatchTracker], test: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract, arguments = EncodingContract(), [torch.float32] if kind is _ByValue else []
    monkeypatch.setattr(_Mistaken, "kind", kind, raising=False)
    monkeypatch.setattr(contract, "make_encoding", _Mistaken)
    with pytest.raises(AssertionError, match=message):
        getattr(contract, f"test_{test}")(*arguments)


def test_the_contract_finds_payloads_that_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    contract = EncodingContract()
    monkeypatch.setattr(contract, "make_encoding", _Careless)
    monkeypatch.setitem(_registry, PatchEncoding.name, _Careless)
    with pytest.raises(IndexError):
        contract.test_changed_bytes()
