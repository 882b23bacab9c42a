"""What an encoding is: the extension point between tensors and payload bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from weight_update.errors import FormatError
from weight_update.wire.schema import WeightSchema

__all__ = [
    "Decoder",
    "Delta",
    "DeltaEncoding",
    "Difference",
    "Encoder",
    "Encoding",
    "Lend",
    "Tracker",
    "WholeEncoding",
    "decoder_for",
    "read_delta",
    "register_encoding",
    "resolve_encoding",
]

Lend = Callable[[int], torch.Tensor]
"""Gives a 1-D uint8 tensor of exactly so many bytes, which the transport can send as it stands; on the CPU,
or with :attr:`Encoding.on_gpu` perhaps on a GPU."""


class Encoder(ABC):
    """The sender's half of a whole encoding, for one group of receivers with one schema."""

    @abstractmethod
    def encode(self, tensors: Sequence[torch.Tensor], lend: Lend) -> list[torch.Tensor]:
        """Write ``tensors`` (in schema order, live) into payloads obtained from ``lend``.

        On a GPU it waits until they are written.

        Returns:
            the payloads, in the order in which they are to be decoded; at least one.
        """

    def stream(self, tensors: Iterator[torch.Tensor], lend: Lend) -> Iterator[torch.Tensor]:
        """As :meth:`encode`, one payload after the other; see :attr:`WholeEncoding.in_chunks`.

        Takes the tensors that a payload needs after memory for it was lent, and keeps none of them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not encode in chunks")


class Decoder(ABC):
    """The receiver's half of a whole encoding."""

    in_chunks: ClassVar[bool] = False
    """Whether :meth:`stream` may be used in place of :meth:`feed` and :meth:`decode`."""

    is_flat: ClassVar[bool] = False
    """Whether the one payload is the flat buffer that the schema describes."""

    def feed(self, index: int, payload: torch.Tensor, allocate: Lend) -> torch.Tensor:
        """Called for each payload when it arrives, in order; what it returns is later given to ``decode``.

        Args:
            index: its place among the payloads of the update, from 0.
            payload: 1-D uint8 tensor. What is not returned is written anew: it was read, also on a GPU.
            allocate: gives memory in which no weights lie; it stays so while it is among what was returned.
        """
        del index, allocate
        return payload

    def stream(self, index: int, payload: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Called for each payload when it arrives, in order: the weights that are whole with it.

        Args:
            index: its place among the payloads of the update, from 0.
            payload: 1-D uint8 CPU tensor.

        Returns:
            position in the schema and value of each; the values are valid until the next call.

        Raises:
            FormatError: the payload does not fit the schema, or does not follow the one before.
        """
        raise NotImplementedError(f"{type(self).__name__} does not decode in chunks")

    @abstractmethod
    def decode(self, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One tensor for each schema entry; they may be views into ``payloads``.

        Raises:
            FormatError: the payloads do not fit the schema.
        """


class Encoding(ABC):
    """How weights become payloads. Instances are immutable and picklable.

    There are two kinds: a :class:`WholeEncoding` sends all weights each time, a :class:`DeltaEncoding` what
    changed.
    """

    name: ClassVar[str]
    """Name and version on the wire, e.g. ``"dense/1"``; a new layout takes a new number."""

    on_gpu: ClassVar[bool] = False
    """Whether payloads may lie on a GPU, on both ends; if not they are always on the CPU."""

    @property
    def label(self) -> str:
        """The name without its version, as shown in reports."""
        return self.name.partition("/")[0]

    @property
    def keeps(self) -> bool:
        """Whether receivers copy weights out of payloads, so that payloads are free when it is applied."""
        return False

    @property
    def compressed_with(self) -> str:
        """Label of the compression of payloads, as shown in reports; empty for none."""
        return ""

    @property
    @abstractmethod
    def whole(self) -> WholeEncoding:
        """The encoding of updates that carry all weights."""


class WholeEncoding(Encoding):
    """Recipe for an encoder and a decoder; each update carries all weights."""

    @property
    def whole(self) -> WholeEncoding:
        """Itself."""
        return self

    @property
    def in_chunks(self) -> bool:
        """Whether a version can be encoded, sent and read chunk by chunk: by :meth:`Encoder.stream`.

        Then :meth:`payload_sizes` has one size for each chunk, and receivers copy out what they need when
        a chunk arrives.
        """
        return False

    @abstractmethod
    def encoder(self, schema: WeightSchema) -> Encoder:
        """A fresh encoder for ``schema``."""

    def payload_sizes(self, schema: WeightSchema) -> list[int]:
        """Bytes of each payload of an update where that is known beforehand: memory is reserved for two."""
        del schema
        return []

    @classmethod
    @abstractmethod
    def decoder(cls, schema: WeightSchema) -> Decoder:
        """A decoder for ``schema``; all it needs to know beside comes with the payloads."""


class Delta(Protocol):
    """What an update changes, on the receiver.

    Attributes:
        base: the version it changes.
        version: the version it leads to.
    """

    base: int
    version: int

    def write(self, flat: torch.Tensor) -> None:
        """Change ``flat`` (1-D uint8, the buffer of the schema) from base to version; must not fail."""

    def touched(self, schema: WeightSchema) -> list[int]:
        """Positions of the schema entries that it changes, in ascending order."""


@dataclass(frozen=True)
class Difference:
    """What a :class:`Tracker` found; trackers derive their own from it.

    Attributes:
        changed: number of elements that differ.
        total: number of elements looked at.
    """

    changed: int
    total: int


_D = TypeVar("_D", bound=Difference)


class Tracker(ABC, Generic[_D]):
    """The sender's memory of the weights that a set of receivers has.

    Call sequence: ``begin`` once; then for each update ``compare`` and ``encode``, which change nothing, and
    ``advance`` when receivers are to have it.
    """

    @abstractmethod
    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remember ``tensors`` (in schema order, live)."""

    @abstractmethod
    def compare(self, tensors: Sequence[torch.Tensor | None]) -> _D:
        """What differs between ``tensors`` and what is remembered; those not tracked may be None."""

    @abstractmethod
    def encode(self, difference: _D, base: int, version: int, lend: Lend) -> torch.Tensor | None:
        """One payload that tells ``difference``; None if sending all weights costs less."""

    @abstractmethod
    def bootstrap(self, version: int, lend: Lend) -> torch.Tensor:
        """One payload that tells the entries that joining receivers are sent, as a change of ``version``."""

    @abstractmethod
    def advance(self, difference: _D) -> None:
        """Remember the weights that ``difference`` leads to."""

    @abstractmethod
    def weights(self) -> list[torch.Tensor]:
        """What is remembered, in schema order; views that later calls change."""

    @abstractmethod
    def copy(self) -> Tracker[_D]:
        """Another one that remembers the same."""


class DeltaEncoding(Encoding):
    """Recipe for sending what changed; whole updates go to receivers that just joined or missed one."""

    @property
    def keeps(self) -> bool:
        """True: deltas are written into memory of the receiver's own."""
        return True

    @abstractmethod
    def tracker(self, schema: WeightSchema, tracked: Sequence[int] | None) -> Tracker[Any]:
        """A fresh tracker.

        Args:
            schema: of all weights, in the receivers' dtypes.
            tracked: positions of the entries that updates may change; None for all.
        """

    def bootstraps(self, schema: WeightSchema) -> list[int]:
        """Positions of the entries that a joining receiver is sent; it must have the others already.

        Raises:
            ValueError: options that select entries select none of ``schema``.
        """
        return list(range(len(schema.tensors)))

    @classmethod
    @abstractmethod
    def read(cls, payload: torch.Tensor, schema: WeightSchema) -> Delta:
        """The delta in ``payload``.

        Raises:
            FormatError: it does not fit the schema, or is not one.
        """


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
    """The decoder for a whole encoding named in a chunk.

    Raises:
        FormatError: no such encoding is registered here.
    """
    cls = _registry.get(wire_name)
    if cls is None or not issubclass(cls, WholeEncoding):
        raise _unknown(wire_name, [k for k, v in _registry.items() if issubclass(v, WholeEncoding)])
    return cls.decoder(schema)


def read_delta(wire_name: str, payload: torch.Tensor, schema: WeightSchema) -> Delta:
    """The delta in the payload of a chunk that names a delta encoding.

    Raises:
        FormatError: no such encoding is registered here, or the payload is wrong.
    """
    cls = _registry.get(wire_name)
    if cls is None or not issubclass(cls, DeltaEncoding):
        raise _unknown(wire_name, [k for k, v in _registry.items() if issubclass(v, DeltaEncoding)])
    return cls.read(payload, schema)


def _unknown(wire_name: str, known: list[str]) -> FormatError:
    return FormatError(f"unknown encoding {wire_name!r:.40} (known: {', '.join(sorted(known))})")
