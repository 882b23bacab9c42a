"""What an encoding is: the extension point between tensors and payload bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import torch

from weight_update.chunks import WeightSchema
from weight_update.errors import FormatError

__all__ = ["Decoder", "Encoder", "Encoding", "decoder_for", "register_encoding", "resolve_encoding"]

Lend = Callable[[int], torch.Tensor]
"""Gives a 1-D uint8 CPU tensor of exactly so many bytes, which the transport can send as it stands."""


class Encoder(ABC):
    """The sender's half of an encoding, for one group of receivers with one schema.

    Calls come in this order: ``encode`` once an update, then ``committed`` when receivers acknowledged
    it, or nothing when they did not.
    """

    @abstractmethod
    def encode(self, tensors: Sequence[torch.Tensor], lend: Lend) -> list[torch.Tensor]:
        """Write ``tensors`` (in schema order, live) into payloads obtained from ``lend``.

        Returns:
            the payloads, in the order in which they are to be decoded; at least one.
        """

    def committed(self, version: int) -> None:  # noqa: B027 - most encoders keep no snapshot
        """The update ``version`` was acknowledged; encoders with a snapshot advance it here."""


class Decoder(ABC):
    """The receiver's half of an encoding."""

    @abstractmethod
    def decode(self, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One tensor for each schema entry; they may be views into ``payloads``.

        Raises:
            FormatError: the payloads do not fit the schema.
        """


class Encoding(ABC):
    """Recipe for an encoder and a decoder. Instances are immutable and picklable."""

    name: ClassVar[str]
    """Name and version on the wire, e.g. ``"dense/1"``; a new layout takes a new number."""

    @property
    def label(self) -> str:
        """The name without its version, as shown in reports."""
        return self.name.partition("/")[0]

    @abstractmethod
    def encoder(self, schema: WeightSchema) -> Encoder:
        """A fresh encoder for ``schema``."""

    @classmethod
    @abstractmethod
    def decoder(cls, schema: WeightSchema) -> Decoder:
        """A decoder for ``schema``; all it needs to know beside comes with the chunks."""


_registry: dict[str, type[Encoding]] = {}
_E = TypeVar("_E", bound=type[Encoding])


def register_encoding(cls: _E) -> _E:
    """Class decorator: make an encoding known by its ``name``, on both ends."""
    _registry[cls.name] = cls
    return cls


def resolve_encoding(encoding: str | Encoding) -> Encoding:
    """An encoding from its short name, or the encoding itself.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    if isinstance(encoding, Encoding):
        return encoding
    for name, cls in _registry.items():
        if encoding == name.partition("/")[0]:
            return cls()
    known = sorted(name.partition("/")[0] for name in _registry)
    raise ValueError(f"unknown encoding {encoding!r} (known encodings: {', '.join(known)})")


def decoder_for(wire_name: str, schema: WeightSchema) -> Decoder:
    """The decoder for an encoding named in a chunk.

    Raises:
        FormatError: the encoding is not registered here.
    """
    try:
        cls = _registry[wire_name]
    except KeyError:
        known = ", ".join(sorted(_registry))
        raise FormatError(f"unknown encoding {wire_name!r:.40} (known: {known})") from None
    return cls.decoder(schema)
