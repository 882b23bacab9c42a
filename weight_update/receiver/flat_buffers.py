"""Flat buffers in which a receiver keeps weights while versions come and go."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from weight_update.encodings import Delta
from weight_update.encodings.dense import copy_tensors, takes_bytes
from weight_update.errors import SchemaMismatchError
from weight_update.receiver.elements import Elements, few_elements, read_elements, write_elements
from weight_update.receiver.targets import StagedUpdate, Storage, Target, with_own_buffers
from weight_update.strategy.binding import Binding, count_writes
from weight_update.transports.memory_limits import require_memory
from weight_update.wire.memory import digest
from weight_update.wire.schema import WeightSchema
from weight_update.wire.unchanged import TensorPlaces

_MANY = 256  # tensors
_SMALL = 4096  # bytes; pointing a tensor at other memory takes as long as copying a few thousand bytes
_LARGE = 1 << 20  # bytes; for less, finding out how much memory is left is not worth its time
_WRITES = operator.attrgetter("_version")


class MissingBaseError(Exception):
    """An update changes weights that this receiver does not have, so it must ask for all weights."""


class FlatBuffer(Storage):
    """A flat buffer that a model of many small tensors lies in, so that a version enters it by one copy.

    Pointing 5,000 tensors of 1 KB at other memory takes over 5 ms; copying their 5 MB takes less than one.

    Attributes:
        values: one tensor for each schema entry: a view into the flat buffer, or for a module's buffer a
            copy where :func:`with_own_buffers` makes one.
    """

    def __init__(self, schema: WeightSchema, binding: Binding) -> None:
        super().__init__(schema)
        self._binding = binding
        with torch.inference_mode(False):  # a forward pass with the model may need gradients
            self._flat = torch.empty(schema.nbytes, dtype=torch.uint8, device="cpu")
            views = schema.views(self._flat)
        self.values = with_own_buffers(schema, binding, views)
        apart = [i for i, view in enumerate(views) if view is not self.values[i]]
        self._apart = [self.values[i] for i in apart], [views[i] for i in apart]
        self._places = TensorPlaces(self.values)
        # The model's tensors if they lie here, from begin() to switch().
        self._inside: list[torch.Tensor] = []

    @staticmethod
    def suits(schema: WeightSchema, binding: Binding) -> bool:
        """Return whether a model has many small tensors on the CPU (or meta), in the dtypes of ``schema``."""
        count = len(schema.names)
        if count < _MANY or not 0 < schema.nbytes <= _SMALL * count:
            return False
        tensors = binding.tensors(schema.names)
        return all(
            (tensor.is_cpu or tensor.is_meta) and tensor.dtype == dtype
            for tensor, dtype in zip(tensors, schema.dtypes, strict=True)
        )

    def _find_inside(self) -> list[torch.Tensor]:
        """Return the model's tensors if they lie in the buffer, else none."""
        tensors = self._binding.tensors(self.schema.names)
        return tensors if self._places.same(tensors) else []

    def stage(self, update: StagedUpdate, target: Target) -> None:
        """Do nothing: the payload is copied as it is."""

    def begin(self, update: StagedUpdate, target: Target) -> None:
        """Make the update lie in its payload instead, if the model does not suit the buffer any more.

        Until forward passes wait, the program may move the model's tensors or cast them.
        """
        same = target.binding is self._binding
        self._inside = self._find_inside() if same else []
        if self._inside:
            return
        values = update.values
        if not same or not all(map(operator.is_, self._binding.prepare(self.schema, values), values)):
            update.storage, update.values = Storage(self.schema), target.prepare(self.schema, values)

    def switch(self, update: StagedUpdate, target: Target) -> None:
        inside, self._inside = self._inside, []
        count_writes(inside)  # before the copy, because begin() left them in the processor's caches
        # Unlike torch, numpy starts no threads, which hang in forked processes.
        np.copyto(self._flat.numpy(), update.payloads[0].numpy())
        copy_tensors(*self._apart, "applying weights", serial=True)
        if not inside:
            self._binding.switch(self.schema.names, self.values)
            # The buffer moves with the model, as into shared memory.
            self._places = TensorPlaces(self._binding.tensors(self.schema.names))
        update.used_up, update.payloads, update.values = update.payloads, [], self.values


