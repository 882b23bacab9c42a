"""Drivers: the methods by which a soak uses a scheme or the Synchronizer."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soak_worker import Noted, Stamped, fill, follow, init

from benchmarks.network import Network, why_not
from weight_update import (
    DistributedWeightSyncScheme,
    ExplorerClient,
    MultiProcessWeightSyncScheme,
    PatchEncoding,
    RayWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    Synchronizer,
    TrainerClient,
    WeightStrategy,
)
from weight_update.testing.ray_workers import keep_spare
from weight_update.testing.worker_processes import start_worker
from weight_update.testing.workers import Worker

FAULTS = (
    "kill",
    "stop",
    "long_stop",
    "slow",
    "long_slow",
    "refuse",
    "strangers",
    "late_joiner",
    "link_down",
    "long_link_down",
    "disk_full",
)
ALWAYS = ("kill", "stop", "long_stop", "slow", "long_slow")
SYNCHRONIZER = ("nccl", "memory", "checkpoint")
SCHEMES = ("shared_mem", "multiprocess", "distributed", "ray", *SYNCHRONIZER)
PATIENCE = 30.0
"""Seconds in which everything must have healed, and a worker must have joined."""
_PERIOD = 32
_DISK_MB = 64


def strategy_of(options: Namespace) -> WeightStrategy:
    """Return the strategy that the options of the command line name."""
    if options.encoding != "patch":
        return WeightStrategy(encoding=options.encoding)
    return WeightStrategy(encoding=PatchEncoding(compression=options.compression))


def prepare_workers() -> None:
    """Let workers be forked from a process that has imported everything and done nothing else."""
    here = Path(__file__).resolve().parent
    path = [str(here.parent.parent), str(here), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    multiprocessing.get_context("forkserver").set_forkserver_preload(["soak_drivers"])


class Driver:
    """The methods by which a soak uses one scheme.

    Args:
        options: of the command line.

    Attributes:
        faults: names of the faults that this scheme can be given.
        numbered: whether the first update has version 1, the next one 2, and so on.
        peer: whether broken promises are counted only, since they are those of another library.
    """

    numbered = True
    peer = False
    model_class: type[Stamped] = Noted

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.faults = [*ALWAYS, "refuse", "strangers"]
        if options.scheme != "multiprocess":
            self.faults.append("late_joiner")
        self.stack = contextlib.ExitStack()
        prepare_workers()
        self.network: Network | None = None
        self.scheme: Any = None

    @property
    def make_model(self) -> Callable[[], Stamped]:
        """A function that makes a model without a version, called in each worker.

        A model made in each thread that starts a worker would leave memory in the arena that glibc gives the
        thread: the trainer would grow until all arenas are that large.
        """
        period = _PERIOD if self.options.encoding == "patch" else 1
        return functools.partial(self.model_class, self.options.megabytes, 16, period)

    def open(self) -> None:
        """Initialize the sender."""
        self.source = fill(self.make_model(), 0)
        if self.options.hosts:
            self._open_network()
        if self.options.scheme == "ray":
            self._open_ray()
        self.scheme = self.make_scheme()
        self.stack.callback(self.scheme.shutdown)
        self.init_on_sender()

    def strategy(self) -> WeightStrategy:
        """Return the strategy of both ends."""
        return strategy_of(self.options)

    def limits(self) -> dict[str, Any]:
        """Return the arguments that all schemes take."""
        times = {"timeout": self.options.timeout, "connect_timeout": 0.7 * PATIENCE}
        return {"strategy": self.strategy(), **times}

    def make_scheme(self) -> Any:
        """Return the scheme, not yet initialized."""
        options = self.limits()
        if self.options.scheme == "shared_mem":
            return SharedMemWeightSyncScheme(**options)
        if self.options.scheme == "multiprocess":
            return MultiProcessWeightSyncScheme(**options)
        if self.options.scheme == "ray":
            return RayWeightSyncScheme(data=self.options.data, **options)
        address = "127.0.0.1" if self.network is None else self.network.address["trainer"]
        return DistributedWeightSyncScheme(address=address, **options)

    def init_on_sender(self) -> None:
        """Call ``init_on_sender``."""
        extra = {} if self.options.scheme == "ray" else {"ctx": multiprocessing.get_context("forkserver")}
        self.scheme.init_on_sender(model=self.source, num_workers=self.options.workers, **extra)

    def connect(self) -> None:
        """Call ``connect`` on the sender."""
        self.scheme.connect()

    def start_worker(self, idx: int) -> Worker:
        """Start a worker process that has not joined yet."""
        if self.options.scheme != "ray":
            return start_worker(self.scheme, idx, "forkserver")
        worker = start_worker(self.scheme, idx, "ray")
        keep_spare()  # an actor that takes the place of a killed one would start for many seconds
        return worker

    def init_worker(self, worker: Worker, idx: int) -> None:
        """Have a worker call ``init_on_receiver``."""
        if self.options.hosts:
            worker.call("run", follow, self.network, self.host_of(idx))
        worker.call("run", init, self.make_model)

    def join(self, worker: Worker) -> None:
        """Have a worker begin to connect; its answer is for the caller."""
        worker.post("connect")

    def host_of(self, idx: int) -> str:
        """Return the host that a worker lives on; all late joiners live on one."""
        return f"host{idx}" if idx < self.options.workers else "late"

    def send(self, version: int, worker_ids: list[int] | None, burst: int) -> tuple[int, dict[int, str]]:
        """Send ``burst`` updates, wait for the last one; return its version and the failures by worker."""
        last = version + burst - 1
        for number in range(version, last):
            self.scheme.send_async(fill(self.source, number), worker_ids)
        fill(self.source, last)
        try:
            if burst == 1:
                report = self.scheme.send(self.source, worker_ids)
            else:
                report = self.scheme.send_async(self.source, worker_ids).wait()
        except SyncFailedError as error:
            return last, {idx: str(failure) for idx, failure in error.failures.items()}
        if report.version != last:
            raise AssertionError(f"update {last} was given version {report.version}")
        return last, {}

    def excused(self, begin: float) -> bool:
        """Return whether an update that began at ``begin`` may fail without a worker to name."""
        del begin
        return False

    def close(self) -> None:
        """Shut the sender down, and remove all that was set up for it."""
        self.stack.close()

    def _open_network(self) -> None:
        hosts = [self.host_of(idx) for idx in range(self.options.workers + 1)]
        os.environ["WEIGHT_UPDATE_HOST"] = "trainer"
        self.stack.callback(os.environ.pop, "WEIGHT_UPDATE_HOST", None)
        reason = why_not()
        if reason is not None:
            print(f"hosts by name only, and no link goes down: {reason}")
            return
        self.network = self.stack.enter_context(Network(["trainer", *hosts]))
        self.stack.enter_context(self.network.inside("trainer"))
        self.faults += ["link_down", "long_link_down"]

    def _open_ray(self) -> None:
        import ray

        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=300 << 20,
            log_to_driver=False,
            logging_level="error",
            _system_config={"worker_niceness": 0},  # by default 15: other programs would starve the workers
        )
        self.stack.callback(ray.shutdown)


class SynchronizerEnd:
    """One end of a Synchronizer, with the methods that a worker of a scheme has.

    Args:
        address: of the server.
        trainer: closes the trainer and the synchronizer.
        options: further arguments of :class:`ExplorerClient`.
    """

    def __init__(self, address: str, trainer: contextlib.ExitStack, **options: Any) -> None:
        self.address, self.options = address, options
        self.trainer: contextlib.ExitStack | None = trainer
        self.client: Any = None

    def init_on_receiver(self, *, model: Any, worker_idx: int) -> None:
        """Remember what ``connect`` needs."""
        self.model, self.worker_idx = model, worker_idx

    def connect(self) -> None:
        """Join, and begin with the trainer's weights."""
        client = ExplorerClient(self.address, self.model, id=self.worker_idx, **self.options)
        self.client = client.blocking
        deadline = time.monotonic() + PATIENCE
        while "reason" in (said := self.client.sync_weight()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no weights within {PATIENCE:g} s: {said['reason']}")

    def hold(self) -> Any:
        """Keep updates out."""
        return self.client.hold()

    def advance(self) -> None:
        """Make a step, as the loop of an explorer does."""
        self.client.step += 1
        if self.client.need_sync():
            self.client.sync_weight()

    def shutdown(self) -> None:
        """Leave."""
        if self.client is not None:
            self.client.close()
        if self.trainer is not None:
            self.trainer.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "client": None, "trainer": None}


