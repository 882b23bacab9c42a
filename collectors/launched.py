"""The common base of the collectors that start their workers by a launcher."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import queue
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import isfunction
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors.utils import split_trajectories
from torchrl.data.utils import CloudpickleWrapper
from torchrl.envs import EnvBase, EnvCreator

from collectors.batch_request import BatchRequest, Make
from collectors.closing import close_all
from collectors.nodes import Nodes, free_port
from collectors.remote import Remote
from collectors.requests import change_each, require_one_each
from weight_update import (
    DistributedWeightSyncScheme,
    RPCWeightSyncScheme,
    SyncFailedError,
    WeightSyncScheme,
)

_LAUNCHERS = ("mp", "submitit", "submitit_delayed")
LOOK_SECONDS, END_SECONDS, START_SECONDS = 0.5, 10.0, 120.0


_NO_STATE = (
    "the workers of a {} have no state to save: save the trainer's policy and policy_version; after "
    "a restart, give the policy to a new collector, and call continue_from(policy_version) of its scheme"
)


class Launched(Remote):
    """A mixin for TorchRL's collectors over torch.distributed and RPC, placed before them."""

    _owner = 0  # the process that made this collector, from _begin on
    _scheme_class: type[DistributedWeightSyncScheme] | type[RPCWeightSyncScheme]
    """Class of the scheme of a policy without one."""
    _join: Callable[..., Any] = staticmethod(torch.cat)
    """Makes one batch of a list of them, one of each worker."""

    def _begin(self, create_env_fn: Any, policy: Any, **options: Any) -> None:
        self._nodes, self._in_group, self._owner = Nodes(), False, os.getpid()
        self._asked: dict[int, BatchRequest] = {}  # workers that were asked for a batch not taken yet
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        if not isinstance(create_env_fn, Sequence) or not create_env_fn:
            raise TypeError(
                f"create_env_fn of {type(self).__name__} is a list, such as [make_env] * 4 for four workers, "
                f"not {create_env_fn!r:.60}"
            )
        require_one_each("collector_kwargs", options["collector_kwargs"], create_env_fn)
        self._require_alone()
        launcher = options.setdefault("launcher", "submitit")
        if launcher not in _LAUNCHERS:
            raise ValueError(f"launcher is one of {_LAUNCHERS}, not {launcher!r}")
        if launcher == "submitit":
            _require_submitit()
        inner = change_each(options["collector_kwargs"], _portable_options)
        options["collector_kwargs"] = self._passed_on(inner)
        if options.get("tcp_port") is None and launcher == "mp":
            options["tcp_port"] = os.environ.get("TCP_PORT") or free_port()
        super()._begin(create_env_fn, policy, **options)

    def _passed_on(self, collector_kwargs: Any) -> Any:
        """Return the ``collector_kwargs`` for TorchRL's ``__init__``."""
        return collector_kwargs

    def _require_alone(self) -> None:
        """Raise LifecycleError if this process cannot make the group or RPC world of this collector."""
        raise NotImplementedError

    def _default_scheme(self, **options: Any) -> WeightSyncScheme:
        if options.get("launcher") == "mp":
            return self._scheme_class()
        return self._scheme_class(address=socket.gethostbyname(socket.gethostname()))

    def _worker_alive(self, worker_idx: int) -> bool:
        return self._nodes.alive(worker_idx)

    def _initialize(self, *chosen: WeightSyncScheme) -> None:
        """Initialize schemes as senders, unless they are."""
        for model_id, scheme in self._schemes.items():
            if scheme in chosen and not scheme.initialized_on_sender:
                scheme.init_on_sender(model_id=model_id, context=self, num_workers=self.num_workers)

    # -- data --------------------------------------------------------------------------------------

    def _send_all(self, worker_ids: Any = None) -> None:
        try:
            super()._send_all(worker_ids)
        except SyncFailedError as error:
            self._nodes.require_joined(*error.failures)  # raises the error of the process, which says more
            raise

    def _gather(self) -> TensorDictBase:
        """Return a batch of each worker, as one."""
        for idx in range(self.num_workers):
            self._ask(idx)
        batches = dict(self._take() for _ in range(self.num_workers))
        found: TensorDictBase = self._join([batches[idx] for idx in sorted(batches)])
        return found

    def _ask(self, idx: int) -> None:
        """Have a worker send its next batch, unless this was done before."""
        if (request := self._asked.get(idx)) is None:
            request = self._asked[idx] = BatchRequest(self._request(idx), self._arrived)
        request.begin()

    def _request(self, idx: int) -> Make:
        """Return the function that asks a worker for its next batch. It does not refer to this collector."""
        raise NotImplementedError

    @property
    def _pending(self) -> set[int]:
        """Workers whose next batch is awaited."""
        return {idx for idx, request in list(self._asked.items()) if request.pending}

    def _take(self) -> tuple[int, TensorDictBase]:
        """Wait for a batch; return the worker, and the batch with trajectory numbers of this worker alone.

        Raises:
            WorkerError: a worker has failed or ended.
            SyncTimeoutError: a worker is late.
        """
        self._waits.require_in_time()
        while (found := self._look()) is None:
            self._nodes.require_alive()
            self._waits.require_in_time()
        idx, arrived = found
        self._waits.end(idx)
        self._asked.pop(idx, None)
        data = self._read(idx, arrived)
        key = ("collector", "traj_ids")
        if key in data.keys(True):
            data.set_(key, data[key] * self.num_workers + idx)
        return idx, data

    def _look(self) -> tuple[int, Any] | None:
        """Return a worker whose batch has arrived, and the batch or error; None if none came in a while."""
        start = time.monotonic()
        with contextlib.suppress(queue.Empty):
            self._arrived.get(timeout=0.0 if self._answers() else LOOK_SECONDS)
        self._waits.add(time.monotonic() - start, self._pending)
        return next(iter(self._answers().items()), None)

    def _answers(self) -> dict[int, Any]:
        return {idx: request.answer[0] for idx, request in list(self._asked.items()) if request.answer}

    def _read(self, idx: int, arrived: Any) -> TensorDictBase:
        """Return the batch of a worker; raise WorkerError if an error has arrived instead."""
        raise NotImplementedError

    def _await_pending(self, seconds: float) -> None:
        """Wait until no batch is awaited, and drop those that have come."""
        deadline = time.monotonic() + seconds
        while self._pending and time.monotonic() < deadline:
            if (found := self._look()) is not None:
                self._asked.pop(found[0], None)

    def _processed(self, data: TensorDictBase) -> TensorDictBase:
        data = split_trajectories(data) if self.split_trajs else data
        return data if self.postproc is None else self.postproc(data)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Raise NotImplementedError, as TorchRL's method does."""
        raise NotImplementedError(_NO_STATE.format(type(self).__name__))

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Raise NotImplementedError, as TorchRL's method does."""
        raise NotImplementedError(_NO_STATE.format(type(self).__name__))

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
        if self._has_ended:
            return
        self._mark_ended()
        close_all(partial(self._end_workers, END_SECONDS if timeout is None else timeout), self._give_up)

    def __del__(self) -> None:
        """Shut down an unused collector."""
        if not self._has_ended and self._owner == os.getpid():  # not in a forked child
            self.shutdown()


