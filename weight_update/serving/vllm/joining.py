"""How vLLM's workers find the sender: a dict that goes through vLLM as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Literal

from weight_update.errors import LifecycleError
from weight_update.schemes.base import WeightSyncScheme
from weight_update.schemes.distributed import DistributedWeightSyncScheme
from weight_update.schemes.ray import RayWeightSyncScheme
from weight_update.schemes.remote import RemoteWeightSyncScheme
from weight_update.schemes.shared_mem import SharedMemWeightSyncScheme
from weight_update.threads import call_in_thread

PauseMode = Literal["abort", "wait", "keep"]
"""How vLLM treats running requests; see ``/pause`` of its server."""


def init_info(
    scheme: WeightSyncScheme,
    *,
    first_worker: int = 0,
    in_chunks: bool = False,
    control: str | None = None,
    pause: PauseMode = "wait",
) -> dict[str, Any]:
    """Return the ``init_info`` with which vLLM's workers join ``scheme``.

    The dict can be sent as JSON. It contains the token of the scheme in clear text, so send it only over
    connections that you trust.

    Args:
        scheme: the sender, after ``init_on_sender``.
        first_worker: index of vLLM's worker of rank 0; the others follow in the order of their ranks.
        in_chunks: whether weights are loaded while their version arrives, as
            :attr:`~weight_update.InferenceEngine.loads_in_chunks`.
        control: URL of vLLM's server. The worker of rank 0 then calls that server for each update, and the
            trainer only calls ``scheme.send()``. With None, the trainer makes these calls.
        pause: mode of ``/pause``, with ``control``.

    Raises:
        LifecycleError: the scheme was not initialized as a sender.
        TypeError: processes of other programs cannot join such a scheme.
    """
    if not scheme.initialized_on_sender:
        raise LifecycleError("this scheme is not a sender yet; call init_on_sender() first")
    where: dict[str, Any]
    opens_no_port = isinstance(scheme, RayWeightSyncScheme) and scheme.data == "object_store"
    if isinstance(scheme, SharedMemWeightSyncScheme):
        where = {"scheme": "shared", "address": scheme.address}
    elif isinstance(scheme, RemoteWeightSyncScheme) and not opens_no_port:
        where = {"scheme": "distributed", "address": scheme.address, "port": scheme.port}
    else:
        raise TypeError(
            f"vLLM's workers cannot join {type(scheme).__name__}: they are processes of another program; use "
            "SharedMemWeightSyncScheme, DistributedWeightSyncScheme, RPCWeightSyncScheme or "
            "RayWeightSyncScheme(data='torch')"
        )
    return {
        **where,
        "token": scheme.token,
        "timeout": scheme.timeout,
        "connect_timeout": scheme.connect_timeout,
        "first_worker": first_worker,
        "in_chunks": in_chunks,
        "control": control,
        "pause": pause,
    }


def receiving_scheme(info: Mapping[str, Any]) -> WeightSyncScheme:
    """Return the scheme of a worker, not initialized yet, from a dict of :func:`init_info`.

    Raises:
        ValueError: ``info["scheme"]`` is neither ``"shared"`` nor ``"distributed"``.
    """
    scheme = info["scheme"]
    common = {key: info[key] for key in ("address", "token", "timeout", "connect_timeout")}
    if scheme == "shared":
        return SharedMemWeightSyncScheme("state_dict", **common)
    if scheme == "distributed":
        return DistributedWeightSyncScheme(strategy="state_dict", port=info["port"], **common)
    raise ValueError(f"unknown scheme {scheme!r} in init_info (known: 'shared', 'distributed')")


def connect_with(scheme: WeightSyncScheme, calls: Sequence[Callable[[], None]]) -> None:
    """Connect a sender, unless it is connected already, while ``calls`` have vLLM's workers join it.

    Each call runs in a thread of its own. If one raises, the wait for the workers ends.

    Raises:
        SyncTimeoutError, SchemaMismatchError: as :meth:`~weight_update.WeightSyncScheme.connect`.
        Exception: the first error of the calls.
    """
    before = scheme.worker_alive
    answers = [call_in_thread("weight_update-init-vllm", call) for call in calls]

    def alive(worker_idx: int) -> bool:
        """Raise the error of a call that failed, which ends the wait of ``connect()``."""
        for answer in filter(Future.done, answers):
            answer.result()
        return True

    scheme.worker_alive = alive
    try:
        if not scheme.synchronized_on_sender:
            scheme.connect()
    except Exception:
        wait(answers)  # workers that still join would be in the way of the next attempt
        raise
    finally:
        scheme.worker_alive = before
    wait(answers)
    for answer in answers:
        answer.result()
