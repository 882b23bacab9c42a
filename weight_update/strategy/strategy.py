"""Strategies: how weights leave a model and how they enter one."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch.distributed as dist
from tensordict import NonTensorData, TensorDict, TensorDictBase

from weight_update.arguments import require_instance
from weight_update.encodings import Encoding, encoding_from_config, resolve_encoding
from weight_update.errors import LifecycleError, UnsupportedSourceError, undo_on_error
from weight_update.strategy.binding import Binding
from weight_update.strategy.conversion import Convert
from weight_update.strategy.named_weights import (
    EXTRA,
    EXTRA_IN_TENSORDICT,
    ExtractAs,
    NamedWeights,
    Select,
    WeightReader,
)
from weight_update.wire.schema import WeightSchema


@dataclass(frozen=True)
class GatherShards:
    """Options for gathering the weights of a sharded trainer on one rank, a few at a time.

    Every rank creates the same scheme, and makes the same calls of ``init_on_sender``, ``connect``, ``send``
    and ``shutdown``. The first rank of ``group`` is the leader: only this rank communicates with the workers.

    Args:
        group: process group of the trainer's ranks; None for the default process group. The messages between
            the ranks, and shards in CPU memory, travel through another group with the same ranks.
        gather: gather function for weights that are not DTensors. It takes an iterator of ``(name, tensor)``
            with the tensors of this rank, and yields names and whole tensors. It runs on every rank, and all
            ranks ask for the next item together, so it may use collectives; only its items on the leader are
            used. None gathers DTensors, and takes the leader's value of all other tensors.
        batch_bytes: bytes of gathered weights in two batches: one is encoded while the ranks gather the next.
            A tensor that is larger than half of this is a batch by itself.

    Raises:
        ValueError: ``gather`` is not a function, or ``batch_bytes`` is not a positive number.
    """

    group: dist.ProcessGroup | None = None
    gather: Convert | None = None
    batch_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        if self.gather is not None and not callable(self.gather):
            raise ValueError(f"gather= takes a function of an iterator, not {type(self.gather).__name__}")
        if not self.batch_bytes > 0:
            raise ValueError(f"batch_bytes is a positive number of bytes: {self.batch_bytes!r}")

    def members(self) -> list[int]:
        """Return the numbers, in the default process group, of the ranks that take part; the first leads.

        Raises:
            LifecycleError: torch.distributed is not initialized.
            ValueError: ``group`` is not a process group to which this process belongs.
        """
        if self.group is not None and not isinstance(self.group, dist.ProcessGroup):
            raise ValueError(
                "group= takes a process group to which this process belongs, such as mesh.get_group(), not "
                f"{type(self.group).__name__}; a function that gathers is gather="
            )
        if not dist.is_initialized():
            raise LifecycleError("a sharded trainer needs torch.distributed: call init_process_group() first")
        return [int(rank) for rank in dist.get_process_group_ranks(self.group or dist.group.WORLD)]


class WeightStrategy(WeightReader):
    """Rules for reading weights from a source, encoding them, and writing them to a destination.

    A source or destination is an ``nn.Module``, a TensorDict or a (nested or dotted) dict of tensors. A
    source may also be a callable that returns one of these::

        WeightStrategy("state_dict", encoding="patch", select="trainable")

    Args:
        extract_as: ``"tensordict"`` reads parameters and all buffers, and returns weights as a nested
            TensorDict. ``"state_dict"`` reads parameters and persistent buffers, and returns weights as a
            flat dict with dotted names.
        encoding: form in which weights are sent: ``"dense"``, ``"bucket"``, ``"patch"`` or an
            :class:`~weight_update.Encoding`.
        select: weights that updates carry. None: all; ``"trainable"``: parameters that require a gradient,
            and persistent buffers; a list of prefixes (``"head"`` chooses ``head`` and ``head.*``); or a
            function of name and tensor. Receivers may have more weights, which do not change. A
            :class:`~weight_update.PatchEncoding` also sends all weights once, in ``connect()``.
        convert: function for receivers that hold the model in another format. It takes an iterator of
            ``(name, tensor)``, and returns an iterator of the receiver's names and tensors. It runs on the
            sender, at each update, and must yield the same names in the same order each time. With
            ``convert``, extra state is not sent.
        max_in_flight: largest number of chunks (buckets) in the sender's memory. A version is then sent in
            chunks while it is still being converted and encoded. With 1, the stages are strictly serial; with
            2, conversion and transfer overlap. A worker that joins, or missed a version, gets weights with
            the next ``send``. The encoding must support chunks, as ``BucketEncoding`` does. None builds each
            version in the sender's memory, and keeps it for workers that join or are late.
        gather: :class:`~weight_update.GatherShards` for a trainer whose ranks hold parts of the weights. None
            gathers DTensors, such as those of FSDP2, over the default process group, and treats all other
            tensors as whole. With ``max_in_flight``, no rank holds the whole model.

    Raises:
        ValueError: ``extract_as``, the encoding or the selection is unknown; the message lists the known
            ones. Or ``max_in_flight`` was given with an encoding that does not travel in chunks.
    """

    def __init__(
        self,
        extract_as: ExtractAs = "tensordict",
        *,
        encoding: str | Encoding = "dense",
        select: Select | None = None,
        convert: Convert | None = None,
        max_in_flight: int | None = None,
        gather: GatherShards | None = None,
    ) -> None:
        if extract_as not in get_args(ExtractAs):
            allowed = " or ".join(repr(name) for name in get_args(ExtractAs))
            raise ValueError(f"extract_as must be {allowed}, got {extract_as!r}")
        if isinstance(select, Collection) and not isinstance(select, str):
            known = all(isinstance(prefix, str) for prefix in select)
        else:
            known = select is None or select == "trainable" or callable(select)
        if not known:
            raise ValueError(
                f"unknown selection {select!r} (known: None, 'trainable', a list of prefixes, a function)"
            )
        self.extract_as: ExtractAs = extract_as
        self.encoding: Encoding = resolve_encoding(encoding)
        if convert is not None and not callable(convert):
            raise ValueError(
                f"convert= takes a function of an iterator, not {type(convert).__name__}; several "
                "converters become one with weight_update.convert.chain()"
            )
        if max_in_flight is not None:
            _require_chunks(max_in_flight, self.encoding)
        if gather is not None and not isinstance(gather, GatherShards):
            raise ValueError(
                "gather= takes a GatherShards, such as GatherShards(group) or GatherShards(gather=function), "
                f"not {type(gather).__name__}"
            )
        self.select: Select | None = select
        self.convert: Convert | None = convert
        self.max_in_flight: int | None = max_in_flight
        self.gather: GatherShards | None = gather

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **options: Any) -> WeightStrategy:
        """Return a strategy for the tree that RLinf's YAML files have below ``weight_syncer``.

        The tree is ``{"type": "patch", "patch": {...}}`` or ``{"type": "bucket", "bucket": {...}}``. It may
        be nested in a key ``weight_syncer``. As in RLinf, weights are read as a state dict, and updates carry
        the trainable weights.

        Args:
            config: the tree, as a dict.
            options: arguments of the class that replace these defaults.

        Raises:
            ValueError: a key or value is unknown; the message lists the known ones.
        """
        encoding, needs_convert = encoding_from_config(config)
        if needs_convert and options.get("convert") is None:
            raise ValueError("is_agent=True renames weights for the receiver: give convert= a function too")
        return cls(**{"extract_as": "state_dict", "select": "trainable", "encoding": encoding, **options})

    def __repr__(self) -> str:
        return f"WeightStrategy({self.extract_as!r}, encoding={self.encoding!r})"

    def for_receiver(self) -> WeightStrategy:
        """Return this strategy without the options that only a sender needs, which may not pickle."""
        return WeightStrategy(self.extract_as, encoding=self.encoding)

    def extract_weights(self, source: Any) -> TensorDictBase | dict[str, Any]:
        """Return the weights of ``source`` in the format of this strategy; the tensors are not copied.

        Raises:
            UnsupportedSourceError: ``source`` is of a type that has no weights; the message names the type.
        """
        return self.export(self.named(source))

    def apply_weights(self, destination: Any, weights: Any, inplace: bool = True) -> None:
        """Write ``weights`` into ``destination``: all of them, or none if an error is raised.

        Args:
            destination: module, TensorDict or dict. With ``select``, and an encoding other than
                :class:`~weight_update.PatchEncoding`, it may have more weights, which do not change.
            weights: any source that :meth:`extract_weights` takes.
            inplace: True copies values into the destination's tensors; False points them at the memory of
                ``weights`` instead (nothing is copied where device and dtype agree).

        Raises:
            SchemaMismatchError: names, shapes or kinds of dtype differ; nothing was written.
            UnsupportedSourceError: one of the two is of a type that has no weights, or ``weights`` are on the
                meta device.
        """
        named = self.named(weights)
        named.require_values()
        binding = self.bind(destination)
        schema = WeightSchema.of(named.tensors)
        schema.require_same(binding.schema(), "the destination", more=self.partial)
        binding.check_extra(named.extra)
        values = [value.detach() for value in named.tensors.values()]
        undo = binding.exchange_extra(copy.deepcopy(named.extra))  # a module may keep the object it is given
        with undo_on_error(undo):
            if inplace:
                binding.copy(schema.names, values)
            else:
                binding.switch(schema.names, binding.prepare(schema, values))

    def bind(self, destination: Any) -> Binding:
        """Return the places in ``destination`` that the weights of this strategy are written to.

        Raises:
            UnsupportedSourceError: ``destination`` is of a type that cannot be written.
        """
        return Binding(self.named, destination)

    def export(self, named: NamedWeights) -> TensorDictBase | dict[str, Any]:
        """Return ``named`` in the format of this strategy."""
        named = named.converted()
        if self.extract_as == "state_dict":
            return {**named.tensors, **named.extra}
        tree: dict[str, Any] = {}
        for name, value in {**named.tensors, **named.extra}.items():
            *path, leaf = name.split(".")
            node: Any = tree
            for part in path:
                node = node.setdefault(part, {}) if isinstance(node, dict) else None
            if not isinstance(node, dict) or leaf in node:
                raise UnsupportedSourceError(
                    f"{name!r}: in a TensorDict no weight can be inside another, as 'a.b' inside 'a'; use "
                    "the strategy 'state_dict', or rename the weight"
                )
            if name in named.extra:
                node[EXTRA_IN_TENSORDICT if name == EXTRA else leaf] = NonTensorData(value)
            else:
                node[leaf] = value
        return TensorDict(tree)


def _require_chunks(max_in_flight: int, encoding: Encoding) -> None:
    if not isinstance(max_in_flight, int) or max_in_flight < 1:
        raise ValueError(f"max_in_flight is a number of chunks, at least 1, or None: {max_in_flight!r}")
    if encoding.whole is not encoding or not encoding.whole.in_chunks:
        raise ValueError(
            f"max_in_flight={max_in_flight} needs weights that travel in chunks, which receivers copy out: "
            f"encoding='bucket', or BucketEncoding(bucket_size=...) with load_instant, not {encoding!r}"
        )


def resolve_strategy(strategy: str | WeightStrategy) -> WeightStrategy:
    """Return the strategy of that name, or the strategy itself.

    Raises:
        TypeError: a class was given.
        ValueError: the name is unknown.
    """
    if isinstance(strategy, WeightStrategy):
        return strategy
    require_instance(strategy)
    if strategy not in get_args(ExtractAs):
        known = ", ".join(repr(name) for name in get_args(ExtractAs))
        raise ValueError(
            f"strategy must be {known} or a WeightStrategy, got {strategy!r}; an encoding goes into "
            "WeightStrategy(encoding=...)"
        )
    return WeightStrategy(strategy)  # type: ignore[arg-type]  # checked at run time
