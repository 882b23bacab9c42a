"""Updates over a slow link: what a patch saves there, and what each further host costs.

::

    python -m benchmarks.links                  # about ten minutes, as root: hosts are network namespaces
    python -m benchmarks.links --quick          # half a minute, to see that it works
    python -m benchmarks.links --rst docs/benchmark_links.rst
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp

from benchmarks.network import Network, why_not
from benchmarks.patch_sync import digests, empty_model
from benchmarks.patch_updates import change, layered
from benchmarks.report import Figure, Table, machine, ratio, to_rst, to_text
from weight_update import DistributedWeightSyncScheme, PatchEncoding, WeightStrategy, WeightSyncScheme

__all__ = ["main"]

ENCODINGS = {
    "dense": "dense",
    "patch, raw": PatchEncoding(values="raw"),
    "patch, relative": PatchEncoding(values="relative"),
    "patch, relative, zstd": PatchEncoding(values="relative", compression="zstd"),
}
_HOSTS = ("one", "two", "three", "four")
_FRACTION = 0.01
_WARM = 1
_TARGET = 15.0

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Plan:
    """The options of one run.

    Attributes:
        megabytes: of the model that is sent to one host.
        hosts_megabytes: of the one that is sent to several.
        turns: how often each thing is timed.
        rate: of the sender's link, as ``tc`` writes it.
    """

    megabytes: float
    hosts_megabytes: float
    turns: int
    rate: str


@dataclass(frozen=True)
class Sent:
    """One encoding to some hosts.

    Attributes:
        seconds: from ``send()`` until all have applied it.
        encode: the part of it before anything is sent.
        apply: the part of it after all has arrived.
        megabytes: of an update's payloads.
    """

    seconds: Figure
    encode: Figure
    apply: Figure
    megabytes: float


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print; returns the exit status."""
    plan, rst = _parse(arguments)
    reason = why_not()
    if reason is not None:
        print(f"no hosts to measure with: {reason}", file=sys.stderr)
        return 1
    facts = [*machine(), f"The sender's link: {plan.rate} each way (tc tbf, burst 256kb)"]
    print("\n".join(facts) + "\n", flush=True)
    tables = []
    for make_table in (_encodings_table, _hosts_table):
        table = make_table(plan)
        print(to_text(table), flush=True)
        tables.append(table)
    if rst is not None:
        rst.write_text(to_rst(facts, tables, by="benchmarks.links"))
    return 0


def _encodings_table(plan: Plan) -> Table:
    sent = {label: measure(plan, label, plan.megabytes, 1) for label in ENCODINGS}
    rows = []
    for label, one in sent.items():
        sooner = ratio(sent["dense"].seconds, one.seconds) or 0.0
        rows.append(
            [
                label,
                f"{one.megabytes:.2f}",
                *(figure.show(1e3, 0) for figure in (one.seconds, one.encode, one.apply)),
                f"{sooner:.1f}",
            ]
        )
    note = (
        f"Milliseconds, median (least .. most) of {plan.turns} turns. {_FRACTION:.0%} of all elements\n"
        f"change by 1 to 4 ulp in bfloat16. To reach at 500 MB: {_TARGET:.0f} times sooner."
    )
    head = ["encoding", "MB sent", "send() until applied", "encode", "apply", "times sooner than dense"]
    return Table(f"{plan.megabytes:.0f} MB to one host over {plan.rate}/s", note, head, rows)


def _hosts_table(plan: Plan) -> Table:
    rows = []
    first: dict[str, Sent] = {}
    for count in range(1, len(_HOSTS) + 1):
        row = [str(count)]
        for label in ("dense", "patch, relative, zstd"):
            one = measure(plan, label, plan.hosts_megabytes, count)
            first.setdefault(label, one)
            times = ratio(one.seconds, first[label].seconds) or 0.0
            row += [one.seconds.show(1e3, 0), f"{times:.2f}"]
        rows.append(row)
    note = "Milliseconds, as above; only the sender's own link is shaped. One worker on each host."
    head = ["hosts", "dense", "of one host", "patch", "of one host"]
    return Table(f"{plan.hosts_megabytes:.0f} MB to several hosts behind one link", note, head, rows)


