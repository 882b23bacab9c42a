"""The safetensors format, read as its description says, and by its library."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from checkpoint_parts import every_dtype, same_bits, weights
from fuzz import examples
from hypothesis import given
from hypothesis import strategies as st

from weight_update import CorruptCheckpointError, UnsupportedSourceError
from weight_update.checkpoints.safetensors import pack, unpack


def packed(tensors) -> bytes:
    return b"".join(pack(tensors)[1])


def unpacked(data: bytes) -> dict[str, torch.Tensor]:
    return unpack(torch.frombuffer(bytearray(data) + b"\0", dtype=torch.uint8)[: len(data)])


def file_of(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_every_dtype_and_shape_comes_back_bit_for_bit() -> None:
    tensors = every_dtype()
    found = unpacked(packed(tensors))
    assert same_bits(found, tensors)


def test_order_of_names_does_not_matter_and_no_tensors_are_a_file_too() -> None:
    assert unpacked(packed({})) == {}
    tensors = weights(1)
    assert packed(dict(reversed(tensors.items()))) != b""
    assert same_bits(unpacked(packed(dict(reversed(tensors.items())))), tensors)


def test_tensors_that_are_views_of_something() -> None:
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.ones(1).expand(5, 2),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
    }
    assert same_bits(unpacked(packed(tensors)), {k: v.detach().resolve_conj() for k, v in tensors.items()})


def test_tied_tensors_are_written_once_and_tied_again() -> None:
    shared = torch.randn(1000)
    data = packed({"a": shared, "other": torch.ones(2), "b": shared})
    assert len(data) < 2 * shared.nbytes
    found = unpacked(data)
    assert found["a"] is found["b"]
    assert torch.equal(found["b"], shared)


def test_extra_state_comes_back() -> None:
    extra = {
        "norm._extra_state": {"seen": 3, "raw": b"\x00\xff", "sizes": (2, None)},
        "_extra_state": "a name",
    }
    data = packed({"w": torch.arange(4.0), **extra, "block.norm._extra_state": torch.tensor([1.5])})
    found = unpacked(data)
    assert found.pop("block.norm._extra_state").tolist() == [1.5]
    assert found.pop("w").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found == extra


def test_extra_state_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedSourceError, match="holds an object of type set"):
        pack({"_extra_state": {1, 2}})
    monkeypatch.setattr("weight_update.checkpoints.safetensors._MAX_HEADER_BYTES", 1_000_000)
    with pytest.raises(UnsupportedSourceError, match=r"2 MB .* keep large tensors in parameters"):
        pack({"_extra_state": "x" * 2_000_000})
    with pytest.raises(UnsupportedSourceError, match="'w' is of type int"):
        pack({"w": 3})


def test_the_file_is_as_the_description_says() -> None:
    tensors = {"b": torch.tensor([1, 2], dtype=torch.int16), "d": torch.tensor(0.5, dtype=torch.float64)}
    data = packed(tensors)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert data[8:9] == b"{"
    assert header["d"] == {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}
    assert header["b"] == {"dtype": "I16", "shape": [2], "data_offsets": [8, 12]}
    assert header["__metadata__"] == {"format": "pt"}
    assert data[8 + size :] == bytes.fromhex("000000000000e03f01000200")
    assert (8 + size) % 64 == 0


def test_a_file_of_a_program_that_does_not_align() -> None:
    rows = {
        "x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "y": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
        "z": {"dtype": "F32", "shape": [0, 2], "data_offsets": [5, 5]},
    }
    found = unpacked(file_of(rows, b"\x07\x00\x00\x80\x3f"))
    assert found["x"].item() == 7
    assert found["y"].item() == 1.0
    assert (found["z"].dtype, found["z"].shape) == (torch.float32, (0, 2))


def row(**changes: object) -> dict[str, object]:
    return {"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 16,
        file_of(row(), b"123"),
        file_of(row(), b"12345"),
        file_of(row(shape=[5]), b"1234"),
        file_of(row(shape=[-2, -2]), b"1234"),
        file_of(row(shape=["4"]), b"1234"),
        file_of(row(shape=["4", 1 << 62]), b"1234"),  # as a product, a text of that length
        file_of(row(shape=[10**30, "4"]), b"1234"),
        file_of(row(shape=[1 << 40, 1 << 40, 0], data_offsets=[0, 0]), b""),
        file_of(row(dtype="F4"), b"1234"),
        file_of(row(data_offsets=[1, 5]), b"12345"),
        file_of(row(data_offsets=[4, 0]), b"1234"),
        file_of(row(data_offsets=[0]), b"1234"),
        file_of({**row(), "y": row()["x"]}, b"1234"),
        file_of([1], b""),
        file_of(b"\xff\xfe", b""),
        file_of(b'{"x": 1, "x": 2}', b""),
        file_of(b"[" * 100_000, b""),
        file_of({**row(), "__metadata__": {"weight_update.tied": '{"y": "z"}'}}, b"1234"),
        file_of({"__metadata__": {"weight_update.extra": '{"y": {"$tensor": 3}}'}}, b""),
        file_of({"__metadata__": {"weight_update.extra": '{"y": [{}]}'}}, b""),
        file_of({"__metadata__": {"weight_update.extra": "[1]"}}, b""),
    ],
)
def test_a_file_of_another_format_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        unpacked(data)


@examples(60)
@given(st.data())
def test_a_damaged_file_gives_tensors_or_the_error(data: st.DataObject) -> None:
    raw = bytearray(packed(every_dtype()))
    size = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))]
    with contextlib.suppress(CorruptCheckpointError):
        assert isinstance(unpacked(bytes(raw)), dict)


def test_weights_that_cannot_be_written_are_refused() -> None:
    with pytest.raises(UnsupportedSourceError, match="sparse"):
        pack({"s": torch.ones(2, 2).to_sparse()})
    with pytest.raises(ValueError, match="__metadata__"):
        pack({"__metadata__": torch.ones(1)})


def test_the_library_of_the_format_reads_ours_and_we_read_its_files(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="the package safetensors is not installed")
    known = {name: t for name, t in every_dtype().items() if not name.startswith(("complex32", "complex128"))}
    (tmp_path / "ours").write_bytes(packed({**known, "norm._extra_state": {"seen": 3}}))
    assert same_bits(library.load_file(tmp_path / "ours"), known)
    library.save_file(known, tmp_path / "theirs")
    assert same_bits(unpacked((tmp_path / "theirs").read_bytes()), known)


def test_the_library_of_the_format_reads_what_it_has_no_name_for(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="the package safetensors is not installed")
    (tmp_path / "ours").write_bytes(packed(every_dtype()))
    found = library.load_file(tmp_path / "ours")
    assert found["complex128.some"].shape == (5, 3, 16)
