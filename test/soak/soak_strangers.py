"""Strangers: connections that do not belong, to every listener of a process."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import TCPStore

from weight_update import RemoteWeightSyncScheme

_SECONDS = 3.0


def listeners(pid: int) -> list[Any]:
    """Return the addresses that a process listens on: TCP, and Unix sockets of this library."""
    tcp = psutil.Process(pid).net_connections("tcp")
    found: list[Any] = [tuple(one.laddr) for one in tcp if one.status == psutil.CONN_LISTEN]
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}")))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split()
        listens = int(flags, 16) & 0x10000
        if listens and inode in inodes and path and path[0].startswith("@weight_update"):
            found.append("\0" + path[0][1:])
    return found


def disturb(pid: int, scheme: Any, dice: random.Random) -> None:
    """Thread: send rubbish to all listeners, keep the connections for a while, and leave."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        for address in listeners(pid):
            with contextlib.suppress(OSError):  # the ports for payloads let nobody in
                for _ in range(dice.randrange(1, 12)):
                    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
                    stranger = stack.enter_context(socket.socket(family))
                    stranger.settimeout(1.0)
                    stranger.connect(address)
                    stranger.sendall(_rubbish(dice))
        if isinstance(scheme, RemoteWeightSyncScheme) and scheme.port:  # 0: Ray's object store has none
            spoil_store(scheme.address, scheme.port, dice)
        time.sleep(dice.random() * _SECONDS)


def _rubbish(dice: random.Random) -> bytes:
    noise = dice.randbytes(dice.choice([1, 10, 100, 5000]))
    return dice.choice(
        [
            b"",
            noise,
            b"WUPD" + noise,
            b"GET / HTTP/1.1\r\n\r\n",
            struct.pack("<Q", 1 << 40) + noise,
            b"\0" + struct.pack("<I", 0x3C85F7CE) + noise,  # as a client of a TCPStore begins
        ]
    )


def spoil_store(address: str, port: int, dice: random.Random) -> None:
    """Write rubbish over the values in a TCPStore, and beside them, as any client of it can."""
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2.0))
    with contextlib.suppress(RuntimeError):
        for _ in range(dice.randrange(1, 10)):
            held = [key.removeprefix("/") for key in store.list_keys()]
            write = dice.choice([store.set, store.append, store.queue_push])
            write(dice.choice([*held, f"rubbish{dice.randrange(100)}"]), dice.randbytes(40).hex())
        if dice.random() < 0.2:
            for key in held:
                store.delete_key(key)
