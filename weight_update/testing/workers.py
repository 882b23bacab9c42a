"""Real workers for tests: a process or thread that has one receiver and follows requests.

Everything that passes between a test and its workers is pickled by value, so no memory is ever shared
by way of the test itself.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch

from weight_update.schemes import WeightSyncScheme
from weight_update.testing.models import fingerprint

Method = Literal["fork", "forkserver", "spawn", "thread", "ray"]

ANSWER_SECONDS = 60.0
"""Seconds that a test waits for a worker's answer."""


class WorkerDiedError(Exception):
    """The worker is gone, or did not answer in time."""


class WorkerTraceback(Exception):
    """The traceback in the worker of an error that is raised in the test, as its cause."""


class Body:
    """The content of a worker: a scheme, a model, and one method for each request of a test."""

    def __init__(self, scheme: WeightSyncScheme, index: int) -> None:
        self.scheme: WeightSyncScheme = scheme
        self.index: int = index
        self.model: Any = None
        self._holding: Any = None
        self._log = _Log()
        logging.getLogger("weight_update").addHandler(self._log)

    def init(self, model: Any, **options: Any) -> None:
        """Call ``init_on_receiver``, with the index as ``worker_idx`` unless options name it."""
        self.model = model
        self.scheme.init_on_receiver(model=model, **{"worker_idx": self.index, **options})

    def connect(self, **options: Any) -> None:
        """Call ``connect``."""
        self.scheme.connect(**options)

    def replace_model(self, model: Any) -> None:
        """Give the scheme another model."""
        self.model = model
        self.scheme.model = model

    def fingerprint(self) -> dict[str, str]:
        """Return the fingerprint of the model, read without the scheme."""
        return fingerprint(self.model, self.scheme.strategy)

    def pointers(self) -> dict[str, int]:
        """Return the address of every tensor of the model."""
        named = self.scheme.strategy.named(self.model)
        return {name: tensor.data_ptr() for name, tensor in named.tensors.items()}

    def version(self) -> int | None:
        """Return the version of the receiver."""
        return self.scheme.version

    def forward(self) -> torch.Tensor:
        """Return the model's output for a batch of ones."""
        with torch.no_grad():
            return torch.as_tensor(self.model(torch.ones(1, 4)))

    def fill(self, value: float) -> None:
        """Fill every tensor of the model in place."""
        with torch.no_grad():
            for tensor in self.scheme.strategy.named(self.model).tensors.values():
                tensor.fill_(value)

    def receive(self, timeout: float | None = None) -> dict[str, str] | None:
        """Call ``receive``, and return the fingerprint of its weights, or None."""
        weights = self.scheme.receive(timeout)
        return None if weights is None else fingerprint(weights, self.scheme.strategy)

    def weights(self) -> dict[str, str]:
        """Return the fingerprint of ``scheme.weights``."""
        return fingerprint(self.scheme.weights, self.scheme.strategy)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Call ``apply_weights``."""
        self.scheme.apply_weights(weights, inplace)

    def hold(self) -> None:
        """Enter ``hold()`` until :meth:`release`."""
        self._holding = self.scheme.hold()
        self._holding.__enter__()

    def release(self) -> None:
        """Leave ``hold()``."""
        self._holding.__exit__(None, None, None)

    def warnings(self) -> list[str]:
        """Return the warnings and errors that the library has logged in this process."""
        return self._log.warnings

    def end(self) -> None:
        """End what the worker has; called when the test needs it no longer."""
        self.shutdown()

    def shutdown(self) -> None:
        """Call ``shutdown``."""
        self.scheme.shutdown()
        logging.getLogger("weight_update").removeHandler(self._log)

    def flags(self) -> dict[str, bool]:
        """Return :func:`flags_of` the scheme."""
        return flags_of(self.scheme)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(self, *args)``; the worker must be able to import ``function``."""
        return function(self, *args)


def flags_of(scheme: WeightSyncScheme) -> dict[str, bool]:
    """Return the four state properties of a scheme."""
    names = [f"{done}_on_{end}" for done in ("initialized", "synchronized") for end in ("sender", "receiver")]
    return {name: getattr(scheme, name) for name in names}


