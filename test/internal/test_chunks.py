"""The wire format: round trips, and headers that lie."""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
import time
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from weight_update import FormatError, SchemaMismatchError, UnsupportedSourceError, WeightChunk, WeightSchema
from weight_update.wire.extra_state import decode_extra, encode_extra
from weight_update.wire.frames import MAX_HEADER_BYTES, PRELUDE_BYTES, Kind, Prelude, Step
from weight_update.wire.memory import digest
from weight_update.wire.schema import DTYPES, MAX_PAYLOAD_BYTES, TensorMeta

UPDATE = {
    "version": 7,
    "schema": "ab" * 32,
    "encoding": "dense/1",
    "index": 0,
    "count": 1,
    "commit": True,
    "group": None,
    "base": None,
    "extra": {},
}
GOOD = json.dumps(UPDATE).encode()
fuzz = examples(300, suppress_health_check=[HealthCheck.too_slow])


def update(payload: bytes = b"weights!" * 9) -> WeightChunk:
    flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else None
    return WeightChunk(Kind.UPDATE, UPDATE, flat)


def frame(head: bytes, body: bytes = b"", kind: int = Kind.UPDATE, **lies: int) -> bytes:
    """A frame with right checksums around whatever it is given."""
    lengths = (lies.get("header", len(head)), lies.get("payload", len(body)))
    magic = b"WUPD" if lies.get("magic", True) else b"HTTP"
    flags = lies.get("flags", 1 if body else 0)
    start = struct.pack("<4sBBHIQ", magic, lies.get("format", 1), kind, flags, *lengths)
    crcs = struct.pack("<II", zlib.crc32(head, zlib.crc32(start)), zlib.crc32(body) if body else 0)
    return start + crcs + head + body


def applied(seconds: float) -> bytes:
    return json.dumps({"version": 1, "apply_seconds": seconds, "stall_seconds": 0.0}).encode()


def rejected(data: bytes) -> None:
    with pytest.raises(FormatError):
        WeightChunk.decode(data)


# -- frames --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [False, True])
def test_a_chunk_has_one_head_with_a_checksum_of_the_payload_and_one_without(first: bool) -> None:
    chunk, alone = update(), {True: update().encode_head(), False: update().encode_head(checksum=False)}
    assert alone[True] != alone[False]
    for checksum in (first, not first, first):
        assert chunk.encode_head(checksum=checksum) == alone[checksum]


@given(st.binary(max_size=300), st.integers(0, 2**60), st.text(max_size=20))
@fuzz
def test_round_trip(payload: bytes, version: int, group: str) -> None:
    flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else None
    sent = WeightChunk(Kind.UPDATE, {**UPDATE, "version": version, "group": group}, flat)
    got = WeightChunk.decode(sent.encode())
    assert got.kind is sent.kind
    assert got.header == sent.header
    assert bytes(got.payload.numpy()) == payload if payload else got.payload is None


@pytest.mark.parametrize("payload", [b"weights!" * 9, b""], ids=["payload", "no payload"])
@given(position=st.integers(min_value=0), bit=st.integers(0, 7))
@fuzz
def test_any_flipped_bit_is_noticed(payload: bytes, position: int, bit: int) -> None:
    data = bytearray(update(payload).encode())
    data[position % len(data)] ^= 1 << bit
    rejected(bytes(data))


@given(st.integers(min_value=1), st.binary(min_size=1, max_size=40))
@fuzz
def test_any_truncation_or_extension_is_noticed(cut: int, more: bytes) -> None:
    data = update().encode()
    rejected(data[: -(cut % len(data)) or None][: len(data) - 1])
    rejected(data + more)


@given(st.binary(max_size=400))
@fuzz
def test_noise_is_no_frame(data: bytes) -> None:
    rejected(data)
    rejected(update().encode()[:PRELUDE_BYTES] + data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(UPDATE)), json_values, st.sampled_from(list(Kind)))
