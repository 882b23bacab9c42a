"""What every encoding must do."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import pytest
import torch

from weight_update.chunks import WeightSchema
from weight_update.encodings import Encoding, decoder_for, resolve_encoding
from weight_update.errors import FormatError
from weight_update.strategy import WeightStrategy
from weight_update.testing.models import Zoo, fingerprint, mlp, random_bits, scramble, small_views

__all__ = ["EncodingContract"]

Named = Mapping[str, torch.Tensor]


class EncodingContract:
    """Tests of one encoding; subclass it and write :meth:`make_encoding`."""

    def make_encoding(self) -> Encoding:
        """A fresh encoding."""
        raise NotImplementedError

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
        """What is decoded equals what was encoded, bit for bit."""
        assert fingerprint(Channel(self.make_encoding(), named).send(named)) == fingerprint(named)

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
            assert fingerprint(channel.send(named)) == fingerprint(named)

    def test_update_that_was_not_committed(self) -> None:
        """The update after a failed one is right for a receiver that has neither."""
        named = {"a": random_bits((50,), torch.float32, 0)}
        channel = Channel(self.make_encoding(), named)
        channel.send(named)
        named["a"].copy_(random_bits((50,), torch.float32, 1))
        channel.encode(named)  # lost on its way
        named["a"][:3].fill_(7)
        assert fingerprint(channel.send(named)) == fingerprint(named)

    def test_memory_is_exactly_lent(self) -> None:
        """Payloads lie in what ``lend`` gave, and tensors are not kept alive or changed."""
        named = dict(mlp(1).named_parameters())
        before = fingerprint(named)
        channel = Channel(self.make_encoding(), named)
        payloads = channel.encode(named)
        assert payloads
        assert {id(payload) for payload in payloads} <= {id(lent) for lent in channel.lent}
        assert fingerprint(named) == before

    def test_payload_of_wrong_size(self) -> None:
        """Cut, extended, missing or additional payloads are a FormatError."""
        named = dict(mlp(1).named_parameters())
        channel = Channel(self.make_encoding(), named)
        payloads = channel.encode(named)
        longer = torch.cat([payloads[0], payloads[0].new_zeros(1)])
        for wrong in ([payloads[0][:-1], *payloads[1:]], [longer, *payloads[1:]], [], [*payloads, longer]):
            with pytest.raises(FormatError):
                decoder_for(channel.encoding.name, channel.schema).decode(wrong)

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
        assert fingerprint(Channel(copy, named).send(named)) == fingerprint(named)


class Channel:
    """An encoder and a decoder with nothing but memory between them."""

    def __init__(self, encoding: Encoding, named: Named) -> None:
        self.encoding, self.schema = encoding, WeightSchema.of(named)
        self._encoder, self._decoder = encoding.encoder(self.schema), type(encoding).decoder(self.schema)
        self.lent: list[torch.Tensor] = []

    def lend(self, nbytes: int) -> torch.Tensor:
        """Dirty memory, as a reused buffer is."""
        self.lent.append(torch.full((nbytes,), 0xAA, dtype=torch.uint8))
        return self.lent[-1]

    def encode(self, named: Named) -> list[torch.Tensor]:
        """Payloads of ``named``."""
        return self._encoder.encode([named[name] for name in self.schema.names], self.lend)

    def send(self, named: Named) -> Named:
        """Encode and decode."""
        values = self._decoder.decode([payload.clone() for payload in self.encode(named)])
        return dict(zip(self.schema.names, values, strict=True))