class _Log(logging.Handler):
    """Keeps warnings and errors; what a forked worker logs does not reach pytest's ``caplog``."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


class RemoteObject:
    """An object in a process or thread of its own, whose methods a test calls.

    Args:
        make: called there with ``args``; returns the object, whose method ``end`` is called at the end.
        args: given to a process as arguments of the process.
        method: ``"fork"``, ``"forkserver"``, ``"spawn"`` or ``"thread"``.
        name: of the object in errors.

    Attributes:
        runner: the process or thread.
    """

    def __init__(
        self, make: Callable[..., Any], *args: Any, method: Method = "fork", name: str = "process"
    ) -> None:
        self.name = name
        self._pipe, theirs = multiprocessing.Pipe()
        self.runner: Any
        if method == "thread":
            self.runner = threading.Thread(target=_serve, args=(theirs, make, *args), daemon=True)
            self.runner.start()
        else:
            context: Any = multiprocessing.get_context(method)
            self.runner = context.Process(target=_main, args=(self._pipe, theirs, make, *args), daemon=True)
            self.runner.start()
            theirs.close()

    def call(self, command: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the object; return its result or raise its error."""
        self.post(command, *args, **kwargs)
        return self.answer()

    def post(self, command: str, *args: Any, **kwargs: Any) -> None:
        """Send the request of :meth:`call`.

        Raises:
            WorkerDiedError: nobody is there to read it.
        """
        try:
            self._pipe.send_bytes(dumps((command, args, kwargs)))
        except ConnectionError as error:
            raise WorkerDiedError(f"{self.name} is gone") from error

    def answer(self, timeout: float = ANSWER_SECONDS) -> Any:
        """Wait for the answer of :meth:`call`.

        Raises:
            WorkerDiedError: no answer came.
        """
        try:
            if not self._pipe.poll(timeout):
                raise WorkerDiedError(f"{self.name} gave no answer within {timeout} s")
            answer = self._pipe.recv_bytes()
        except (EOFError, ConnectionError) as error:
            raise WorkerDiedError(f"{self.name} is gone") from error
        return result_of(answer)

    def busy(self, seconds: float = 0.0) -> bool:
        """Return whether there is no answer within ``seconds``."""
        return not self._pipe.poll(seconds)

    def stop(self) -> None:
        """End the object and the process or thread; kill a process that does not end, and show its stacks."""
        with contextlib.suppress(OSError):  # it may have ended on its own
            self._pipe.send_bytes(dumps(None))
        self.runner.join(10.0)
        if self.runner.is_alive() and hasattr(self.runner, "kill"):
            os.kill(self.runner.pid, signal.SIGUSR2)
            self.runner.join(1.0)
            self.runner.kill()
            self.runner.join(10.0)
        self._pipe.close()


class Worker(RemoteObject):
    """The handle of one worker, which has a :class:`Body`.

    Args:
        scheme: given to the worker as a user would: as an argument of the process, or copied for a thread.
        index: of the worker.
        method: ``"fork"``, ``"forkserver"``, ``"spawn"`` or ``"thread"``.
        make: called with scheme and index in the worker.
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        index: int,
        method: Method,
        make: Callable[[WeightSyncScheme, int], Body] = Body,
    ) -> None:
        self.index = index
        given = copy.copy(scheme) if method == "thread" else scheme
        super().__init__(make, given, index, method=method, name=f"worker {index}")


def dumps(value: Any) -> bytes:
    """Serialize by value."""
    # Plain pickle cannot write tensors of the newer dtypes; torch's multiprocessing would share memory.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Deserialize the result of :func:`dumps`."""
    return torch.load(io.BytesIO(data), weights_only=False)


def _main(ours: Connection, pipe: Connection, make: Callable[..., Any], *args: Any) -> None:
    ours.close()  # while a forked child has it, too, the child does not notice that the test has died
    gc.freeze()  # garbage of a parent that used gloo ends a forked child that collects it
    torch.set_num_threads(1)  # a forked child hangs in parallel regions if its parent ever used one
    faulthandler.register(signal.SIGUSR2, file=2)
    _serve(pipe, make, *args)


def _serve(pipe: Connection, make: Callable[..., Any], *args: Any) -> None:
    made = make(*args)
    with contextlib.suppress(EOFError, OSError):  # the test has closed its end
        while (message := loads(pipe.recv_bytes())) is not None:
            command, args, kwargs = message
            pipe.send_bytes(outcome(getattr(made, command), args, kwargs))
    made.end()
    pipe.close()


def outcome(method: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    """Return the serialized result or error of a method, for :func:`result_of`."""
    try:
        return dumps((method(*args, **kwargs), None, ""))
    except Exception as error:  # noqa: BLE001 - raised again in the test
        text = traceback.format_exc()
        try:
            answer = dumps((None, error, text))
            loads(answer)
        except Exception:  # noqa: BLE001 - an exception of a test may not be picklable
            return dumps((None, RuntimeError(repr(error)), text))
        return answer


def result_of(answer: bytes) -> Any:
    """Return the result that :func:`outcome` serialized, or raise the error, caused by its traceback."""
    result, error, text = loads(answer)
    if error is not None:
        raise error from WorkerTraceback(text)
    return result
