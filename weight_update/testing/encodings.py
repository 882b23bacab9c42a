"""The contract of every encoding."""

from __future__ import annotations

import contextlib
import math
import pickle
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from weight_update.encodings import (
    DeltaEncoding,
    Encoding,
    Tracker,
    decoder_for,
    read_delta,
    resolve_encoding,
)
from weight_update.errors import FormatError
from weight_update.strategy.strategy import WeightStrategy
from weight_update.testing.models import Zoo, fingerprint, mlp, random_bits, scramble, small_views
from weight_update.wire.schema import WeightSchema

Named = Mapping[str, torch.Tensor]


class EncodingContract:
    """Tests of one encoding; subclass it and write :meth:`make_encoding`."""

    def make_encoding(self) -> Encoding:
        """Return a new encoding."""
        raise NotImplementedError(
            f"write {type(self).__name__}.make_encoding(self): it returns a new encoding"
        )

    @pytest.mark.parametrize(
        "named",
        [
            dict(Zoo(1).named_parameters(remove_duplicate=False)),
            dict(mlp(1).named_parameters()),
            small_views(),
            {"only": torch.empty(0, 3)},
            {"scalar": torch.tensor(True)},
            {},
        ],
        ids=["zoo", "mlp", "views", "empty tensor", "scalar", "nothing"],
    )
    def test_round_trip(self, named: Named) -> None:
        """Decoded weights equal the encoded ones, bit for bit."""
        Channel(self.make_encoding(), named).must_carry(named)

    def test_many_updates(self) -> None:
        """Update after update, each committed; only few tensors change in some of them."""
        model = Zoo(1)
        named = dict(model.named_parameters(remove_duplicate=False))
        channel = Channel(self.make_encoding(), named)
        for version in range(6):
            if version % 2:
                scramble(model, version)
            else:
                model.scalar.data.fill_(version)
            channel.must_carry(named, f"update {version}")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_bits_that_compare_equal(self, dtype: torch.dtype) -> None:
        """Changes arrive that a comparison of values overlooks: the sign of 0, other NaNs, small steps."""
        named = {"a": torch.zeros(4, 8, dtype=dtype), "b": torch.ones(3, dtype=dtype)}
        channel = Channel(self.make_encoding(), named)
        channel.must_carry(named)
        element = next(
            one for one in (torch.int16, torch.int32, torch.int64) if one.itemsize == dtype.itemsize
        )
        bits = named["a"].view(element)[1]
        steps: list[tuple[str, float, int]] = [
            ("0.0 to -0.0", -0.0, 0),
            ("-0.0 to NaN", math.nan, 0),
            ("a NaN to another", math.nan, 1),
            ("a NaN to 0.0", 0.0, 0),
            ("0.0 to the smallest number above it", 0.0, 1),
            ("a number to the next one", 1.0, 0),
            ("a number to the next one", 1.0, 1),
            ("a number to infinity", math.inf, 0),
            ("infinity to the largest number", math.inf, -1),
        ]
        for what, value, more in steps:
            named["a"][1, 2] = value
            bits[2] += more
            channel.must_carry(named, what)

    def test_update_that_was_not_committed(self) -> None:
        """The update after a failed one is right for a receiver that has neither."""
        named = {name: random_bits((50,), torch.float32, seed) for seed, name in enumerate("abc")}
        channel = Channel(self.make_encoding(), named)
        channel.send(named)
        named["a"].copy_(random_bits((50,), torch.float32, 7))
        named["b"][:3].fill_(6)
        channel.encode(named)  # lost on its way
        named["a"][:3].fill_(7)
        named["c"][:3].fill_(8)
        channel.must_carry(named, "the update after a lost one")
        channel.must_carry(named, "the same update again")

    def test_weights_that_change_before_the_commit(self) -> None:
        """The tracker remembers the weights that were sent, not those that the model has by then."""
        channel, named = self.tracked()
        assert channel.tracker is not None
        named["0.weight"].view(-1)[3] += 1
        payloads, sent = channel.encode(named), fingerprint(named)
        for value in named.values():
            value.fill_(7)
        assert fingerprint(dict(zip(named, channel.decode(payloads), strict=True))) == sent, (
            "the payload follows later changes of the weights"
        )
        channel.commit()
        assert fingerprint(dict(zip(named, channel.tracker.weights(), strict=True))) == sent, (
            "the result of compare() refers to the weights, which change before advance(); copy them"
        )

    def test_memory_is_exactly_lent(self) -> None:
        """Payloads lie in what ``lend`` gave, and tensors are not kept alive or changed."""
        named = dict(mlp(1).named_parameters())
        before = fingerprint(named)
        channel = Channel(self.make_encoding(), named)
        for _ in range(2):
            assert channel.encode(named), "encode() returned no payload"
        assert fingerprint(named) == before, "encode() changed the weights"

    def test_other_dtype(self) -> None:
        """Each update may have other tensors, which are converted to the dtypes of the schema."""
        model = mlp(1)
        channel = Channel(self.make_encoding(), dict(mlp(1).bfloat16().named_parameters()))
        for version in range(3):
            model.get_parameter("0.bias").data[version] += 1
            named = {name: value.detach().clone() for name, value in model.named_parameters()}
            expected = {name: value.bfloat16() for name, value in named.items()}
            assert fingerprint(channel.send(named)) == fingerprint(expected), (
                f"other weights were decoded than were encoded and converted, in update {version}"
            )

    def test_payload_of_wrong_size(self) -> None:
        """Cut, extended, missing or additional payloads are a FormatError."""
        named = dict(mlp(1).named_parameters())
        channel = Channel(self.make_encoding(), named)
        channel.send(named)
        named["0.weight"].data.add_(1)
        payloads = channel.encode(named)
        longer = torch.cat([payloads[0], payloads[0].new_zeros(1)])
        for wrong in ([payloads[0][:-1], *payloads[1:]], [longer, *payloads[1:]], [], [*payloads, longer]):
            with pytest.raises(FormatError):
                channel.decode(wrong)

    def test_changed_bytes(self) -> None:
        """Payloads with a wrong byte decode to something or are a FormatError; nothing else is raised."""
        named, choose = {name: value.detach() for name, value in mlp(1).named_parameters()}, random.Random(0)
        channel = Channel(self.make_encoding(), named)
        for _ in range(2):  # all weights, then changes if the encoding sends these
            payloads = [payload.clone() for payload in channel.encode(named)]
            for _ in range(200):
                wrong = [payload.clone() for payload in payloads]
                spoilt = choose.choice([payload for payload in wrong if payload.numel()])
                spoilt[choose.randrange(len(spoilt))] = choose.randrange(256)
                with contextlib.suppress(FormatError):
                    channel.decode(wrong, trusted=False)
            channel.send(named)
            named["0.weight"].view(-1)[[3, 30]] += 1

    def test_chunks(self) -> None:
        """Payloads have the announced sizes; where there are chunks, they complete each weight once."""
        whole, named = self.make_encoding().whole, dict(Zoo(1).named_parameters(remove_duplicate=False))
        channel, tensors = Channel(whole, named), list(named.values())
        sizes = whole.payload_sizes(channel.schema)
        encoded = [payload.numel() for payload in channel.encode(named)]
        assert sizes in ([], encoded), "payload_sizes() announced other sizes than encode() made"
        if not whole.in_chunks:
            return
        chunks = whole.encoder(channel.schema).stream(iter(tensors), channel.lend)
        decoder, found = decoder_for(whole.name, channel.schema), list[tuple[int, torch.Tensor]]()
        for index, chunk in enumerate(chunks):
            assert chunk.numel() == sizes[index]
            found += [(i, value.clone()) for i, value in decoder.stream(index, chunk)]
        assert sorted(i for i, _ in found) == list(range(len(tensors)))
        assert fingerprint({channel.schema.names[i]: value for i, value in found}) == fingerprint(named)

    def test_changes(self) -> None:
        """Changes name what they change, and may be kept while the memory of their payload is used again."""
        channel, named = self.tracked()
        named["0.weight"].view(-1)[[3, 30]] += 1
        named["2.bias"] += 1
        (payload,) = channel.encode(named)
        delta = read_delta(channel.encoding.name, payload, channel.schema)
        changed = {"0.weight": {3, 30}, "2.bias": {0, 1}}
        assert [channel.schema.names[i] for i in delta.touched(channel.schema)] == list(changed)
        for meta in channel.schema.tensors:
            elements = delta.elements_of(meta)
            assert elements is None or set(elements.tolist()) >= changed.get(meta.name, set())
        kept = delta.kept()
        payload.fill_(0xAA)
        kept.write(channel.flat)
        assert fingerprint(channel.received()) == fingerprint(named)

    def test_tracked_weights(self) -> None:
        """Only tracked entries are compared, others may be None, and elements that differ are counted."""
        channel, named = self.tracked()
        assert isinstance(channel.encoding, DeltaEncoding)
        names = channel.schema.names
        tracker = channel.encoding.tracker(channel.schema, [names.index("0.weight")])
        tracker.begin([named[name] for name in names])
        named["0.weight"].view(-1)[3] += 1
        difference = tracker.compare([named[name] if name == "0.weight" else None for name in names])
        assert (difference.changed, difference.total) == (1, named["0.weight"].numel())
        tracker.advance(difference)
        assert fingerprint(dict(zip(names, tracker.weights(), strict=True))) == fingerprint(named)

    def test_first_changes(self) -> None:
        """``bootstrap`` carries the entries that ``bootstraps`` names, whatever the receiver has."""
        channel, named = self.tracked()
        assert isinstance(channel.encoding, DeltaEncoding)
        assert channel.tracker is not None
        payload = channel.tracker.bootstrap(5, channel.lend)
        delta = read_delta(channel.encoding.name, payload, channel.schema)
        assert (delta.base, delta.version) == (5, 5)
        channel.flat.fill_(0xAA)
        delta.write(channel.flat)
        chosen = [channel.schema.names[i] for i in channel.encoding.bootstraps(channel.schema)]
        received = channel.received()
        assert fingerprint({n: received[n] for n in chosen}) == fingerprint({n: named[n] for n in chosen})

    def test_copy_of_a_tracker(self) -> None:
        """A copy remembers the same weights, and keeps them when the tracker advances."""
        channel, named = self.tracked()
        assert channel.tracker is not None
        before, copy = fingerprint(named), channel.tracker.copy()
        named["0.weight"] += 1
        channel.send(named)
        for tracker, expected in ((copy, before), (channel.tracker, fingerprint(named))):
            assert fingerprint(dict(zip(named, tracker.weights(), strict=True))) == expected

    def tracked(self) -> tuple[Channel, dict[str, torch.Tensor]]:
        """Return a channel whose receiver has the weights; skip the test if updates carry all weights."""
        encoding = self.make_encoding()
        if not isinstance(encoding, DeltaEncoding):
            pytest.skip("updates carry all weights")
        named = {name: value.detach() for name, value in mlp(1).named_parameters()}
        channel = Channel(encoding, named)
        channel.send(named)
        return channel, named

    def test_is_known_by_name(self) -> None:
        """The encoding is found by its short name, in a strategy too, and by its name on the wire."""
        encoding = self.make_encoding()
        assert type(resolve_encoding(encoding.label)) is type(encoding)
        assert WeightStrategy(encoding=encoding.label).encoding.name == encoding.name
        assert encoding.name.startswith(encoding.label + "/")
        assert resolve_encoding(encoding) is encoding

    def test_pickles(self) -> None:
        """It travels to workers with the scheme."""
        copy = pickle.loads(pickle.dumps(self.make_encoding()))
        named = dict(mlp(3).named_parameters())
        Channel(copy, named).must_carry(named, "by a pickled copy of the encoding")


