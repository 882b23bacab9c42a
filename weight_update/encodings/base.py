"""The encoding interface: the extension point between tensors and payload bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from weight_update.arguments import made_by_label, require_new_name
from weight_update.errors import FormatError
from weight_update.wire.schema import TensorMeta, WeightSchema

CPU = torch.device("cpu")

Lend = Callable[[int], torch.Tensor]
"""Returns a 1-D uint8 tensor of the given size, which the transport can send without a copy.

The tensor is on the CPU, or with :attr:`Encoding.on_gpu` perhaps on a GPU."""


class Encoder(ABC):
    """The sender's half of a whole encoding, for one group of receivers with one schema."""

    @abstractmethod
    def encode(self, tensors: Sequence[torch.Tensor], lend: Lend) -> list[torch.Tensor]:
        """Write ``tensors`` (in schema order, live) into payloads from ``lend``.

        Return one payload or more, in the order in which they are to be decoded. On a GPU, this waits until
        they are written.
        """

    def stream(self, tensors: Iterator[torch.Tensor], lend: Lend) -> Iterator[torch.Tensor]:
        """Encode as :meth:`encode` does, one payload after the other.

        Used where :attr:`~weight_update.WholeEncoding.in_chunks` is True.

        Take the tensors of a payload only after ``lend`` returned its memory, and keep none of them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not encode in chunks")


class Decoder(ABC):
    """The receiver's half of a whole encoding."""

    in_chunks: ClassVar[bool] = False
    """Whether :meth:`stream` may be used in place of :meth:`feed` and :meth:`decode`."""

    is_flat: ClassVar[bool] = False
    """Whether the one payload is the flat buffer that the schema describes."""

    def feed(self, index: int, payload: torch.Tensor, allocate: Lend) -> torch.Tensor:
        """Handle a payload when it arrives; the result is later passed to :meth:`decode`.

        Called for each payload, in order, unless :attr:`is_flat`. A payload that is not returned must have
        been read, also on a GPU, because its memory is reused.

        Args:
            index: position among the payloads of the update, from 0.
            payload: 1-D uint8 tensor.
            allocate: function that returns memory that no weights use; it stays reserved as long as it is a
                result.
        """
        return payload

    def stream(self, index: int, payload: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Return position in the schema and value of each weight that a payload completes.

        Called as :meth:`feed`, for payloads on the CPU. Values are valid until the next call.

        Raises:
            FormatError: the payload does not fit the schema, or does not follow the previous one.
        """
        raise NotImplementedError(f"{type(self).__name__} does not decode in chunks")

    @abstractmethod
    def decode(self, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return one tensor for each schema entry; they may be views into ``payloads``.

        Raises:
            FormatError: the payloads do not fit the schema.
        """


class Encoding(ABC):
    """A way to turn weights into payloads. Instances are immutable and picklable.

    There are two kinds: a :class:`WholeEncoding` sends all weights each time, a :class:`DeltaEncoding` only
    the changes.
    """

    name: ClassVar[str]
    """Name and version on the wire, e.g. ``"dense/1"``; a new layout takes a new number."""

    on_gpu: ClassVar[bool] = False
    """Whether payloads may be on a GPU, on both ends; otherwise they are always on the CPU."""

    @property
    def label(self) -> str:
        """The name without its version, as shown in reports."""
        return self.name.partition("/")[0]

    @property
    def receiver_copies(self) -> bool:
        """Whether receivers copy weights out of payloads, which are free once an update is applied."""
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
    """An encoding whose updates carry all weights."""

    @property
    def whole(self) -> WholeEncoding:
        """This encoding itself."""
        return self

    @property
    def in_chunks(self) -> bool:
        """Whether a version can be encoded, sent and read chunk by chunk.

        :meth:`~weight_update.encodings.Encoder.stream` then encodes it.

        If so, :meth:`payload_sizes` has one size for each chunk, and receivers copy weights out of a chunk
        when it arrives.
        """
        return False

    @abstractmethod
    def encoder(self, schema: WeightSchema) -> Encoder:
        """Return a new encoder for ``schema``."""

    def payload_sizes(self, schema: WeightSchema) -> list[int]:
        """Return the bytes of each payload of an update, if known in advance; memory for two is reserved."""
        return []

    @classmethod
    @abstractmethod
    def decoder(cls, schema: WeightSchema) -> Decoder:
        """Return a decoder for ``schema``; payloads carry everything else that it needs."""


class Delta(Protocol):
    """The changes of an update, on the receiver."""

    @property
    def base(self) -> int:
        """Version that they apply to."""

    @property
    def version(self) -> int:
        """Version that they make."""

    def write(self, flat: torch.Tensor) -> None:
        """Change ``flat`` (1-D uint8, the buffer of the schema) from base to version; must not fail."""

    def touched(self, schema: WeightSchema) -> list[int]:
        """Return the positions of the schema entries that change, in ascending order."""

    def kept(self) -> Delta:
        """Return the same delta without views into its payload, whose memory is used again."""

    def elements_of(self, meta: TensorMeta) -> torch.Tensor | None:
        """Return flat indices of the elements of an entry that change, int64, ascending; None for all."""


@dataclass(frozen=True)
class Difference:
    """Numbers of elements that differ, and that :meth:`Tracker.compare` compared; trackers add to it."""

    changed: int
    total: int


_D = TypeVar("_D", bound=Difference)


class Tracker(ABC, Generic[_D]):
    """The sender's memory of the weights that a set of receivers has.

    Call sequence: ``begin`` once; then for each update ``compare`` and ``encode``, which change nothing, and
    ``advance`` when receivers are sent it. ``advance`` is not called for an update that failed.

    One thread at a time calls a method. Only ``encode`` may overlap with ``bootstrap``, ``weights`` or
    ``copy``, which the thread of a joining worker calls.
    """

    @abstractmethod
    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remember ``tensors`` (in schema order, live)."""

    @abstractmethod
    def compare(self, tensors: Sequence[torch.Tensor | None]) -> _D:
        """Compare the bits of ``tensors`` with the remembered ones; tensors that are not tracked may be None.

        The result does not refer to ``tensors``, which the trainer may change before :meth:`advance`.
        """

    @abstractmethod
    def encode(self, difference: _D, base: int, version: int, lend: Lend) -> torch.Tensor | None:
        """Return one payload with ``difference``, or None if sending all weights costs less."""

    @abstractmethod
    def bootstrap(self, version: int, lend: Lend) -> torch.Tensor:
        """Return one payload with the entries that joining receivers are sent, as a change of ``version``."""

    @abstractmethod
    def advance(self, difference: _D) -> None:
        """Apply ``difference`` to the remembered weights."""

    @abstractmethod
    def weights(self) -> list[torch.Tensor]:
        """Return the remembered weights in schema order, as views that later calls change."""

    @abstractmethod
    def copy(self) -> Tracker[_D]:
        """Return another tracker with the same remembered weights."""


class DeltaEncoding(Encoding):
    """An encoding that sends changes; receivers that join or miss a version get a full update."""

    @property
    def receiver_copies(self) -> bool:
        """True, because deltas are written into the receiver's own memory."""
        return True

    @abstractmethod
    def tracker(self, schema: WeightSchema, tracked: Sequence[int] | None) -> Tracker[Any]:
        """Return a new tracker.

        Args:
            schema: schema of all weights, in the receivers' dtypes.
            tracked: positions of the entries that updates may change; None for all.
        """

    def bootstraps(self, schema: WeightSchema) -> list[int]:
        """Return the positions of the entries that a joining receiver is sent; it must have the others.

        Raises:
            ValueError: options that select entries select none of ``schema``.
        """
        return list(range(len(schema.tensors)))

    @classmethod
    @abstractmethod
    def read(cls, payload: torch.Tensor, schema: WeightSchema) -> Delta:
        """Return the delta in ``payload``, which is on the CPU.

        Raises:
            FormatError: the payload is not a delta, or does not fit the schema.
        """

    @classmethod
    def read_for(cls, payload: torch.Tensor, schema: WeightSchema, device: torch.device) -> Delta:
        """Do the work of :meth:`read` for weights on ``device``; override it if that is faster there."""
        return cls.read(payload, schema)


_registry: dict[str, type[Encoding]] = {}
_E = TypeVar("_E", bound=type[Encoding])
_K = TypeVar("_K", bound=Encoding)


def register_encoding(cls: _E) -> _E:
    """Register an encoding class under its ``name``. Use it as a class decorator; both ends need the class.

    Raises:
        ValueError: the class has no ``name``, or another class has the same one.
    """
    _registry[require_new_name(cls, _registry)] = cls
    return cls


def resolve_encoding(encoding: object) -> Encoding:
    """Return the encoding of a short name, or the given encoding itself.

    Raises:
        TypeError: a class was given.
        ValueError: the name is unknown; the message lists the known names.
    """
    if isinstance(encoding, Encoding):
        return encoding
    return made_by_label(encoding, _registry, "encoding")


def decoder_for(wire_name: str, schema: WeightSchema) -> Decoder:
    """Return the decoder for the whole encoding of a wire name; raise FormatError if there is none."""
    return _registered(wire_name, WholeEncoding).decoder(schema)  # type: ignore[type-abstract]


def read_delta(
    wire_name: str, payload: torch.Tensor, schema: WeightSchema, device: torch.device = CPU
) -> Delta:
    """Return the delta in a payload, for weights on ``device``.

    Raises:
        FormatError: the encoding is unknown, or the payload is not valid.
    """
    return _registered(wire_name, DeltaEncoding).read_for(payload, schema, device)  # type: ignore[type-abstract]


def _registered(wire_name: str, kind: type[_K]) -> type[_K]:
    cls = _registry.get(wire_name)
    if cls is not None and issubclass(cls, kind):
        return cls
    known = ", ".join(sorted(name for name, one in _registry.items() if issubclass(one, kind)))
    raise UnknownEncodingError(
        f"unknown encoding {wire_name!r:.40} (known: {known}); call register_encoding() in every process"
    )


class UnknownEncodingError(FormatError):
    """A chunk names an encoding that is not registered in this process."""
