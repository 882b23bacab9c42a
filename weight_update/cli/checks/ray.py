"""Whether Ray can be used, and whether a cluster answers."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from pathlib import Path

from weight_update.cli.checks.base import Finding, fail, ok, skipped

_SECONDS = 3.0
_STARTS_ANEW = ("", "local", "auto")
RAY_CURE = "start Ray (ray start --head), or unset RAY_ADDRESS so that ray.init() starts one"


def look_at_ray() -> Finding:
    """Connect to the cluster that ``ray.init()`` would use, if there is one."""
    if find_spec("ray") is None:
        return skipped("Ray is not installed", 'if you need it: pip install "weight-update[ray]"')
    address = os.environ.get("RAY_ADDRESS", "").removeprefix("ray://")
    named = address not in _STARTS_ANEW
    directory = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    current = Path(directory, "ray/ray_current_cluster")  # in which "ray start" leaves the address
    if address in ("", "auto") and current.is_file():
        address = current.read_text("utf-8").strip()
    if address in _STARTS_ANEW:
        return ok("no cluster runs here; ray.init() starts one")
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_SECONDS).close()
    except (OSError, ValueError) as error:
        if named:
            return fail(f"RAY_ADDRESS is {address}, which cannot be reached: {error}", RAY_CURE)
        return ok(f"the last cluster ({address}) has ended; ray.init() starts one")
    return ok(f"the cluster at {address} answers")