class Channel:
    """An encoder and a decoder with nothing but memory between them."""

    def __init__(self, encoding: Encoding, named: Named) -> None:
        self.encoding, self.schema = encoding, WeightSchema.of(named)
        self.lent: list[torch.Tensor] = []
        self._encoder = encoding.whole.encoder(self.schema)
        self._decoder = decoder_for(encoding.whole.name, self.schema)
        self._in_force: Named = {}
        self.flat = torch.zeros(self.schema.nbytes, dtype=torch.uint8)
        self.tracker: Tracker[Any] | None = None
        if isinstance(encoding, DeltaEncoding):
            self.tracker = encoding.tracker(self.schema, None)
        self._version: int | None = None
        self._difference: Any = None

    def lend(self, nbytes: int) -> torch.Tensor:
        """Return memory with other bytes in it, as a buffer has that is used again."""
        self.lent.append(torch.full((nbytes,), 0xAA, dtype=torch.uint8))
        return self.lent[-1]

    def encode(self, named: Named) -> list[torch.Tensor]:
        """Return the payloads of an update to ``named``, which carries all weights the first time."""
        self.lent.clear()
        payloads = self._encode([named[name] for name in self.schema.names])
        assert {payload.data_ptr() for payload in payloads} <= {lent.data_ptr() for lent in self.lent}, (
            "encode() returned a payload that does not begin where memory from lend() of this call does"
        )
        return payloads

    def _encode(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.tracker is None or self._version is None:
            return self._encoder.encode(tensors, self.lend)
        self._difference = self.tracker.compare(tensors)
        payload = self.tracker.encode(self._difference, self._version, self._version + 1, self.lend)
        assert payload is not None
        return [payload]

    def decode(self, payloads: list[torch.Tensor], *, trusted: bool = True) -> list[torch.Tensor]:
        """Return the weights that ``payloads`` decode to.

        Args:
            payloads: payloads of :meth:`encode`.
            trusted: whether no byte of them was changed.
        """
        if self.tracker is None or self._version is None:
            fed = [self._decoder.feed(i, payload, self.lend) for i, payload in enumerate(payloads)]
            values = self._decoder.decode(fed)
            assert len(values) == len(self.schema.tensors), (
                "decode() returns one tensor for each schema entry"
            )
            return values
        if len(payloads) != 1:
            raise FormatError("one delta at a time")
        delta = read_delta(self.encoding.name, payloads[0], self.schema)
        assert not trusted or (delta.base, delta.version) == (self._version, self._version + 1)
        flat = self.flat.clone()
        delta.write(flat)
        return self.schema.views(flat)

    def commit(self) -> None:
        """Have the tracker remember the weights of the last :meth:`encode`."""
        assert self.tracker is not None
        self.tracker.advance(self._difference)

    def received(self) -> Named:
        """Return the weights that the receiver has."""
        return dict(zip(self.schema.names, self.schema.views(self.flat), strict=True))

    def must_carry(self, named: Named, what: str = "an update") -> None:
        """Send ``named``; fail the test unless the same weights arrive."""
        got = self.send(named)
        assert fingerprint(got) == fingerprint(named), f"decoded weights differ from the encoded ones: {what}"

    def send(self, named: Named) -> Named:
        """Encode, decode and settle."""
        given, before = self.encode(named), fingerprint(self._in_force)
        payloads = [payload.clone() for payload in given]
        values = self.decode(payloads)
        assert all(map(torch.equal, payloads, given)), "the payload was changed while it was decoded"
        assert fingerprint(self._in_force) == before, (
            "decode() wrote into the tensors of the update before, which are still in use"
        )
        if self.tracker is not None:
            if self._version is None:
                self.tracker.begin([named[name] for name in self.schema.names])
            else:
                self.commit()
            for view, value in zip(self.schema.views(self.flat), values, strict=True):
                view.copy_(value)
        self._version = 0 if self._version is None else self._version + 1
        self._in_force = dict(zip(self.schema.names, values, strict=True))
        if self.encoding.whole.receiver_copies:
            decoded = fingerprint(self._in_force)
            for payload in payloads:
                payload.fill_(0xAA)
            assert fingerprint(self._in_force) == decoded, (
                "receiver_copies is True, but decode() returned views into the payload"
            )
        return self._in_force
