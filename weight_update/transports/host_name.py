"""Names of hosts: processes with one name share memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from weight_update.errors import TransportError

_FILES = "/files of "


def this_host() -> str:
    """Return a name shared exactly by processes that see each other's Unix sockets and open files.

    The part from ``_FILES`` on is about open files alone. The kernel shows those of a process to others of
    its user in its user namespace, but not after setuid(): then this part belongs to the process alone.

    Raises:
        TransportError: ``/proc`` lacks what the name is made of.
    """
    try:
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        hidden = os.stat("/proc/self/fd").st_uid != os.geteuid()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise TransportError(
            f"it is unknown which processes share memory with this one ({error}): give host= a name of this "
            "machine or container, or set WEIGHT_UPDATE_HOST"
        ) from None
    files = f"process {os.getpid()}" if hidden else ""
    with contextlib.suppress(FileNotFoundError):  # a kernel without user namespaces
        files = files or os.readlink("/proc/self/ns/user")
    return "/".join([boot, *spaces, str(os.geteuid())]) + _FILES + files


def shares_sockets(one: str, other: str) -> bool:
    """Return whether processes of hosts with these names see each other's Unix sockets."""
    return one.partition(_FILES)[0] == other.partition(_FILES)[0]