@fuzz
def test_header_fields_are_checked(name: str, value: Any, kind: Kind) -> None:
    """A well-formed frame with an arbitrary header either is a valid chunk or a FormatError."""
    header = {**UPDATE, name: value}
    try:
        chunk = WeightChunk.decode(frame(json.dumps(header).encode(), kind=kind))
    except FormatError:
        return
    assert kind is Kind.UPDATE
    assert type(chunk.header[name]) is type(value)
    assert chunk.header["version"] >= 0
    assert 0 <= chunk.header["index"] < chunk.header["count"]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(frame(b"[]"), id="a header that is no object"),
        pytest.param(frame(b"{" * 5000), id="a header that is no JSON"),
        pytest.param(frame(b"[" * 100_000), id="a header nested without end"),
        pytest.param(frame(b"\xff\xfe"), id="a header that is no UTF-8"),
        pytest.param(frame(GOOD, magic=False), id="another magic number"),
        pytest.param(frame(GOOD, format=2), id="another format"),
        pytest.param(frame(b"{}", kind=0), id="kind 0"),
        pytest.param(frame(b"{}", kind=99), id="kind 99"),
        pytest.param(frame(b"{}", flags=2), id="an unknown flag"),
        pytest.param(frame(GOOD, b"weights!", flags=0), id="a checksum without its flag"),
        pytest.param(frame(b"{}", payload=1 << 63), id="a payload beyond the bytes"),
        pytest.param(frame(b"{}", header=1 << 31), id="a header beyond the bytes"),
        pytest.param(frame(json.dumps({**UPDATE, "more": 1}).encode()), id="an unknown field"),
        pytest.param(frame(json.dumps({**UPDATE, "version": -1}).encode()), id="a negative version"),
        pytest.param(frame(json.dumps({**UPDATE, "index": -1}).encode()), id="a negative index"),
        pytest.param(frame(json.dumps({**UPDATE, "index": 1}).encode()), id="index beyond count"),
        pytest.param(
            frame(json.dumps({**UPDATE, "version": 1 << 63}).encode()), id="a number beyond 64 bits"
        ),
        pytest.param(frame(applied(10**400), kind=Kind.APPLIED), id="seconds beyond a float"),
        pytest.param(frame(applied(float("nan")), kind=Kind.APPLIED), id="seconds that are no number"),
        pytest.param(frame(json.dumps({**UPDATE, "count": True}).encode()), id="a bool for an int"),
    ],
)
def test_lies(data: bytes) -> None:
    WeightChunk.decode(frame(GOOD))
    rejected(data)


def test_a_lie_about_the_length_costs_no_memory() -> None:
    data = frame(b"{}", payload=1 << 41)
    tracemalloc.start()
    rejected(data)
    for more in (frame(b"{}", payload=MAX_PAYLOAD_BYTES + 1), frame(b"{}", header=MAX_HEADER_BYTES + 1)):
        with pytest.raises(FormatError, match="more than is allowed"):
            Prelude.decode(more[:PRELUDE_BYTES])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_unknown_encoding_names_the_known_ones() -> None:
    from weight_update.encodings import decoder_for

    with pytest.raises(FormatError, match="dense/1"):
        decoder_for("no such/9", WeightSchema.of({}))


# -- schemas -------------------------------------------------------------------------------------------


def named() -> dict[str, torch.Tensor]:
    shapes: list[tuple[int, ...]] = [(), (0,), (3,), (2, 3), (2, 0, 5), (1, 2, 3, 4)]
    return {
        f"{name}.{i}": torch.zeros(shape, dtype=dtype)
        for name, dtype in DTYPES.items()
        for i, shape in enumerate(shapes)
    }


def test_schema_round_trip_and_places() -> None:
    schema = WeightSchema.of(named())
    again = WeightSchema.from_header(json.loads(json.dumps(schema.to_header())))
    assert again == schema
    assert again.digest == schema.digest
    end = 0
    for meta in schema.tensors:
        assert meta.offset % 64 == 0
        assert meta.offset >= end
        end = meta.offset + meta.nbytes
    assert end <= schema.nbytes
    flat = torch.zeros(schema.nbytes, dtype=torch.uint8)
    for meta, view in zip(schema.tensors, schema.views(flat), strict=True):
        assert (tuple(view.shape), view.dtype) == (meta.shape, meta.dtype)


def test_tied_tensors_share_their_bytes() -> None:
    shared, other = torch.ones(4), torch.ones(4)
    schema = WeightSchema.of({"a": shared, "b": shared, "c": other, "d": shared.view(2, 2)})
    offsets = [meta.offset for meta in schema.tensors]
    assert offsets[0] == offsets[1]
    assert len({offsets[0], offsets[2], offsets[3]}) == 3, "another view is another tensor"
    assert schema.ties == ((0, 1),)
    assert schema.dense_bytes == 3 * 16


@given(
    st.fixed_dictionaries(
        {
            "nbytes": st.integers(-5, 300) | json_values,
            "tensors": st.lists(
                st.tuples(
                    st.sampled_from(["a", "b", "c"]),
                    st.lists(st.integers(-2, 5), max_size=3),
                    st.sampled_from([*DTYPES, "object", "qint8"]),
                    st.integers(-1, 5).map(lambda n: n * 32),
                ).map(list)
                | json_values,
                max_size=4,
            )
            | json_values,
        }
    )
    | json_values
)
@fuzz
def test_a_schema_that_is_accepted_is_sound(header: Any) -> None:
    try:
        schema = WeightSchema.from_header(header)
    except FormatError:
        return
    assert len(set(schema.names)) == len(schema.names)
    spans = sorted({(meta.offset, meta.offset + meta.nbytes) for meta in schema.tensors if meta.nbytes})
    assert all(start >= 0 and end <= schema.nbytes for start, end in spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    schema.views(torch.zeros(schema.nbytes, dtype=torch.uint8))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    "shape", [[0, 1 << 41, 1 << 41], [1] * 100, [1 << 42] * 200_000], ids=["empty", "deep", "deep and large"]
)
def test_a_shape_that_no_tensor_has_is_refused_at_once(shape: list[int]) -> None:
    start = time.monotonic()
    with pytest.raises(FormatError, match="shape"):
        WeightSchema.from_header({"nbytes": 64, "tensors": [["a", shape, "float32", 0]]})
    assert time.monotonic() - start < 5.0


