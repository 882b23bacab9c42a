"""Many small tensors are copied together, and arrive bit for bit as if they were copied one by one."""

from collections.abc import Callable, Sequence

import pytest
import torch
from scan_parts import schema_of

from weight_update import DenseEncoding
from weight_update.encodings import Encoder
from weight_update.encodings.patch import kernels
from weight_update.testing import random_bits
from weight_update.wire.fixed import FixedTensors
from weight_update.wire.schema import WeightSchema

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def some(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    return [random_bits(shape, dtype, number) for number, shape in enumerate(shapes)]


def shipped(tensors: Sequence[torch.Tensor], schema: WeightSchema) -> list[torch.Tensor]:
    """Encode the tensors and decode them as the receiver does."""
    (payload,) = DenseEncoding().encoder(schema).encode(tensors, lambda n: torch.empty(n, dtype=torch.uint8))
    return DenseEncoding.decoder(schema).decode([payload])


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shapes",
    [
        [(64,)] * 100,
        [(64,)] * 7,
        [(64,)] * 9 + [(3,)] * 9 + [()] * 9 + [(0,)] + [(64,)] * 9,
        [(8, 8)] * 20 + [(16, 8)] * 20 + [(8, 16)] * 20 + [(2, 4, 8)] * 20,
        [(64, 64)] * 40,
        [(128, 512)] * 3 + [(64,)] * 10,
        [(8, 8), (64,)] * 20,
    ],
    ids=["many", "few", "gaps", "shapes", "more than one call takes", "large and small", "in turns"],
)
def test_all_bits_arrive(dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> None:
    tensors = some(dtype, shapes)
    assert list(map(bits, shipped(tensors, schema_of(tensors)))) == list(map(bits, tensors))


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: torch.nn.Parameter(tensor),
        lambda tensor: tensor.t(),
        lambda tensor: tensor.repeat(2, 2)[::2, ::2],
        lambda tensor: tensor[:1].expand(8, 8),
        lambda tensor: tensor.to(torch.float64),
        lambda tensor: tensor.to(torch.bfloat16),
        lambda tensor: tensor.to(torch.float8_e4m3fn),
        lambda tensor: (100 * tensor).to(torch.int32),
    ],
    ids=["parameter", "transposed", "strided", "expanded", "wider", "narrower", "float8", "integers"],
)
def test_sources_of_any_kind(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    sent = [change(torch.randn(8, 8)) for _ in range(30)]
    schema = schema_of([torch.empty(8, 8) for _ in range(30)])
    expected = [torch.empty(8, 8).copy_(tensor.detach()) for tensor in sent]
    assert list(map(bits, shipped(sent, schema))) == list(map(bits, expected))


def test_what_cannot_be_joined_is_copied() -> None:
    sent = [torch.randn(64) for _ in range(20)]
    sent[7] = torch.arange(64)
    schema = schema_of([torch.empty(64) for _ in range(20)])
    assert list(map(bits, shipped(sent, schema))) == [bits(tensor.float()) for tensor in sent]


def test_tied_tensors_travel_once() -> None:
    tensors = some(torch.float32, [(64,)] * 40)
    tensors[20] = tensors[3]
    assert list(map(bits, shipped(tensors, schema_of(tensors)))) == list(map(bits, tensors))


def test_a_buffer_that_comes_back() -> None:
    tensors = some(torch.float32, [(64,)] * 40)
    schema = schema_of(tensors)
    encoder, buffer = DenseEncoding().encoder(schema), torch.empty(schema.nbytes, dtype=torch.uint8)
    for _ in range(3):
        (payload,) = encoder.encode(tensors, lambda nbytes: buffer)
        assert list(map(bits, DenseEncoding.decoder(schema).decode([payload]))) == list(map(bits, tensors))
        tensors = [tensor + 1 for tensor in tensors]


SHAPES = [(64,), (8, 8), (5,), (), (0, 3), (3, 7), (2, 1, 4)] * 60 + [(40_000,), (33,)]


def fixed(dtype: torch.dtype) -> FixedTensors:
    """Return tensors of all kinds of sizes, two of them tied, in memory that starts at any byte."""
    tensors = {str(number): tensor for number, tensor in enumerate(some(dtype, SHAPES))}
    tensors["part"] = random_bits((21,), dtype, 1)[1:20]
    tensors["tied"] = tensors["1"]
    made = FixedTensors.of(tensors)
    assert made is not None
    return made


def payload_of(encoder: Encoder, tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the bytes of a payload, in memory that something else was in before."""
    (payload,) = encoder.encode(tensors, lambda nbytes: torch.full((nbytes,), 77, dtype=torch.uint8))
    return payload.numpy().tobytes()


@pytest.mark.parametrize("dtype", [one for one in DTYPES if not one.is_complex], ids=str)
def test_fixed_tensors_have_the_same_payload(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled function and with it, and where it may not be used; gaps are left as they were."""
    tensors = fixed(dtype)
    schema = schema_of(tensors)
    for agreed in (schema, schema.with_dtype(torch.float16)):
        encoder = DenseEncoding().encoder(agreed)
        for _ in range(2):
            compiled = payload_of(encoder, tensors)
            with monkeypatch.context() as patched:
                patched.setattr(kernels, "library", None)
                assert payload_of(encoder, tensors) == compiled
            assert payload_of(encoder, list(tensors)) == compiled
            tensors[0].view(torch.uint8).bitwise_xor_(1)


def test_fixed_tensors_whose_storage_has_moved() -> None:
    tensors = fixed(torch.float32)
    encoder = DenseEncoding().encoder(schema_of(tensors))
    payload_of(encoder, tensors)
    tensors[0].untyped_storage().resize_(1 << 20)
    tensors[0].fill_(3.0)
    named = dict(zip(tensors.names, tensors, strict=True))
    assert not tensors.unchanged(named)
    again = FixedTensors.of(named)
    assert again is not None
    assert again.unchanged(named)
    assert payload_of(encoder, again) == payload_of(encoder, list(tensors))


def test_fixed_tensors_of_other_sizes() -> None:
    """No byte outside the tensors is read."""
    tensors = fixed(torch.float32)
    encoder = DenseEncoding().encoder(schema_of([*tensors[:-1], torch.empty(1 << 20)]))
    with pytest.raises(RuntimeError, match="size"):
        payload_of(encoder, tensors)
