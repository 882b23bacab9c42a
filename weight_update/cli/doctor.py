"""``weight-update doctor``: check this machine for every scheme."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Sequence

import click

from weight_update.cli.checks import gpu, memory, network, packages, ray
from weight_update.cli.checks.base import Check, run, still_running
from weight_update.cli.output import json_option, show

_PACKAGES = ("torch", "tensordict", "torchrl", "ray")
_PROC = "mount /proc and /sys, or run on Linux"
_NAMES = "use the address of the peer; the name server does not answer"


def _peers(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return host and port of each HOST:PORT; an IPv6 address stands in brackets."""
    del ctx, param
    peers = []
    for value in values:
        host, _, port = value.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise click.BadParameter(
                f"{value!r} is not HOST:PORT, such as 10.0.0.5:29650; a port is a number from 1 to 65535"
            )
        peers.append((host.strip("[]"), int(port)))
    return peers


def checks(peers: Sequence[tuple[str, int]]) -> list[Check]:
    """Return all checks, in the order in which their findings are shown."""
    reinstall = 'reinstall: pip install --force-reinstall "weight-update[cli]"'
    gloo = functools.partial(network.look_at_gloo, cluster=bool(peers))
    return [
        Check("Python", packages.look_at_python, reinstall),
        *(Check(one, functools.partial(packages.look_at_package, one), reinstall) for one in _PACKAGES),
        Check("compiled loops", packages.look_at_kernels, packages.KERNELS_CURE),
        Check("memory", memory.look_at_memory, _PROC),
        Check("memory limit", memory.look_at_cgroup, _PROC),
        Check("open files", memory.look_at_descriptors, _PROC),
        Check("shared memory", memory.look_at_memfd, "use Linux 3.17 or newer, with memfd_create"),
        Check("other processes", memory.look_at_other_processes, "use SharedMemWeightSyncScheme"),
        Check(memory.SHM, memory.look_at_shm, f"mount it: mount -t tmpfs tmpfs {memory.SHM}"),
        Check("sockets", network.look_at_loopback, "bring up loopback: ip link set lo up"),
        Check("gloo", gloo, network.GLOO_CURE),
        *(
            Check(f"peer {host}:{port}", functools.partial(network.look_at_peer, host, port), _NAMES)
            for host, port in peers
        ),
        Check("Ray", ray.look_at_ray, ray.RAY_CURE),
        Check("GPU", gpu.look_at_cuda, "look at the output of nvidia-smi", gpu.GPU_SECONDS),
        Check("CUDA IPC", gpu.look_at_ipc, gpu.IPC_CURE, gpu.GPU_SECONDS),
        Check("NCCL", gpu.look_at_nccl, gpu.NCCL_CURE, gpu.GPU_SECONDS),
    ]


@click.command("doctor", epilog="Example: weight-update doctor --peer 10.0.0.5:29650")
@click.option(
    "--peer",
    "peers",
    metavar="HOST:PORT",
    callback=_peers,
    multiple=True,
    help="Port of another machine that must be reachable, such as the trainer's. May be given several times.",
)
@json_option
@click.pass_context
def command(ctx: click.Context, peers: list[tuple[str, int]], as_json: bool) -> None:
    """Check this machine for every scheme, in a few seconds.

    Each finding states what to do about it. The exit status is 1 if a check fails. Warnings and skipped
    checks concern only some programs.
    """
    good = False
    try:
        found = run(checks(peers))
        rows = [
            {"check": name, "status": one.status, "found": one.found, "cure": one.cure or None}
            for name, one in found
        ]
        good = all(one.status != "fail" for _, one in found)
        show({"good": good, "findings": rows}, as_json=as_json)
    finally:  # also after Ctrl-C
        if still_running():
            atexit.register(_leave, 0 if good else 1)
    ctx.exit(0 if good else 1)


def _leave(status: int) -> None:
    """End the process at once: at an orderly end, C++ aborts if a check still runs in it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
