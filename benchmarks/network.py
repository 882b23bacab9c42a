"""Hosts on one machine: network namespaces joined by a switch, whose cables can be pulled."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence

_CLONE_NEWNET = 0x40000000
_CLONE_NEWUTS = 0x04000000
_SWITCH = "switch"
INTERFACE = "eth0"
"""Name of the network interface of every host."""

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BURST_SECONDS, _LEAST_BURST = 0.002, 64 << 10
_libc = ctypes.CDLL(None, use_errno=True)
_serial = itertools.count()


def why_not() -> str | None:
    """Return the reason why there can be no such hosts here, or None."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program} (iproute2) is missing"
    if os.geteuid() != 0:
        return "network namespaces are for root"
    try:
        with Network(["probe"]):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"


class Network:
    """Hosts in one subnet; host ``k`` of ``names`` has the address 10.77.0.``k + 1``.

    A context manager that makes the namespaces and removes them.

    Attributes:
        address: address of each host.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._tag = f"weight_update-{os.getpid()}-{next(_serial)}"
        self.address = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}

    def __enter__(self) -> Network:
        """Make all namespaces, or none."""
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Remove the namespaces, and with them all interfaces."""
        for host in (*self.address, _SWITCH):
            subprocess.run(["ip", "netns", "del", self.namespace(host)], capture_output=True, check=False)

    def namespace(self, host: str) -> str:
        """Return the name of a host's namespace, for ``ip netns exec``."""
        return f"{self._tag}-{host}"

    def pull(self, host: str) -> None:
        """Unplug the cable of ``host``, which then sees that it has no link."""
        self._ip("-n", self.namespace(_SWITCH), "link", "set", self._port(host), "down")

    def plug(self, host: str) -> None:
        """Plug the cable of ``host`` in again."""
        self._ip("-n", self.namespace(_SWITCH), "link", "set", self._port(host), "up")

    def lose(self, host: str) -> None:
        """Lose every packet to and from ``host`` from now on, though its link looks fine."""
        self._ip("-n", self.namespace(_SWITCH), "link", "set", self._port(host), "nomaster")

    def find(self, host: str) -> None:
        """End the effect of :meth:`lose`."""
        self._ip("-n", self.namespace(_SWITCH), "link", "set", self._port(host), "master", "br0")

    def hide(self, host: str, other: str) -> None:
        """From now on all that ``other`` is sent by ``host`` is lost."""
        nobody = ("lladdr", "02:00:00:00:00:01", "dev", INTERFACE, "nud", "permanent")
        self._ip("-n", self.namespace(host), "neigh", "replace", self.address[other], *nobody)

    def shape(self, host: str, rate: str) -> None:
        """Limit the cable of ``host`` to ``rate`` (as ``tc`` writes it) each way; see :func:`burst_bytes`."""
        ends = ((self.namespace(host), INTERFACE), (self.namespace(_SWITCH), self._port(host)))
        bucket = ("tbf", "rate", rate, "burst", str(burst_bytes(rate)), "latency", "50ms")
        for namespace, device in ends:
            self._run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)

    def enter(self, host: str) -> None:
        """Move the calling thread, and every thread and process that it starts later, to ``host``."""
        with open(f"/run/netns/{self.namespace(host)}", "rb") as file:
            _set_namespace(file.fileno())

    def settle(self, host: str) -> None:
        """Move the calling process to ``host`` for good, and name the machine by its address.

        Programs that look up the address of their own name then find the one that other hosts can reach.
        """
        self.enter(host)
        if _libc.unshare(_CLONE_NEWUTS) != 0:  # os.unshare is new in Python 3.12
            raise OSError(ctypes.get_errno(), "unshare")
        socket.sethostname(self.address[host])

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Keep the calling thread on ``host`` inside the ``with`` block."""
        with open("/proc/thread-self/ns/net", "rb") as before:
            self.enter(host)
            try:
                yield
            finally:
                _set_namespace(before.fileno())

    def _build(self) -> None:
        switch = self.namespace(_SWITCH)
        for host in (_SWITCH, *self.address):
            self._ip("netns", "add", self.namespace(host))
            self._ip("-n", self.namespace(host), "link", "set", "lo", "up")
        self._ip("-n", switch, "link", "add", "br0", "type", "bridge")
        self._ip("-n", switch, "link", "set", "br0", "up")
        for host, address in self.address.items():
            mine, port = self.namespace(host), self._port(host)
            self._ip("-n", mine, "link", "add", INTERFACE, "type", "veth", "peer", port, "netns", switch)
            self._ip("-n", mine, "addr", "add", f"{address}/24", "dev", INTERFACE)
            self._ip("-n", mine, "link", "set", INTERFACE, "up")
            self._ip("-n", switch, "link", "set", port, "master", "br0")
            self._ip("-n", switch, "link", "set", port, "up")

    def _port(self, host: str) -> str:
        """Return the name of an interface, which has at most 15 characters."""
        return f"port{list(self.address).index(host)}"

    def _ip(self, *arguments: str) -> None:
        self._run("ip", *arguments)

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, capture_output=True, text=True, check=True)


def bits_of(rate: str) -> float:
    """Return the bits a second of a rate such as ``100mbit``.

    Raises:
        ValueError: it is not such a rate.
    """
    if rate[-4:] not in _UNITS:
        raise ValueError(f"a rate is a number and {', '.join(_UNITS)}: {rate!r}")
    return float(rate[:-4]) * _UNITS[rate[-4:]]


def burst_bytes(rate: str) -> int:
    """Return the bytes that pass a shaped link at once after a pause: those of 2 ms, but at least 64 KiB."""
    return max(round(bits_of(rate) / 8 * _BURST_SECONDS), _LEAST_BURST)


def _set_namespace(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:  # os.setns is new in Python 3.12
        raise OSError(ctypes.get_errno(), "setns")
