"""The base of the collectors that start their workers by a launcher."""

from __future__ import annotations

import importlib
import math
import os
import socket
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from inspect import isfunction
from typing import Any

from tensordict import TensorDictBase
from torchrl.collectors.utils import split_trajectories
from torchrl.data.utils import CloudpickleWrapper

from collectors.nodes import free_port
from collectors.remote import Remote
from collectors.requests import Request, change_each, require_one_each, send
from collectors.updates import close_all
from collectors.weight_update import SchemeUpdater
from collectors.workers import END_SECONDS, Workers
from weight_update import (
    DistributedWeightSyncScheme,
    RPCWeightSyncScheme,
    SyncFailedError,
    WeightSyncScheme,
)

_LAUNCHERS = ("mp", "submitit", "submitit_delayed")
_NO_STATE = (
    "the workers of a {} have no state to save: save the trainer's policy and policy_version; after "
    "a restart, give the policy to a new collector, and call continue_from(policy_version) of its scheme"
)


class Launched(Remote):
    """The base of the collectors over torch.distributed and RPC, placed before TorchRL's classes.

    Its ``_workers`` start, watch and end them. A subclass has them start where TorchRL's class does.
    """

    first_worker_idx = 0
    """Index of the first worker, also where its rank is 1."""
    collector_kwargs: Any
    max_weight_update_interval: int

    _workers: Workers
    _workers_class: type[Workers]
    _owner = 0  # the process that made this collector, from _begin on
    _scheme_class: type[DistributedWeightSyncScheme] | type[RPCWeightSyncScheme]
    """Class of the scheme of a policy without one."""

    def _begin(self, create_env_fn: Any, policy: Any, **options: Any) -> None:
        self._owner, self._workers = os.getpid(), self._workers_class(self._waits)
        self._unchanged: dict[int, tuple[int | None, int]] = {}  # last version of a worker, batches with it
        if not isinstance(create_env_fn, Sequence) or not create_env_fn:
            raise TypeError(
                f"create_env_fn of {type(self).__name__} is a list, such as [make_env] * 4 for four workers, "
                f"not {create_env_fn!r:.60}"
            )
        require_one_each("collector_kwargs", options["collector_kwargs"], create_env_fn)
        self._workers.require_alone()
        launcher = options.setdefault("launcher", "submitit")
        if launcher not in _LAUNCHERS:
            raise ValueError(f"launcher is one of {_LAUNCHERS}, not {launcher!r}")
        if launcher == "submitit":
            _require_submitit()
        options["collector_kwargs"] = change_each(options["collector_kwargs"], _portable_options)
        total_frames = options.get("total_frames", -1)
        options["total_frames"] = math.inf if total_frames < 0 else total_frames
        if options.get("tcp_port") is None and launcher == "mp":
            options["tcp_port"] = os.environ.get("TCP_PORT") or free_port()
        with self._workers.starting():
            self._begin_torchrl(create_env_fn, policy, **options)
            self._initialize(self._updates.schemes)
            self._updates.connect()
        self._weight_sync_schemes = self._updates.schemes or None

    def _begin_torchrl(self, create_env_fn: Any, policy: Any, **options: Any) -> None:
        """Call TorchRL's ``__init__``, which makes a scheme or an updater of its own for None."""
        options["weight_sync_schemes"] = {} if options["weight_updater"] is None else None
        super()._begin(create_env_fn, policy, **options)

    def _default_scheme(self, **options: Any) -> WeightSyncScheme:
        if options.get("launcher") == "mp":
            return self._scheme_class()
        return self._scheme_class(address=own_address())

    def _announce(self) -> None:
        """Set the address of the rendezvous, and give each worker's collector its index and receivers."""
        self.IPAddr = "localhost" if self.launcher == "mp" else own_address()
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = self.IPAddr, str(self.tcp_port)
        receivers = {"weight_recv_schemes": self._updates.schemes} if self._updates.schemes else {}
        for idx, options in enumerate(self.collector_kwargs):
            options.update(worker_idx=idx, **receivers)

    def _initialize(self, schemes: Mapping[str, WeightSyncScheme]) -> None:
        """Initialize schemes as senders, unless they are."""
        for model_id, scheme in schemes.items():
            if not scheme.initialized_on_sender:
                scheme.init_on_sender(model_id=model_id, context=self, num_workers=self.num_workers)

    def _worker_alive(self, worker_idx: int) -> bool:
        return self._workers.alive(worker_idx)

    # -- data --------------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches until ``total_frames`` frames were collected."""
        collected = batches = 0
        while collected < self.total_frames:
            data, workers = self._collect(batches)
            collected, batches = collected + data.numel(), batches + 1
            data = split_trajectories(data) if self.split_trajs else data
            yield data if self.postproc is None else self.postproc(data)
            if collected < self.total_frames:
                self._update_between(batches, workers)

    def _collect(self, batches: int) -> tuple[TensorDictBase, list[int]]:
        """Return batch number ``batches``, from 0, and the workers that made it."""
        if self._sync:
            if self.update_after_each_batch:
                self._update_workers()
            return self._workers.gather(), list(range(self.num_workers))
        for idx in range(self.num_workers):
            self._workers.ask(idx)
        idx, data = self._workers.take()
        if self.update_after_each_batch:
            self._update_workers([idx])
        return data, [idx]

    def _update_between(self, batches: int, workers: list[int]) -> None:
        """Update workers after ``batches`` batches, the last one made by ``workers``, if they are due."""

    def _update_stale(self) -> None:
        """Update workers that made more than ``max_weight_update_interval`` batches without a new version."""
        if self.max_weight_update_interval > -1:
            stale = [idx for idx in range(self.num_workers) if self._is_stale(idx)]
            if stale:
                self._update_workers(stale)
                self._unchanged.update((idx, (self._version_of(idx), 0)) for idx in stale)

    def _is_stale(self, idx: int) -> bool:
        """Return whether a worker is due for an update; count the batches since its version changed."""
        version = self._version_of(idx)
        before, count = self._unchanged.get(idx, (version, 0))
        count = count + 1 if version == before else 0
        self._unchanged[idx] = version, count
        return bool(count > self.max_weight_update_interval)

    def _version_of(self, idx: int) -> int | None:
        scheme = self._updates.schemes.get("policy")
        return None if scheme is None else scheme.worker_versions.get(idx)

    def _update_workers(self, worker_ids: list[int] | None = None) -> None:
        if self._legacy_weight_updater:
            self.update_policy_weights_(worker_ids=worker_ids)
        else:
            self._send_all(worker_ids)

    def _send_all(self, worker_ids: list[int] | None = None) -> None:
        """Send the weights of all models in one step."""
        schemes = self._updates.schemes
        try:
            if isinstance(self.weight_updater, SchemeUpdater):
                self.update_policy_weights_(worker_ids=worker_ids)
            elif schemes:
                send(schemes, Request(dict.fromkeys(schemes), worker_ids, several=True))
        except SyncFailedError as error:
            self._workers.nodes.require_joined(*error.failures)  # the error of the process says more
            raise

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Raise NotImplementedError: the programs of the workers take no seed."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot seed its workers; seed each environment in create_env_fn"
        )

    def state_dict(self) -> OrderedDict[str, Any]:
        """Raise NotImplementedError, as TorchRL's method does."""
        raise NotImplementedError(_NO_STATE.format(type(self).__name__))

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Raise NotImplementedError, as TorchRL's method does."""
        raise NotImplementedError(_NO_STATE.format(type(self).__name__))

    # -- end ---------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, **options: Any) -> None:
        """End workers and schemes. It may be called twice.

        Args:
            timeout: seconds for workers to finish their batches; None for 10. Workers that are still alive
                then are killed.
            options: accepted like those of other collectors, and ignored: environments end with the workers.
        """
        if self._updates.ended:
            return
        self._updates.begin_end()
        close_all(partial(self._workers.end, END_SECONDS if timeout is None else timeout), self._give_up)

    def _give_up(self) -> None:
        close_all(self._workers.kill, self._end_schemes, self._workers.leave)

    def __del__(self) -> None:
        """Shut down an unused collector."""
        if self._owner == os.getpid():  # not in a forked child
            self.shutdown()


def own_address() -> str:
    """Return the address of this machine for workers on other hosts; raise OSError if its name has none."""
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise OSError(
            f"{name!r}, the host name of this machine, has no address to which workers could connect: enter "
            "the machine's own address into /etc/hosts"
        ) from error


def _portable_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with functions that can be pickled, also lambdas and local functions."""
    return {key: CloudpickleWrapper(one) if isfunction(one) else one for key, one in options.items()}


def _require_submitit() -> None:
    """Raise an ImportError that names the extra if submitit cannot be imported."""
    try:
        importlib.import_module("submitit")
    except ImportError as error:
        install = (
            'pip install "weight-update[slurm]", or, for workers on this machine, use launcher="mp" '
            '(Collector takes that with backend="distributed" or "rpc", not with "submitit")'
        )
        raise ImportError(f"cannot import submitit ({error}): {install}", name="submitit") from error
