"""The common base of the collectors that start their workers by a launcher."""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from torchrl.collectors.utils import split_trajectories

from collectors.closing import close_all
from collectors.nodes import Nodes, free_port
from collectors.remote import Remote
from weight_update import DistributedWeightSyncScheme, RPCWeightSyncScheme, WeightSyncScheme

LOOK_SECONDS, END_SECONDS, START_SECONDS = 0.5, 10.0, 120.0


class Launched(Remote):
    """A mixin for TorchRL's collectors over torch.distributed and RPC, placed before them."""

    _ended = True  # until _begin runs
    _scheme_class: type[DistributedWeightSyncScheme] | type[RPCWeightSyncScheme]
    """Class of the scheme of a policy without one."""

    def _begin(self, create_env_fn: Any, policy: Any, **options: Any) -> None:
        self._nodes, self._ended, self._in_group, self._owner = Nodes(), False, False, os.getpid()
        self._require_alone()
        if options.get("tcp_port") is None and options.get("launcher") == "mp":
            options["tcp_port"] = os.environ.get("TCP_PORT") or free_port()
        super()._begin(create_env_fn, policy, **options)

    def _require_alone(self) -> None:
        """Raise LifecycleError if this process has what the collector makes and a process has only once."""
        raise NotImplementedError

    def _default_scheme(self, **options: Any) -> WeightSyncScheme:
        if options.get("launcher") == "mp":
            return self._scheme_class()
        return self._scheme_class(address=socket.gethostbyname(socket.gethostname()))

    def _worker_alive(self, worker_idx: int) -> bool:
        return self._nodes.alive(worker_idx)

    # -- data --------------------------------------------------------------------------------------

    def _await_batch(self) -> tuple[int, Any]:
        """Wait for a batch, and return what :meth:`_look` found.

        Raises:
            WorkerError: a worker has ended.
            SyncTimeoutError: a worker is late.
        """
        self._waits.require_in_time()
        while (found := self._look()) is None:
            self._nodes.require_alive()
            self._waits.require_in_time()
        self._waits.end(found[0])
        return found

    def _look(self) -> tuple[int, Any] | None:
        """Return a worker and what came from it, or None if nothing came for a moment."""
        raise NotImplementedError

    def _renumbered(self, idx: int, data: TensorDictBase) -> TensorDictBase:
        """Give a worker's trajectories numbers that no other worker uses."""
        key = ("collector", "traj_ids")
        if key in data.keys(True):
            data.set_(key, data[key] * self.num_workers + idx)
        return data

    def _processed(self, data: TensorDictBase) -> TensorDictBase:
        data = split_trajectories(data) if self.split_trajs else data
        return data if self.postproc is None else self.postproc(data)

    # -- end ---------------------------------------------------------------------------------------

    def _end_workers(self, seconds: float) -> None:
        """Have the workers end, within some seconds."""
        raise NotImplementedError

    def shutdown(self, timeout: float | None = None, **options: Any) -> None:
        """End workers and schemes. It may be called twice.

        Args:
            timeout: seconds for workers to finish their batches; None for 10. Workers that are still alive
                then are killed.
            options: accepted like those of other collectors, and ignored: environments end with the workers.
        """
        if self._ended:
            return
        self._ended = True
        close_all(partial(self._end_workers, END_SECONDS if timeout is None else timeout), self._give_up)

    def __del__(self) -> None:
        """Shut down an unused collector."""
        if not self._ended and self._owner == os.getpid():  # not in a forked child
            self.shutdown()
