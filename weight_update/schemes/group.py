"""Groups of schemes: several models updated as one step."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from weight_update.errors import GroupSyncFailedError, LifecycleError
from weight_update.report import SyncReport
from weight_update.schemes.base import WeightSyncScheme
from weight_update.schemes.updates import uncompiled
from weight_update.sender.handle import SendHandle, failed

_BY_SCHEME = "send_together takes a dict of weights by scheme, such as {actor: None, critic: None}"


def group_schemes(schemes: Iterable[WeightSyncScheme]) -> None:
    """Declare that each worker holds one model of each of these schemes. Call it before workers start.

    A worker that creates its schemes itself also calls this, before it connects them.

    The receivers of a group in one process then share one gate. ``hold()`` of one scheme, or a forward pass
    of one model, delays the updates of all models, and :func:`send_together` switches all models at the same
    moment::

        actor, critic = SharedMemWeightSyncScheme(), SharedMemWeightSyncScheme()
        group_schemes([actor, critic])
        ...initialize, start workers, connect...
        send_together({actor: None, critic: None})

    Raises:
        TypeError: ``schemes`` is not a list of schemes, or a similar collection.
    """
    found = tuple(schemes) if isinstance(schemes, Iterable) else ()
    if not found or not all(isinstance(scheme, WeightSyncScheme) for scheme in found):
        raise TypeError(f"group_schemes takes a list of schemes, such as [actor, critic], not {schemes!r}")
    name = secrets.token_hex(8)
    for scheme in found:
        scheme.group = name


@uncompiled
def send_together(
    weights: Mapping[WeightSyncScheme, Any], worker_ids: Any = None
) -> dict[WeightSyncScheme, SyncReport]:
    """Send several models as one step: a worker applies all of them at the same moment, or none.

    First, every worker stages all models: it receives and checks them. If staging fails in any worker, no
    worker applies anything. When all workers have staged all models, each of them switches all its models. A
    worker that dies or is late from then on is named in the error, and the others have the update. Each of
    the two steps waits at most for the ``timeout`` of the schemes; with ``max_in_flight``, staging may wait
    for ``timeout`` for each model. A late joiner takes no part until it has connected all models: until then,
    it gets each of them on its own, and the call does not wait for it.

    Args:
        weights: weights by scheme; as for :meth:`WeightSyncScheme.send`, None reads the scheme's source. All
            schemes must be connected senders of one :func:`group_schemes` group.
        worker_ids: as for :meth:`WeightSyncScheme.send`.

    Returns:
        the report of each scheme.

    Raises:
        TypeError: ``weights`` is not a dict with schemes as its keys, or is empty.
        LifecycleError: a scheme is not connected, or the schemes are not of one group.
        GroupSyncFailedError: workers could not stage or apply the models. The error holds the failures and
            reports of all schemes. If staging failed, no worker changed.
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"{_BY_SCHEME}, not {type(weights).__name__}")
    for key in weights:
        if not isinstance(key, WeightSyncScheme):
            raise TypeError(f"{_BY_SCHEME}; {key!r} is no scheme")
    if not weights:
        raise TypeError(f"{_BY_SCHEME}; this one is empty")
    schemes = list(weights)
    groups = {scheme.group for scheme in schemes}
    if len(groups) != 1 or None in groups:
        raise LifecycleError("call group_schemes([...]) on these schemes before their workers start")
    _unite(schemes)
    step = f"{secrets.token_hex(8)}/{len(schemes)}"
    handles: dict[WeightSyncScheme, SendHandle] = {}
    settle = SendHandle.abort
    try:
        for scheme in schemes:
            handles[scheme] = scheme.stage(weights[scheme], worker_ids, step)
        began = time.monotonic()
        failures = {scheme: handle.wait_staged(began) for scheme, handle in handles.items()}
        _raise_failures(handles, failures, "no model was updated on any worker")
        start = time.perf_counter()
        settle = SendHandle.commit
    finally:
        try:
            _for_all(settle, handles.values())
        except BaseException:  # of a signal handler: workers that got no message would wait for one
            _for_all(settle, handles.values())
            raise
    for scheme, handle in handles.items():
        scheme.tell_observers(handle)
    began = time.monotonic()
    failures = {scheme: handle.wait_applied(began) for scheme, handle in handles.items()}
    for handle in handles.values():
        handle.report.seconds["ack"] = time.perf_counter() - start
    _raise_failures(handles, failures, "not every worker has all models")
    return {scheme: handle.report for scheme, handle in handles.items()}


def _unite(schemes: Sequence[WeightSyncScheme]) -> None:
    """Let late joiners that have the models of all schemes change them together from now on."""
    senders = [scheme._require_sender().sender for scheme in schemes]
    complete = set.intersection(*(sender.late_joiners for sender in senders))
    for sender in senders:
        sender.unite(complete)


def _for_all(settle: Callable[[SendHandle], None], handles: Iterable[SendHandle]) -> None:
    """Call ``settle`` for all handles, also after one call has raised."""
    with ExitStack() as rest:
        for handle in reversed([*handles]):
            rest.callback(settle, handle)


def _raise_failures(
    handles: Mapping[WeightSyncScheme, SendHandle],
    failures: Mapping[WeightSyncScheme, Mapping[int, Exception]],
    message: str,
) -> None:
    """Raise one error for all ``failures``, if there are any."""
    by_scheme = {scheme: errors for scheme, errors in failures.items() if errors}
    if not by_scheme:
        return
    lines = [
        f"{scheme.model_id or type(scheme).__name__}: {failed(handles[scheme].version, errors, None)}"
        for scheme, errors in by_scheme.items()
    ]
    reports = {scheme: handle.report for scheme, handle in handles.items()}
    raise GroupSyncFailedError("\n".join([f"{message}:", *lines]), by_scheme, reports)
