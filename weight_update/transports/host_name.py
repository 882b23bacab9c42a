"""Names of hosts: processes with one name share memory."""

from __future__ import annotations

import os
from pathlib import Path

_ALONE = "/process "


def this_host() -> str:
    """Return a name shared exactly by processes that see each other's Unix sockets and open files.

    Where the kernel hides the files of this process from others of its user, as after setuid(), the part from
    ``_ALONE`` on belongs to this process alone; its sockets are visible all the same.
    """
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
    hidden = os.stat("/proc/self/fd").st_uid != os.geteuid()
    alone = f"{_ALONE}{os.getpid()}" if hidden else ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return "/".join([boot, *spaces, str(os.geteuid())]) + alone


def shares_sockets(one: str, other: str) -> bool:
    """Return whether processes of hosts with these names see each other's Unix sockets."""
    return one.partition(_ALONE)[0] == other.partition(_ALONE)[0]
