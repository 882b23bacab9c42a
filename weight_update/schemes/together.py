"""Several models updated as one step."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

from weight_update.errors import LifecycleError, SyncFailedError
from weight_update.handle import SendHandle, failed
from weight_update.report import SyncReport
from weight_update.schemes.base import WeightSyncScheme

__all__ = ["group_schemes", "send_together"]


def group_schemes(schemes: Iterable[WeightSyncScheme]) -> None:
    """Declare that each worker holds a model of each of these schemes. Call it before workers start.

    The receivers of a group in one process then share one gate: ``hold()`` of one, or a forward pass of
    one model, keeps out updates of all, and :func:`send_together` can switch all models at one moment.
    """
    name = secrets.token_hex(8)
    for scheme in schemes:
        scheme.group = name


def send_together(
    weights: Mapping[WeightSyncScheme, Any], worker_ids: Any = None
) -> dict[WeightSyncScheme, SyncReport]:
    """Send several models as one atomic step: on every worker all are applied, or none on any.

    First every worker stages all models; when each has them whole and checked, all are told to apply,
    and each worker switches all its models at one moment. If staging fails anywhere, nothing is applied
    anywhere.

    Args:
        weights: by scheme; as for ``send``, None reads the scheme's source. All schemes are connected
            senders of one :func:`group_schemes` group.
        worker_ids: as for ``send``.

    Returns:
        the report of each scheme.

    Raises:
        LifecycleError: a scheme is not connected, or they are not of one group.
        SyncFailedError: a worker could not stage or apply; if staging failed, no worker changed.
    """
    schemes = list(weights)
    groups = {scheme.group for scheme in schemes}
    if len(groups) != 1 or None in groups:
        raise LifecycleError("call group_schemes([...]) on these schemes before their workers start")
    step = f"{secrets.token_hex(8)}/{len(schemes)}"
    handles: dict[WeightSyncScheme, SendHandle] = {}
    try:
        for scheme in schemes:
            handles[scheme] = scheme.stage(weights[scheme], worker_ids, step)
        _require_staged(handles)
    except BaseException:
        for handle in handles.values():
            handle.abort()
        raise
    start = time.perf_counter()
    for handle in handles.values():
        handle.commit()
    reports = {scheme: handle.wait() for scheme, handle in handles.items()}
    for report in reports.values():
        report.seconds["ack"] = time.perf_counter() - start
    return reports


def _require_staged(handles: Mapping[WeightSyncScheme, SendHandle]) -> None:
    problems: dict[int, Exception] = {}
    for handle in handles.values():
        problems.update(handle.wait_staged())
    if problems:
        version = max(handle.version for handle in handles.values())
        first = next(iter(handles.values()))
        error = failed(version, problems, first.report)
        raise SyncFailedError(f"no model was updated on any worker; {error}", problems, first.report)