class OwnCopy(Storage):
    """A copy of all weights, in a flat buffer that later updates change in place.

    The model's tensors point into the flat buffer where dtype and device agree. All others, and the buffers
    that :func:`with_own_buffers` copies, are copies, which each update renews.

    Args:
        schema: layout of the buffer.
        binding: tensors of the model; None keeps weights only.
        owns: returns whether a payload is memory of this receiver, which the buffer may take over.

    Attributes:
        values: one view for each schema entry, into the buffer in force.
    """

    def __init__(
        self, schema: WeightSchema, binding: Binding | None, owns: Callable[[torch.Tensor], bool]
    ) -> None:
        super().__init__(schema)
        self._binding, self._owns = binding, owns
        self._flat = torch.empty(0, device="cpu")
        self._next = self._flat, list[torch.Tensor]()  # the staged buffer and its views; then those in force
        self._version: int | None = None
        # How often each of the model's tensors was written to when an update was complete, and its place.
        self._writes: list[int] = []
        self._places = TensorPlaces([])
        self._counts: list[int] = []  # how much count_writes() adds for each; tied tensors have one count
        self._overwritten = False  # by this worker, before the model was replaced
        self._required: list[torch.Tensor] = []  # the model's tensors, from require() to apply()
        self._copies: list[int] = []  # positions of the model's tensors that do not lie in the buffer
        # Elements that the staged patch changes, if the buffer has them already: as they become, and were.
        self._ahead: list[Elements] = []
        self._before: list[Elements] = []
        self.values: list[torch.Tensor] = []

    # -- as the storage of an update ---------------------------------------------------------------

    def stage(self, update: StagedUpdate, target: Target) -> None:
        """Copy all weights into a new buffer, or check that changes fit the weights in force.

        A payload of this receiver that is a whole buffer is taken over, not copied.
        """
        self.take_back()
        if update.base is not None:
            self.require(update.base)
            self._write_ahead(update.deltas)
            return
        payloads, nbytes = update.payloads, self.schema.nbytes
        whole = next((one for one in payloads if one.numel() == nbytes and self._owns(one)), None)
        if whole is None or whole.device != self.device:
            flat = self._allocate()
            views = self.schema.views(flat)
            copy_tensors(views, update.values, "applying weights", serial=True)
        else:
            flat, views = whole, list(update.values)
        self._next, update.values = (flat, views), list(views)
        update.payloads = [one for one in payloads if one is flat]
        update.used_up = [one for one in payloads if one is not flat]
        super().stage(update, target)

    def begin(self, update: StagedUpdate, target: Target) -> None:
        """Check changes again: while the update waited, the worker may have written into its weights."""
        if update.base is None:
            super().begin(update, target)
        else:
            self.require(update.base)

    def switch(self, update: StagedUpdate, target: Target) -> None:
        if update.deltas:
            self.apply(update.deltas, update.version)
            update.deltas = []
        if update.base is not None:  # a model's tensors are changed by apply()
            if target.binding is None:
                target.write(self.schema.names, update.values, update.version)
            return
        before = self._tensors()
        writes = _writes_of(before)
        target.write(self.schema.names, update.values, update.version)
        self._flat, self.values = self._next
        self._version, self._overwritten = update.version, False
        self._find_copies()
        if all(map(operator.is_, before, self._tensors())):  # none was on the meta device
            # Not as found: the worker may have written since. Both write() and _find_copies() count once.
            self._writes = _sum(writes, self._counts, self._counts)

    # -- the weights -------------------------------------------------------------------------------

    def adopt(self, version: int, tensors: Mapping[str, torch.Tensor], digests: Sequence[str | None]) -> None:
        """Begin with the weights that the model has.

        ``version`` is the sender's number of them. ``digests`` has the sender's digest for each schema entry
        that must be equal, and None for the others.

        Raises:
            SchemaMismatchError: weights are missing or differ; the error lists them.
        """
        names = self.schema.names
        missing = [name for name in names if name not in tensors]
        if missing or len(digests) != len(names):
            raise SchemaMismatchError(
                "init_sync=False needs a model with the sender's weights on each receiver; missing:",
                tuple(missing),
            )
        flat = self._allocate()
        views = self.schema.views(flat)
        copy_tensors(views, [tensors[name].detach() for name in names], "comparing weights", serial=True)
        different = tuple(
            f"{name}: differs from the sender's"
            for name, view, expected in zip(names, views, digests, strict=True)
            if expected is not None and digest(view) != expected
        )
        if different:
            raise SchemaMismatchError(
                "the receiver's first weights differ from the sender's; load the same weights, or let "
                "init_sync send them:",
                different,
            )
        self._flat, self.values, self._version = flat, views, version
        self._find_copies()

    def bind(self, binding: Binding | None) -> None:
        """Keep another model current, which has :attr:`values` already.

        Writes of the worker into the model before stay remembered.
        """
        self.unbind()
        self._binding = binding
        if self.values:  # else the first weights are still to come
            self._find_copies()

    def unbind(self) -> None:
        """Keep no model current, and remember whether the worker wrote into its weights."""
        try:
            written = not self._untouched(self._tensors())
        except SchemaMismatchError:  # the model before has lost tensors
            written = True
        self._overwritten = self._overwritten or written
        self._binding, self._writes, self._places = None, [], TensorPlaces([])

    def require(self, base: int) -> None:
        """Check that a change of version ``base`` may be applied, and find the tensors that it will change.

        Raises:
            MissingBaseError: another version is in force, or the worker wrote into its weights.
        """
        if base != self._version:
            raise MissingBaseError(
                f"the delta applies to version {base}, but version {self._version} is in force"
            )
        tensors = self._tensors()
        if self._overwritten or not self._untouched(tensors):
            raise MissingBaseError(
                "this worker wrote into its weights, as load_state_dict() does, or received another model "
                "that has the same parameters: use one scheme for both models, or no patches"
            )
        self._required = tensors

    def forget(self) -> None:
        """Refuse changes from now on, because the weights in force are not known any more."""
        self._version = None

    def apply(self, deltas: Sequence[Delta], version: int) -> None:
        """Change the weights in force; :meth:`require` was called just before."""
        if self._binding is not None:
            self._binding.finish_kernels()
        tensors, self._required = self._required, []
        ahead, self._ahead, self._before = self._ahead, [], []
        self._version = None  # if an error ends this halfway, no change fits any more
        if ahead:
            write_elements(tensors, ahead)
        else:
            self._write(deltas)
        if self._binding is not None:
            self._binding.finish_kernels()
            count_writes(tensors)
            # Not as found: the worker may have written while the changes were applied, or since.
            self._writes = _sum(self._writes, self._counts)
        self._version = version

    def _write(self, deltas: Sequence[Delta]) -> None:
        """Write changes into the buffer, and renew the model's tensors that are copies."""
        for delta in deltas:
            delta.write(self._flat)
        if self._binding is not None and self._copies:
            touched = {i for delta in deltas for i in delta.touched(self.schema)}
            stale = [i for i in self._copies if i in touched]
            names = tuple(self.schema.names[i] for i in stale)
            self._binding.copy(names, [self.values[i] for i in stale], counted=False)

    def _write_ahead(self, deltas: Sequence[Delta]) -> None:
        """Write changes of few elements into the buffer, if the model's tensors are copies of it.

        Inside the gate, :meth:`apply` then writes these elements into the model, instead of whole tensors.
        """
        on_cpu = self._copies and self._flat.is_cpu
        positions = few_elements(deltas, self.schema, self._copies) if on_cpu else {}
        if positions and all(takes_bytes(self._required[i], self.values[i]) for i in positions):
            self._before = read_elements(self.values, positions)
            for delta in deltas:
                delta.write(self._flat)
            self._ahead = read_elements(self.values, positions)

    def take_back(self) -> None:
        """Take back what :meth:`stage` wrote into the buffer, if that is not in force."""
        self._ahead = []
        if self._before:
            write_elements(self.values, self._before, serial=True)
            self._before = []

    @property
    def device(self) -> torch.device:
        """Device of the buffer."""
        return torch.device("cpu") if self._binding is None else self._binding.home

    def _allocate(self) -> torch.Tensor:
        return new_buffer(self.schema.nbytes, self.device)

    def _find_copies(self) -> None:
        """Find out which of the model's tensors do not lie in the buffer, and how writes are counted."""
        tensors = self._tensors()
        self._copies = [
            i
            for i, (tensor, value) in enumerate(zip(tensors, self.values, strict=bool(tensors)))
            if tensor.data_ptr() != value.data_ptr() or tensor.device != value.device
        ]
        before = _writes_of(tensors)
        count_writes(tensors)
        self._writes, self._places = _writes_of(tensors), TensorPlaces(tensors)
        self._counts = list(map(operator.sub, self._writes, before))

    def _untouched(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether nobody but the receiver has written to the model's tensors, or moved them."""
        return _writes_of(tensors) == self._writes and self._places.same(tensors)

    def _tensors(self) -> list[torch.Tensor]:
        return [] if self._binding is None else self._binding.tensors(self.schema.names)


def new_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return memory for weights; NotEnoughMemoryError if the kernel would end this process for using it."""
    if nbytes >= _LARGE and device.type == "cpu":
        require_memory("a buffer for weights", nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _sum(*numbers: list[int]) -> list[int]:
    return list(map(sum, zip(*numbers, strict=True)))


def _writes_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how often torch has seen each tensor written to; inference tensors have no count."""
    return list(map(_WRITES, itertools.filterfalse(torch.Tensor.is_inference, tensors)))
