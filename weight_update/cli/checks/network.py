"""Sockets on this machine, the network interface of gloo, and the way to other machines."""

from __future__ import annotations

import os
import secrets
import socket
from concurrent.futures import wait
from datetime import timedelta
from typing import Any

import torch

from weight_update.cli.checks.base import THREADS, Finding, fail, ok, warn
from weight_update.errors import TransportError
from weight_update.text import brief
from weight_update.threads import call_in_thread
from weight_update.transports.distributed.rendezvous import SenderStore
from weight_update.transports.distributed.store import HashStore, ProcessGroupGloo

_SECONDS = 3.0
PEER_SECONDS = 2.0
"""Seconds that each address of a peer may take to accept a connection; many names have two."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
GLOO_CURE = f"set {_INTERFACE} to a network interface that is up and has an address (ip -brief address)"


def look_at_loopback() -> Finding:
    """Connect to this process over loopback and over an abstract Unix socket, and open a sender's store."""
    addresses: list[tuple[int, Any, str, str]] = [
        (socket.AF_INET, ("127.0.0.1", 0), "loopback (127.0.0.1)", "bring it up: ip link set lo up"),
        (
            socket.AF_UNIX,
            f"\0weight_update-doctor-{secrets.token_hex(8)}",
            "a Unix socket",
            "allow abstract Unix sockets in the security profile (AppArmor, SELinux) of this process",
        ),
    ]
    for family, address, name, cure in addresses:
        try:
            _exchange(family, address)
        except OSError as error:
            return fail(f"no connection over {name}: {error}", cure)
    try:
        SenderStore("127.0.0.1", 0).close()
    except TransportError as error:
        problem, _, cure = str(error).rpartition("; ")
        return fail(problem, cure)
    return ok("TCP on 127.0.0.1 and Unix sockets work")


def _exchange(family: int, address: Any) -> None:
    with socket.socket(family) as listener, socket.socket(family) as caller:
        listener.settimeout(_SECONDS)
        caller.settimeout(_SECONDS)
        listener.bind(address)
        listener.listen(1)
        caller.connect(listener.getsockname())
        listener.accept()[0].close()


def look_at_gloo(*, cluster: bool = False) -> Finding:
    """Make a gloo group of two ranks, as the ranks of a sharded trainer do, and reduce a tensor.

    Nothing else in this library needs gloo, so this check only warns.

    Args:
        cluster: whether other machines take part, which loopback does not reach.
    """
    where = os.environ.get(_INTERFACE)
    name = socket.gethostname()
    used = f"interface {where}" if where else f"the address of {name}"
    store = HashStore()
    answers = [call_in_thread(f"{THREADS}-gloo-{rank}", _reduce, store, rank) for rank in range(2)]
    for answer in answers:
        ended = wait([answer], _SECONDS).done
        problem = answer.result() if ended else f"two ranks did not connect within {_SECONDS:g} s"
        if problem:
            return warn(f"gloo, which sharded trainers need, cannot use {used}: {problem}", GLOO_CURE)
    if cluster and not where and _is_loopback(name):
        return warn(f"{name} is an address of loopback, which other machines do not reach", GLOO_CURE)
    return ok(f"two ranks of gloo connect over {used}")


def _reduce(store: Any, rank: int) -> str:
    """Return the reason why a reduction failed, or "", once the group is freed: the process may end then."""
    try:
        group = ProcessGroupGloo(store, rank, 2, timedelta(seconds=_SECONDS))
        group.allreduce([torch.ones(1)]).wait()
    except RuntimeError as error:
        return brief(error)
    return ""


def _is_loopback(name: str) -> bool:
    try:
        return socket.gethostbyname(name).startswith("127.")
    except OSError:
        return True  # gloo then uses loopback


def look_at_peer(host: str, port: int) -> Finding:
    """Connect to a port of another machine."""
    firewall = f"allow TCP to port {port} of {host} in the firewalls between the machines"
    listen = f"start the trainer on {host} first, with address= of the interface to this machine, port={port}"
    try:
        with socket.create_connection((host, port), timeout=PEER_SECONDS) as sock:
            return ok(f"{host}:{port} is reached from {sock.getsockname()[0]}")
    except socket.gaierror as error:
        return fail(
            f"the name {host} is unknown: {error.strerror}", "use an address, or mend the name server"
        )
    except ConnectionRefusedError:
        return fail(f"nothing listens on {host}:{port}", listen)
    except TimeoutError:
        return fail(f"{host}:{port} does not answer within {PEER_SECONDS:g} s", firewall)
    except OSError as error:
        return fail(f"{host}:{port} cannot be reached: {error.strerror}", f"check the route; {firewall}")