def portable(env: Any) -> Any:
    """Return an environment, or a function that makes one, in a form that can be pickled."""
    return env if isinstance(env, (EnvBase, EnvCreator)) else CloudpickleWrapper(env)


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


class Intervals(Launched):
    """A mixin for collectors that take ``sync=`` and can update workers automatically.

    Attributes:
        max_weight_update_interval: largest number of batches for which a worker gets no new version; -1 for
            no limit.
    """

    max_weight_update_interval: int

    def _begin(self, create_env_fn: Any, policy: Any, **options: Any) -> None:
        self._unchanged: dict[int, tuple[int | None, int]] = {}  # last version of a worker, batches with it
        # {}: TorchRL makes a scheme or an updater of its own for None.
        options["weight_sync_schemes"] = {} if options["weight_updater"] is None else None
        options["total_frames"] = endless(options.get("total_frames", -1))
        super()._begin(create_env_fn, policy, **options)

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches until ``total_frames`` frames were collected."""
        collected = batches = 0
        while collected < self.total_frames:
            data, workers = self._collect()
            collected, batches = collected + data.numel(), batches + 1
            yield self._processed(data)
            if collected < self.total_frames:
                self._update_between(batches, workers)

    def _collect(self) -> tuple[TensorDictBase, list[int]]:
        """Return the next batch and the workers that made it."""
        if self._sync:
            if self.update_after_each_batch:
                self._update_workers()
            return self._gather(), list(range(self.num_workers))
        for idx in range(self.num_workers):
            self._ask(idx)
        idx, data = self._take()
        if self.update_after_each_batch:
            self._update_workers([idx])
        return data, [idx]

    def _update_between(self, batches: int, workers: list[int]) -> None:
        """Update workers without a new version, after batch number ``batches``, which ``workers`` made."""
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
        scheme = self._schemes.get("policy")
        return None if scheme is None else scheme.worker_versions.get(idx)

    def _update_workers(self, worker_ids: list[int] | None = None) -> Any:
        if self._legacy_weight_updater:
            self.update_policy_weights_(worker_ids=worker_ids)
        else:
            self._send_all(worker_ids)


def endless(total_frames: float) -> float:
    """Return ``total_frames``, or infinity for a negative number."""
    return math.inf if total_frames < 0 else total_frames
