"""Senders of all schemes and encodings, which send the same changes in turns."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weight_update.cli.measuring.models import ModelSource, change, checksums, tensors_of
from weight_update.cli.measuring.workers import ProcessWorker, RayWorker, Worker, WorkerLateError
from weight_update.errors import NotEnoughMemoryError, SyncTimeoutError, WeightSyncError, WorkerError
from weight_update.report import SyncReport
from weight_update.schemes import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    RayWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)
from weight_update.strategy.strategy import WeightStrategy
from weight_update.text import format_size, plural
from weight_update.transports.memory_limits import available_memory

RAY = "ray"
"""Name of the scheme whose workers are actors."""
SCHEMES: dict[str, Callable[..., WeightSyncScheme]] = {
    "shared": SharedMemWeightSyncScheme,
    "process": MultiProcessWeightSyncScheme,
    "distributed": DistributedWeightSyncScheme,
    RAY: RayWeightSyncScheme,
}
"""Schemes by name, the simplest to set up first."""
ENCODINGS = ("dense", "patch")
"""Names of encodings, the simplest first."""

_ROUNDS = 30
_WARM_UP = 1  # rounds that are not counted
_SHARE_OF_ONE_WAIT = 0.25  # of the time limit, for one scheme to connect or to send
_LEAST_WAIT = 10.0  # seconds for the same: a shorter time limit is no reason to take a worker for late
_CLOSING_SECONDS = 2.0  # that workers may take to end
_AROUND_SECONDS = 4.0  # for closing, and for the end of this process
_MARGIN = 2.0  # times what a round or check took before
_BUFFERS = 3  # of model size in the sender, for each scheme and encoding
_COPIES = 2  # of the model in each worker, likewise

Tell = Callable[[str, float], None]
"""Is told what is being done, and which share of the time limit has passed."""


@dataclass(frozen=True)
class Plan:
    """The options of a measurement.

    Attributes:
        source: the model.
        workers: number of worker processes.
        schemes: names of schemes.
        encodings: names of encodings.
        share: share of the elements that change in each update.
        seconds: time limit of the whole measurement.
    """

    source: ModelSource
    workers: int
    schemes: tuple[str, ...]
    encodings: tuple[str, ...]
    share: float
    seconds: float

    @property
    def smaller_model(self) -> str:
        """Advice for a model that is too large; ``--size`` cannot be given with ``--model``."""
        return "a smaller --size" if self.source.path is None else "a smaller --model"


@dataclass(eq=False)
class Case:
    """One scheme with one encoding.

    Attributes:
        seconds: time of each counted update, from ``send()`` until all workers had applied it.
        report: report of the last update.
        failure: why it was not measured to the end; empty if it was.
    """

    scheme: str
    encoding: str
    sender: WeightSyncScheme
    seconds: list[float] = field(default_factory=list)
    report: SyncReport | None = None
    failure: str = ""

    @property
    def name(self) -> str:
        """Name for the user."""
        return f"{self.scheme} with {self.encoding}"

    @contextlib.contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Set the failure if the block raises an error of the library or of the system."""
        try:
            yield
        except (WeightSyncError, OSError) as error:
            self.failure = str(error)


@dataclass(frozen=True)
class Results:
    """The figures of all cases, and of a plain copy of the weights in the same rounds."""

    cases: Sequence[Case]
    copies: Sequence[float]
    nbytes: int
    tensors: int


def measure(plan: Plan, tell: Tell) -> Results:
    """Measure all schemes and encodings of a plan.

    Raises:
        NotEnoughMemoryError: the models do not fit into memory.
        SyncTimeoutError: the time limit passed before anything was measured.
        WorkerError: a worker could not start.
    """
    clock = _Clock(plan, tell)
    clock.begin("making the model")
    if plan.source.path is None:  # or making it could take all memory
        _check_memory(plan, round(plan.source.megabytes * 1e6))
    model = plan.source.make()
    tensors = tensors_of(model)
    nbytes = sum(value.numel() * value.element_size() for value in tensors.values())
    _check_memory(plan, nbytes)
    cases, workers = list[Case](), list[Worker]()
    try:
        for scheme, encoding in itertools.product(plan.schemes, plan.encodings):
            cases.append(_case(scheme, encoding, plan, model))
        starting = f"starting {plural(plan.workers, 'worker')}"
        clock.begin(starting)
        workers.extend(_start(plan, cases))
        try:
            for worker in workers:
                worker.answer(clock.left())
        except WorkerLateError:
            raise clock.error(starting) from None
        for case in cases:
            clock.begin(f"connecting {case.name}")
            timeout = max(_LEAST_WAIT, min(clock.left(), plan.seconds * _SHARE_OF_ONE_WAIT))
            _connect(case, _workers_of(case, workers), timeout)
        copies = _run_rounds(cases, tensors, plan, clock)
        expected = checksums(tensors)
        for case in cases:
            clock.tell(f"checking {case.name}")
            _check(case, _workers_of(case, workers), expected, max(_LEAST_WAIT, clock.left()))
    finally:
        _close(cases, workers)
    return Results(cases, copies, nbytes, len(tensors))