def measure(plan: Plan, label: str, megabytes: float, count: int) -> Sent:
    """Time updates with one encoding to one worker on each of ``count`` hosts.

    Raises:
        RuntimeError: a worker ended with other weights than the trainer.
    """
    print(f"... {label}, {megabytes:g} MB to {count}", file=sys.stderr, flush=True)
    hosts = _HOSTS[:count]
    weights, random = layered(megabytes), np.random.default_rng(0)
    with Network(["trainer", *hosts]) as network, network.inside("trainer"):
        network.shape("trainer", plan.rate)
        with _connected(network, hosts, label, weights) as (scheme, pipes):
            seconds, reports = [], []
            for _ in range(_WARM + plan.turns):
                change(weights, _FRACTION, "1..4 ulp", random)
                start = time.perf_counter()
                reports.append(scheme.send(weights=weights))
                seconds.append(time.perf_counter() - start)
            for pipe in pipes:
                pipe.send("digests")
            if any(pipe.recv() != digests(weights) for pipe in pipes):
                raise RuntimeError(f"{label}: a worker has other weights than the trainer")
    kept = reports[_WARM:]
    encode = tuple(report.seconds["encode"] for report in kept)
    apply = tuple(max(report.apply_seconds.values()) for report in kept)
    megabytes = kept[-1].wire_bytes / 1e6
    return Sent(Figure(tuple(seconds[_WARM:])), Figure(encode), Figure(apply), megabytes)


@contextlib.contextmanager
def _connected(
    network: Network, hosts: tuple[str, ...], label: str, weights: Weights
) -> Iterator[tuple[WeightSyncScheme, list[Connection]]]:
    """A sender on this host, and a worker on each other."""
    os.environ["WEIGHT_UPDATE_HOST"] = "trainer"
    ctx = mp.get_context("spawn")
    strategy = WeightStrategy("state_dict", encoding=ENCODINGS[label])
    scheme = DistributedWeightSyncScheme(strategy=strategy, address=network.address["trainer"])
    scheme.init_on_sender(weights=weights, num_workers=len(hosts), devices=["cpu"] * len(hosts))
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    pipes, processes = [], []
    for idx, host in enumerate(hosts):
        pipe, theirs = ctx.Pipe()
        pipes.append(pipe)
        processes.append(
            ctx.Process(target=_receive, args=(network, host, scheme, idx, shapes, theirs), daemon=True)
        )
        processes[-1].start()
        theirs.close()
    try:
        scheme.connect()
        yield scheme, pipes
    finally:
        for pipe in pipes:
            pipe.close()  # ends the process
        for process in processes:
            process.join(10.0)
        scheme.shutdown()


def _receive(
    network: Network,
    host: str,
    scheme: WeightSyncScheme,
    idx: int,
    shapes: dict[str, tuple[int, ...]],
    pipe: Connection,
) -> None:
    """Body of a worker."""
    network.enter(host)
    os.environ["WEIGHT_UPDATE_HOST"] = host
    torch.set_num_threads(1)
    model = empty_model(shapes)
    scheme.init_on_receiver(model=model, worker_idx=idx)
    scheme.connect()
    with contextlib.suppress(EOFError):
        while pipe.recv() == "digests":
            pipe.send(digests(model.state_dict()))
    scheme.shutdown()


def _parse(arguments: list[str] | None) -> tuple[Plan, Path | None]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links", description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, help="size of the model to one host; default: 500")
    parser.add_argument("--turns", type=int, help="how often each thing is timed; default: 5")
    parser.add_argument("--rate", default="1gbit", help="of the sender's link; default: 1gbit")
    parser.add_argument("--quick", action="store_true", help="4 MB, 2 turns")
    parser.add_argument("--rst", type=Path, metavar="FILE", help="write the tables there as well")
    options = parser.parse_args(arguments)
    megabytes = options.megabytes or (4.0 if options.quick else 500.0)
    turns = options.turns or (2 if options.quick else 5)
    return Plan(megabytes, min(megabytes, 100.0), turns, options.rate), options.rst


if __name__ == "__main__":
    raise SystemExit(main())