class SynchronizerDriver(Driver):
    """A Synchronizer in the trainer's process, and explorers in others."""

    numbered = False
    model_class = Stamped

    def __init__(self, options: Namespace) -> None:
        super().__init__(options)
        self.faults.remove("refuse")
        self.disk: Path | None = None
        self._disk_well_at = 0.0

    def open(self) -> None:
        self.source = fill(self.make_model(), 0)
        timeout = self.options.timeout
        client_options = {
            "strategy": strategy_of(self.options),
            "timeout": timeout,
            "transfer_timeout": timeout,
        }
        synchronizer = Synchronizer(
            self.options.scheme,
            self.options.style,
            sync_interval=1,
            directory=self._directory(),
            strategy=client_options["strategy"],
            lease=timeout,
            transfer_timeout=timeout,
        )
        server = self.stack.enter_context(synchronizer).serve()
        client = TrainerClient(server, self.source, **client_options)
        self.trainer = self.stack.enter_context(client).blocking
        self.scheme = SynchronizerEnd(server.address, self.stack, token=server.token, **client_options)

    def connect(self) -> None:
        """Publish the first weights; explorers wait for them."""
        self.trainer.sync_weight()

    def send(self, version: int, worker_ids: list[int] | None, burst: int) -> tuple[int, dict[int, str]]:
        """Send one update, to each explorer that wants it; return a failure under the index -1."""
        del worker_ids, burst
        fill(self.source, version)
        self.trainer.step = version
        if not self.trainer.need_sync():
            return version, {}
        said = self.trainer.sync_weight()
        return version, {-1: said["reason"]} if "reason" in said else {}

    def excused(self, begin: float) -> bool:
        """Return whether the disk was full."""
        return begin <= self._disk_well_at

    def fill_disk(self, later: Callable[[float, Callable[[], None]], None], seconds: float) -> bool:
        """Fill the disk for some seconds; return False if it is full already."""
        assert self.disk is not None
        filler = self.disk / "filler"
        if filler.exists():
            return False
        self._disk_well_at = float("inf")
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

        def empty() -> None:
            filler.unlink()
            self._disk_well_at = time.monotonic() + self.options.timeout

        later(seconds, empty)
        return True

    def _directory(self) -> str | None:
        """Return a directory for checkpoints, on a file system of its own where that can be mounted."""
        if self.options.scheme != "checkpoint":
            return None
        where = self.stack.enter_context(tempfile.TemporaryDirectory())
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", where]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounted.returncode:
            print(f"the disk does not become full: {mounted.stderr.strip()}")
        else:
            self.stack.callback(subprocess.run, ["umount", "-l", where], check=False)
            self.disk = Path(where)
            self.faults.append("disk_full")
        checkpoints = Path(where, "checkpoints")
        checkpoints.mkdir()
        return str(checkpoints)


def driver_of(options: Namespace) -> Driver:
    """Return the driver of the scheme that the options of the command line name."""
    if options.peer:
        from soak_torchrl import TorchRLDriver

        return TorchRLDriver(options)
    return SynchronizerDriver(options) if options.scheme in SYNCHRONIZER else Driver(options)
