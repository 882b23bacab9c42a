"""One version on its way to workers, chunk by chunk, while the next chunk is still being put together."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from weight_update.encodings import Encoder
from weight_update.errors import SchemaMismatchError, SyncTimeoutError
from weight_update.sender.buffers import EncodedUpdate, Slot, VersionId
from weight_update.sender.workers import WorkerState
from weight_update.wire.frames import Kind, WeightChunk
from weight_update.wire.memory import memory_identity
from weight_update.wire.schema import WeightSchema
from weight_update.wire.updates import Step, frame_of

__all__ = ["Pipeline"]


@dataclass
class _Chunk:
    """What was sent and is not yet taken by all of ``readers``."""

    index: int
    slot: Slot
    readers: set[int]
    since: float


class Pipeline:
    """Carries one version from whoever converts and encodes it to workers that take the same bytes.

    The caller's thread converts and encodes. Frames to workers whose link waits for them are written by a
    thread for each; all others by the caller.

    Args:
        step: which version.
        states: the workers, each ready for another version. The sender's lock is held.
        limit: how many chunks there are at most: one being filled, the others sent and not yet taken by all.
        timeout: seconds that a worker has to take a chunk.
        borrow: gives a slot for a payload of any size, with one user; may wait.
        write: sends a frame to a worker, or loses the worker where that fails.
        changed: the sender's lock.

    Attributes:
        seconds: what the caller spent: ``convert``, ``encode``, ``send``.
        payload_bytes: size of all chunks that were sent.
    """

    def __init__(
        self,
        step: Step,
        states: Sequence[WorkerState],
        *,
        limit: int,
        timeout: float,
        borrow: Callable[[], Slot],
        write: Callable[[WorkerState, WeightChunk], None],
        changed: threading.Condition,
    ) -> None:
        self.step = step
        self.seconds = dict.fromkeys(("convert", "encode", "send"), 0.0)
        self.payload_bytes = 0
        self._states = {worker.idx: worker for worker in states}
        self._limit, self._timeout = limit, timeout
        self._borrow, self._write, self._changed = borrow, write, changed
        self._lent: Slot | None = None
        self._under_way: list[_Chunk] = []
        slow = [worker for worker in states if not worker.link.quick]
        self._feeders = {worker.idx: _Feeder(worker, write, changed) for worker in slow}
        version_id = VersionId(step.version)
        for worker in states:
            worker.pipeline, worker.since = self, time.monotonic()
            worker.hold("inflight", EncodedUpdate(version_id, [], []))

    # -- the caller's side -------------------------------------------------------------------------

    def run(
        self,
        encoder: Encoder,
        schema: WeightSchema,
        encoding: str,
        count: int,
        tensors: Iterator[torch.Tensor],
    ) -> None:
        """Send the whole version; returns when its last chunk was handed over.

        Ends early if no worker is left. Whatever ``tensors`` raises reaches the caller after the workers were
        told to forget this version.

        Args:
            encoder: makes the chunks.
            schema: of what travels.
            encoding: name on the wire.
            count: number of chunks.
            tensors: in schema order; see :meth:`checked`.
        """
        start = time.perf_counter()
        try:
            for index, payload in enumerate(encoder.stream(tensors, self._lend)):
                self._send(frame_of(self.step, schema, encoding, index, count, payload))
                if not self._states:
                    break
        except BaseException:
            self._abort()
            raise
        finally:
            with self._changed:
                self._give_back_lent()
            for feeder in self._feeders.values():
                feeder.put(None)
            spent = time.perf_counter() - start
            self.seconds["encode"] = spent - self.seconds["convert"] - self.seconds["send"]

    def checked(
        self, schema: WeightSchema, items: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[torch.Tensor]:
        """The tensors of ``items``, as long as they are those of ``schema``.

        Raises:
            SchemaMismatchError: they are not.
        """
        places: dict[int, object] = {}
        tied = {position for pair in schema.ties for position in pair}
        for position, meta in enumerate(schema.tensors):
            start = time.perf_counter()
            name, tensor = next(items, (None, None))
            self.seconds["convert"] += time.perf_counter() - start
            if tensor is None:
                raise _mismatch(f"{meta.name!r} was to come, and nothing came")
            if (name, tensor.shape, tensor.dtype) != (meta.name, meta.shape, meta.dtype):
                found = f"{name!r} {tuple(tensor.shape)} {tensor.dtype}"
                raise _mismatch(f"{found} came where {meta.name!r} {meta.shape} {meta.dtype} was to come")
            if position in tied and places.setdefault(meta.offset, memory_identity(tensor)) != (
                memory_identity(tensor)
            ):
                raise _mismatch(f"{meta.name!r} shared the memory of another weight and no longer does")
            yield tensor
            del tensor
        for name, _ in items:
            raise _mismatch(f"{name!r} came after the last")

    def _lend(self, nbytes: int) -> torch.Tensor:
        start = time.perf_counter()
        while late := self._await_room():
            self._give_up(late)
        self._lent = self._borrow()
        self.seconds["send"] += time.perf_counter() - start
        return self._lent.buffer.tensor[:nbytes]

    def _await_room(self) -> list[WorkerState]:
        """Wait until one more chunk may be made; the workers that do not let it be, if there are some."""
        with self._changed:
            while len(self._under_way) >= self._limit:
                oldest = self._under_way[0]
                left = oldest.since + self._timeout - time.monotonic()
                if left <= 0:
                    return [self._states[idx] for idx in oldest.readers]
                self._changed.wait(left)
        return []

    def _send(self, chunk: WeightChunk) -> None:
        assert self._lent is not None
        start = time.perf_counter()
        with self._changed:
            states = list(self._states.values())
            if not states:
                return
            sent = _Chunk(chunk.header["index"], self._lent, set(self._states), time.monotonic())
            self._under_way.append(sent)
            self._lent = None
        self.payload_bytes += chunk.payload_bytes
        slow = [worker.link for worker in states if worker.idx in self._feeders]
        if len(slow) > 1 and chunk.payload is not None:
            slow[0].expect(chunk.payload, slow)
        for worker in states:
            if worker.idx in self._feeders:
                self._feeders[worker.idx].put(chunk)
            else:
                self._write(worker, chunk)
        self.seconds["send"] += time.perf_counter() - start

    def _give_up(self, states: list[WorkerState]) -> None:
        """Go on without workers that do not take a chunk in time; they keep the version they have."""
        for worker in states:
            with self._changed:
                worker.failures[self.step.version] = SyncTimeoutError(
                    f"did not read a chunk of it within {self._timeout:g} s: it is stopped or too slow; it "
                    "gets all weights with the next send() (or raise timeout=)"
                )
            self._forget(worker)

    def _abort(self) -> None:
        for worker in list(self._states.values()):
            self._forget(worker)

    def _forget(self, worker: WorkerState) -> None:
        """Have a worker forget what it has of this version."""
        with self._changed:
            worker.hold("inflight", None)
            self.leave(worker, reading=worker.may_read)
        aborted = WeightChunk(Kind.ABORT, {"version": self.step.version})
        if worker.idx in self._feeders:
            self._feeders[worker.idx].put(aborted)
        else:
            self._write(worker, aborted)

    # -- the workers' side; the sender's lock is held ----------------------------------------------

    def taken(self, worker: WorkerState, index: int) -> None:
        """A worker has read the chunks up to ``index``."""
        for chunk in [chunk for chunk in self._under_way if chunk.index <= index]:
            chunk.readers.discard(worker.idx)
        self._free()

    def leave(self, worker: WorkerState, *, reading: bool) -> None:
        """A worker has all, or will not have it.

        Args:
            worker: which.
            reading: whether it may still read what it was sent; that memory is then not used again.
        """
        worker.pipeline, worker.former = None, self
        if self._states.pop(worker.idx, None) is None:
            return
        for chunk in self._under_way:
            if worker.idx in chunk.readers:
                chunk.readers.discard(worker.idx)
                chunk.slot.abandoned |= reading
        self._free()

    def busy(self, worker: WorkerState) -> bool:
        """Whether a thread still writes to a worker that left."""
        feeder = self._feeders.get(worker.idx)
        return feeder is not None and not feeder.done

    def _free(self) -> None:
        for chunk in [chunk for chunk in self._under_way if not chunk.readers]:
            self._under_way.remove(chunk)
            chunk.slot.users -= 1
        self._changed.notify_all()

    def _give_back_lent(self) -> None:
        if self._lent is not None:
            self._lent.users -= 1
            self._lent = None
            self._changed.notify_all()


class _Feeder(threading.Thread):
    """Writes frames to one worker, in order, until it is given None; then it is ``done``, which is told."""

    def __init__(
        self,
        worker: WorkerState,
        write: Callable[[WorkerState, WeightChunk], None],
        changed: threading.Condition,
    ) -> None:
        super().__init__(name=f"weight_update-pipeline-{worker.idx}", daemon=True)
        self.done = False
        self._peer, self._write, self._changed = worker, write, changed
        self._frames: queue.SimpleQueue[WeightChunk | None] = queue.SimpleQueue()
        self.put = self._frames.put
        self.start()

    def run(self) -> None:
        try:
            while (chunk := self._frames.get()) is not None:
                self._write(self._peer, chunk)
        finally:
            with self._changed:
                self.done = True
                self._changed.notify_all()


def _mismatch(problem: str) -> SchemaMismatchError:
    return SchemaMismatchError(
        "the weights are not those agreed on in connect(); nothing of them is applied:", (problem,)
    )
