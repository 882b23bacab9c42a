"""Programs of tests, each in an interpreter of its own, without the 3 to 5 s of CPU that imports take.

:func:`run_python` stands in for ``subprocess.run([sys.executable, ...])``. A template process imports torch,
tensordict and torchrl once. Each program runs in a fork of it, as ``__main__``, with arguments, environment
and descriptors of its own, imports this library anew, and ends as an interpreter ends. Tests of what an
interpreter imports, or of one that starts, use subprocess.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import multiprocessing.context
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_FILTERS = list(warnings.filters)
_PRELOADED = ("torch", "tensordict", "torchrl.collectors", "torchrl.envs")
_LIMIT = 1 << 17
_START_SECONDS = 300.0


def run_python(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 100.0,
    merged: bool = False,
    quick_spawn: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` from the root of the repository, and return what it printed.

    Args:
        arguments: options ``-W error`` first, if they are wanted, then ``-c`` and a program, ``-m`` and a
            module, or a file; then the arguments of the program.
        env: added to the environment of this process; PYTHONPATH is the root of the repository.
        timeout: seconds until it is killed.
        merged: whether stderr goes to stdout.
        quick_spawn: whether processes that it starts by spawn come from a forkserver, which imports the
            packages once for all of them. They get everything pickled, and import ``__main__``, all the same.

    Raises:
        subprocess.TimeoutExpired: it was killed.
    """
    words = [str(argument) for argument in arguments]
    request = {
        "arguments": words,
        "env": {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        "quick_spawn": quick_spawn,
    }
    end, out, error = time.monotonic() + timeout, _Pipe(), _Pipe()
    try:
        code = _Template.get().run(request, [out.number, (out if merged else error).number], timeout)
    finally:
        out.close()
        error.close()
    ended = [pipe.ended(end - time.monotonic()) for pipe in (out, error)]  # others may hold them, too
    if code is None or not all(ended):
        raise subprocess.TimeoutExpired(words, timeout, out.text, error.text)
    return subprocess.CompletedProcess([sys.executable, *words], code, out.text, error.text)


class _Pipe:
    """The output of a program and of the processes that it starts."""

    def __init__(self) -> None:
        reading, self.number = os.pipe()
        self.text = ""
        self._thread = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._thread.start()

    def _read(self, reading: int) -> None:
        with open(reading) as file:
            for line in file:
                self.text += line

    def close(self) -> None:
        """Close the end for writing of this process."""
        os.close(self.number)

    def ended(self, timeout: float) -> bool:
        """Return whether all processes that could write have ended."""
        self._thread.join(max(timeout, 1.0))
        return not self._thread.is_alive()


class _Template:
    """The template process, as tests see it."""

    _only: _Template | None = None

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd=ROOT
        )
        theirs.close()
        self._socket.settimeout(_START_SECONDS)
        assert self._socket.recv(_LIMIT) == b"ready"

    @classmethod
    def get(cls) -> _Template:
        """Return the template of this process; start it if there is none."""
        if cls._only is None or cls._only._pid != os.getpid():
            cls._only = cls()
            atexit.register(cls._only.close)
        return cls._only

    def run(self, request: dict[str, Any], descriptors: list[int], timeout: float) -> int | None:
        """Run a program; return its exit code, or None if it was killed."""
        self._socket.settimeout(30.0)
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        pid = int(self._socket.recv(_LIMIT))
        self._socket.settimeout(timeout)
        try:
            return int(self._socket.recv(_LIMIT))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            self._socket.settimeout(30.0)
            self._socket.recv(_LIMIT)
            return None

    def close(self) -> None:
        """End the template."""
        if os.getpid() == self._pid:
            self._socket.shutdown(socket.SHUT_RDWR)  # a process that a test has left may have a copy
            self._socket.close()
            self._process.wait(30.0)


# -- the template process ------------------------------------------------------------------------------


def _serve(number: int) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request; return the request in the fork, and None at the end."""
    connection = socket.socket(fileno=number)
    connection.set_inheritable(False)
    connection.send(b"ready")
    while True:
        data, descriptors, *_ = socket.recv_fds(connection, _LIMIT, 2)
        if not data:
            return None
        pid = os.fork()
        if pid == 0:
            connection.close()
            return json.loads(data), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(pid).encode())
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Make this process look like a new interpreter, and run the program."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor, number in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    torch, threads = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS", "")
    if torch and threads.isdigit() and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))
    if request["quick_spawn"]:
        multiprocessing.set_forkserver_preload(list(_PRELOADED))
        contexts: Any = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
        contexts["spawn"] = contexts["forkserver"]
    _run(request["arguments"])


def _run(words: Sequence[str]) -> None:
    words = list(words)
    warnings.resetwarnings()  # what the imports have changed
    warnings.filters.extend(_FILTERS)  # type: ignore[attr-defined]
    while words[0] == "-W":
        sys.warnoptions.append(words[1])
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        del words[:2]
    sys.path[0] = ""
    sys.path.insert(1, os.environ["PYTHONPATH"])
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the latter names it in spawned processes
    main.__dict__["__builtins__"] = __builtins__
    if words[0] == "-c":
        sys.argv, text, name = ["-c", *words[2:]], words[1], "<string>"
    else:
        sys.argv, text, name = words, Path(words[0]).read_text(), words[0]
        sys.path[0] = str(Path(name).resolve().parent)
        main.__file__ = name
    exec(compile(text, name, "exec"), main.__dict__)


def _main() -> None:
    for name in _PRELOADED:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            with warnings.catch_warnings(), contextlib.suppress(ImportError):
                warnings.simplefilter("ignore")
                importlib.import_module(name)
    if (found := _serve(int(sys.argv[1]))) is not None:
        sys.modules["template of this program"] = sys.modules["__main__"]
        _become(*found)


if __name__ == "__main__":
    _main()