def _close(cases: Sequence[Case], workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.stop()
    for case in cases:
        case.sender.shutdown()
    deadline = time.monotonic() + _CLOSING_SECONDS
    for worker in workers:
        worker.close(max(0.0, deadline - time.monotonic()))


def _workers_of(case: Case, workers: Sequence[Worker]) -> list[Worker]:
    kind = RayWorker if case.scheme == RAY else ProcessWorker
    return [worker for worker in workers if isinstance(worker, kind)]


class _Clock:
    """The time limit of a measurement."""

    def __init__(self, plan: Plan, tell: Tell) -> None:
        self._start, self._seconds, self._tell = time.monotonic(), plan.seconds, tell
        self._smaller_model = plan.smaller_model

    def left(self) -> float:
        """Return the seconds that are left."""
        return max(0.0, self._start + self._seconds - time.monotonic())

    def tell(self, what: str) -> None:
        """Show progress."""
        self._tell(what, 1.0 - self.left() / self._seconds)

    def begin(self, what: str) -> None:
        """Show progress; raise SyncTimeoutError if no time is left."""
        if self.left() == 0.0:
            raise self.error(what)
        self.tell(what)

    def error(self, what: str) -> SyncTimeoutError:
        """Return the error for a time limit that passed before anything was measured."""
        return SyncTimeoutError(
            f"the time limit passed while {what}, and nothing was measured; give a larger --seconds, "
            f"{self._smaller_model}, or fewer schemes and workers"
        )


def _check_memory(plan: Plan, nbytes: int) -> None:
    cases = len(plan.schemes) * len(plan.encodings)
    needed, free = nbytes * (2 + cases * (_BUFFERS + _COPIES * plan.workers)), available_memory()
    if free is not None and needed > free:
        processes = f"{plural(cases, 'sender')} and {plural(plan.workers, 'worker')}"
        raise NotEnoughMemoryError(
            f"up to {format_size(needed)} are needed for {processes}, and {format_size(free)} are free; "
            f"give {plan.smaller_model}, fewer --workers, or one --scheme"
        )


def _case(scheme: str, encoding: str, plan: Plan, model: torch.nn.Module) -> Case:
    strategy = WeightStrategy("state_dict", encoding=encoding)
    timeout = max(_LEAST_WAIT, plan.seconds * _SHARE_OF_ONE_WAIT)
    sender = SCHEMES[scheme](strategy=strategy, timeout=timeout, connect_timeout=timeout)
    sender.init_on_sender(model=model, num_workers=plan.workers)
    return Case(scheme, encoding, sender)


def _start(plan: Plan, cases: Sequence[Case]) -> Iterator[Worker]:
    """Yield workers that are starting; each answers once when it is ready."""
    for kind, schemes in ((ProcessWorker, set(SCHEMES) - {RAY}), (RayWorker, {RAY})):
        given = {case.name: case.sender for case in cases if case.scheme in schemes}
        if given:
            yield from (kind(index, given, plan.source) for index in range(plan.workers))


def _connect(case: Case, workers: Sequence[Worker], timeout: float) -> None:
    """Connect a sender with its workers, or set the reason why it does not."""
    with case.noting_failure():
        for worker in workers:
            worker.post("connect", case.name, timeout)
        try:
            case.sender.connect(timeout=timeout)
        finally:
            _answers(workers, timeout)


def _answers(workers: Sequence[Worker], timeout: float) -> list[Any]:
    """Return the answers of all workers, which share the time; read all of them before an error is raised."""
    deadline, found = time.monotonic() + timeout, list[Any]()
    errors: list[WorkerError] = []
    for worker in workers:
        try:
            found.append(worker.answer(max(0.0, deadline - time.monotonic())))
        except WorkerLateError:  # it names the seconds that workers before it have left
            errors.append(WorkerLateError(f"worker {worker.index} did not answer within {timeout:.1f} s"))
        except WorkerError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found


def _run_rounds(
    cases: Sequence[Case], tensors: Mapping[str, torch.Tensor], plan: Plan, clock: _Clock
) -> list[float]:
    """Send changes in turns until there are enough rounds, or no time is left; return the times of copies."""
    target = {name: torch.empty_like(value).copy_(value) for name, value in tensors.items()}
    checking = _seconds_of(lambda: checksums(tensors)) * len(cases)
    copies, longest = list[float](), 0.0
    for turn in range(_WARM_UP + _ROUNDS):
        if copies and clock.left() < _MARGIN * (longest + checking) + _AROUND_SECONDS:
            break
        show = clock.tell if copies else clock.begin
        show(f"round {turn} of {_ROUNDS}")
        began = time.monotonic()
        change(tensors, plan.share)
        counted = turn >= _WARM_UP
        seconds = _seconds_of(lambda: torch._foreach_copy_(list(target.values()), list(tensors.values())))
        copies += [seconds] * counted
        for case in [*cases[turn % len(cases) :], *cases[: turn % len(cases)]]:
            _send(case, counted)
        longest = max(longest, time.monotonic() - began)
    return copies


def _send(case: Case, counted: bool) -> None:
    if case.failure:
        return
    with case.noting_failure():
        began = time.perf_counter()
        case.report = case.sender.send()
        case.seconds += [time.perf_counter() - began] * counted


def _check(case: Case, workers: Sequence[Worker], expected: Mapping[str, int], timeout: float) -> None:
    """Compare the weights of all workers with those of the sender."""
    if case.failure:
        return
    with case.noting_failure():
        for worker in workers:
            worker.post("checksums", case.name)
        for worker, found in zip(workers, _answers(workers, timeout), strict=True):
            if found != expected:
                case.failure = f"the weights of worker {worker.index} differ from those of the trainer"


def _seconds_of(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
