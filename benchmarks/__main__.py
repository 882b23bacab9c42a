"""Run one benchmark: ``python -m benchmarks <name>``."""

from __future__ import annotations

import argparse
import importlib
import sys

BENCHMARKS = {
    "compare": "SharedMem and MultiProcess beside TorchRL's: time, many tensors, stall and memory",
    "cluster": "Distributed, RPC and Ray beside TorchRL's, all processes on one machine",
    "patch": "bytes and time of patches, beside dense, RLinf's patches and the obvious way",
    "links": "patches and dense over a slow link, to one host and to several (as root)",
    "pipeline": "conversion and transfer one after the other, and in a pipeline of chunks",
    "synchronizer": "methods and styles of a Synchronizer",
    "gpu": "dense and patches of weights on a GPU, and slots on it",
    "scan": "finding the elements that changed",
    "compression": "ratio and speed of the compressions",
}


def main(arguments: list[str]) -> int:
    """Run the benchmark that the first argument names; return its exit status."""
    width = max(map(len, BENCHMARKS))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure this library beside what a user would have otherwise.",
        epilog="\n".join(
            [
                "benchmarks:",
                *(f"  {name:{width}}  {what}" for name, what in BENCHMARKS.items()),
                "",
                "python -m benchmarks <name> --help lists its options; all have --quick and --rst.",
                "The exit status is 1 if a target was missed. Nothing else should run on the machine.",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHMARKS, metavar="name", help="one of the list below")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of that benchmark")
    options = parser.parse_args(arguments)
    status: int = importlib.import_module(f"benchmarks.{options.name}").main(options.options)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