def test_what_has_no_plain_layout_is_refused_by_name() -> None:
    with warnings.catch_warnings():  # torch says, once in a process, that these will go away
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for tensor in (torch.eye(3).to_sparse(), quantized):
        with pytest.raises(UnsupportedSourceError, match="'odd'"):
            WeightSchema.of({"odd": tensor})


def test_differences_are_listed_all_at_once() -> None:
    ours = WeightSchema.of(
        {"a": torch.ones(2), "b": torch.ones(2, 3), "c": torch.ones(1), "f": torch.ones(2)}
    )
    theirs = WeightSchema.of(
        {
            "b": torch.ones(3, 2),
            "c": torch.ones(1, dtype=torch.int32),
            "d": torch.ones(1),
            "f": torch.ones(2).half(),
        }
    )
    with pytest.raises(SchemaMismatchError) as caught:
        ours.require_same(theirs, "worker 3")
    assert [line.partition(":")[0] for line in caught.value.problems] == ["a", "b", "c", "d"]
    assert "worker 3" in str(caught.value)


def test_ties_of_the_receiver_alone_are_a_difference() -> None:
    shared = torch.ones(2)
    tied = WeightSchema.of({"a": shared, "b": shared})
    apart = WeightSchema.of({"a": torch.ones(2), "b": torch.zeros(2)})
    tied.require_same(apart, "worker 0")
    with pytest.raises(SchemaMismatchError, match="tied"):
        apart.require_same(tied, "worker 0")


def test_metas_print_what_they_are() -> None:
    assert str(TensorMeta("w", (2, 3), torch.bfloat16)) == "w: bfloat16[2, 3]"


# -- extra state ---------------------------------------------------------------------------------------

extra = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.sampled_from(["$tensor", "$bytes", "$dict", "$tuple"]), inner)
    ),
    max_leaves=10,
)


@given(extra)
@fuzz
def test_extra_state_round_trip(value: Any) -> None:
    assert decode_extra(json.loads(json.dumps(encode_extra(value)))) == value


@given(json_values | st.dictionaries(st.sampled_from(["$tensor", "$bytes", "$dict", "$tuple"]), json_values))
@fuzz
def test_extra_state_that_lies_is_a_format_error(value: Any) -> None:
    with contextlib.suppress(FormatError):
        decode_extra(value)


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_extra_state_with_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    got = decode_extra(json.loads(json.dumps(encode_extra({"t": tensor}))))["t"]
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert bytes(got.reshape(-1).view(torch.uint8).numpy()) == bytes(
        tensor.reshape(-1).view(torch.uint8).numpy()
    )


def test_extra_state_of_another_type_names_it() -> None:
    with pytest.raises(UnsupportedSourceError, match="set"):
        encode_extra({"a": [{1, 2}]})


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": ["float32", [1 << 36], ""]},
        {"$tensor": ["float32", [-1], "AAAAAA=="]},
        {"$tensor": ["float32", [2], "AAAAAA=="]},
        {"$tensor": ["float31", [1], "AAAAAA=="]},
        {"$tensor": ["float32", [1 << 70, 0], ""]},
        {"$tuple": "abc"},
        {"$bytes": "not base64!"},
        {"$tuple": [], "$dict": {}},
        {},
    ],
    ids=str,
)
def test_extra_state_is_read_strictly(value: Any) -> None:
    with pytest.raises(FormatError, match="not an extra state"):
        decode_extra(value)


def test_extra_state_nested_without_end() -> None:
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(FormatError):
        decode_extra(deep)
    endless: list[Any] = []
    endless.append(endless)
    for value in (deep, endless):
        with pytest.raises(UnsupportedSourceError, match="nested"):
            encode_extra(value)


def test_extra_state_with_lazy_views() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    for view in (tensor.conj(), tensor.conj().imag, torch._neg_view(tensor.real)):
        assert torch.equal(decode_extra(encode_extra(view)), view)


def freed() -> torch.Tensor:
    tensor = torch.ones(3)[1:]
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.empty(2, device="meta"),
        freed,
    ],
    ids=["sparse", "meta", "freed"],
)
def test_extra_state_without_plain_memory(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(UnsupportedSourceError, match=r"'layer\._extra_state': extra state holds"):
        Step.of(1, {"layer._extra_state": {"t": make()}})


def test_extra_state_for_which_a_frame_has_no_room() -> None:
    """Workers refuse a frame with such a header."""
    with pytest.raises(UnsupportedSourceError, match=r"50 MB as JSON, .*keep large tensors in parameters"):
        Step.of(1, {"layer._extra_state": "x" * 50_000_000})
    assert Step.of(1, {"layer._extra_state": "x" * 30_000_000}).extra


def test_digest_is_of_bits_wherever_they_lie() -> None:
    whole = torch.arange(4.0)
    assert digest(whole[1::2][:1]) == digest(torch.tensor([1.0])) == digest(torch.tensor(1.0))
    assert digest(whole) != digest(whole.flip(0))
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
