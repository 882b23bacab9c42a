"""Run one benchmark: ``python -m benchmarks <name>``.

The module of a benchmark has its docstring and ``QUICK``, the extent of a run with ``--quick``, both for the
help, and three functions:

- ``add_options(known)`` adds its own options to :class:`~benchmarks.options.Options`.
- ``facts(options)`` returns the facts that stand above the tables. It raises ``Unable`` if the benchmark
  cannot run here.
- ``tables(options)`` measures, and yields each table as soon as it is complete.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from typing import Any

from benchmarks.against import against
from benchmarks.options import Options
from benchmarks.report import Unable, publish

BENCHMARKS = {
    "compare": "SharedMem and MultiProcess beside TorchRL's: time, many tensors, stall and memory",
    "cluster": "Distributed, RPC and Ray beside TorchRL's, all processes on one machine",
    "collectors": "frames per second, updates and start of collectors, beside TorchRL's",
    "hosts": "one worker on another host, beside bare TCP, gloo and TorchRL, and where the time goes",
    "patch": "bytes and time of patches, beside dense, RLinf's patches and the obvious way",
    "links": "patches and dense over a slow link, to one host and to several (as root)",
    "pipeline": "conversion and transfer one after the other, and in a pipeline of chunks",
    "synchronizer": "methods and styles of a Synchronizer",
    "stores": "weights through files, beside torch.save and safetensors",
    "engines": "patches into an inference engine, beside loading all weights",
    "observers": "an update without observers, and with each of them",
    "gpu": "dense and patches of weights on a GPU, and slots on it",
    "compression": "ratio and speed of the compressions",
}


def main(arguments: list[str]) -> int:
    """Run the benchmark that the first argument names; return its exit status."""
    width = max(map(len, BENCHMARKS))
    listing = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure this library beside what a user would have otherwise.",
        epilog="\n".join(
            [
                "benchmarks:",
                *(f"  {name:{width}}  {what}" for name, what in BENCHMARKS.items()),
                "",
                "python -m benchmarks <name> --help lists its options; all have --quick, --rst, --against.",
                "The exit status is 1 if a target was missed, or if --against found a figure that is worse.",
                "Nothing else should run on the machine.",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    listing.add_argument("name", choices=BENCHMARKS, metavar="name", help="one of the list below")
    listing.add_argument("options", nargs=argparse.REMAINDER, help="of that benchmark")
    if not arguments:
        listing.print_help()
        return 0
    chosen = listing.parse_args(arguments)
    return _run(chosen.name, chosen.options)


def _run(name: str, arguments: list[str]) -> int:
    try:
        benchmark: Any = importlib.import_module(f"benchmarks.{name}")
        known = Options(name, benchmark.__doc__, benchmark.QUICK)
        benchmark.add_options(known)
        options = known.parse(arguments)
        if options.against is not None:
            return against(name, arguments, options)
        facts = benchmark.facts(options)
        return publish(name, facts, benchmark.tables(options), options.rst, options.figures)
    except Unable as reason:
        print(f"benchmarks {name}: {reason}", file=sys.stderr)
    except ImportError as error:
        if str(error.name).partition(".")[0] in ("benchmarks", "collectors", "weight_update"):
            raise
        cure = 'pip install "weight-update[bench,lz4,zstd]"'
        print(f"benchmarks {name}: {error}; for all benchmarks: {cure}", file=sys.stderr)
    return 2


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)  # like an exception, so that this process cleans up after itself
    raise SystemExit(main(sys.argv[1:]))
