"""The guarantees of docs/schemes.rst under random faults: ``python test/soak --scheme shared_mem``.

The exit status is 1 if a promise was broken. ``--table FILE...`` writes the accounts of earlier soaks as a
table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
_ROUND_EXTRA = 360.0


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    options = _options()
    if options.table:
        from soak_table import table

        print(table([json.loads(Path(name).read_text()) for name in options.table]))
        return 0
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {options.seed}", flush=True)
    account = _in_rounds(options) if options.peer and not options.round else _run(options)
    if options.json:
        Path(options.json).write_text(json.dumps(account, indent=2) + "\n")
    if options.round:
        sys.stdout.flush()
        os._exit(0)  # threads of a library that hangs do not end
    from soak_table import summary

    print(summary(account))
    broken = bool(account["problems"]) and not options.peer
    if broken:
        print(f"broken promises; the seed was {options.seed}")
    return int(broken)


def _options() -> argparse.Namespace:
    from soak_drivers import FAULTS, SCHEMES

    parser = argparse.ArgumentParser(prog="python test/soak", description=__doc__)
    parser.add_argument("--scheme", choices=SCHEMES, default="shared_mem")
    parser.add_argument("--hosts", action="store_true", help="distributed: each worker on a host of its own")
    parser.add_argument("--data", choices=["torch", "object_store"], default="torch", help="of Ray")
    parser.add_argument("--style", default="fully_async", help="of the Synchronizer")
    parser.add_argument("--encoding", choices=["dense", "bucket", "patch"], default="dense")
    parser.add_argument(
        "--compression", choices=["none", "ans", "zstd", "lz4"], default="none", help="of patches"
    )
    parser.add_argument("--peer", choices=["torchrl"], help="run the scheme of another library")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="repeats the faults of an earlier soak")
    parser.add_argument("--without", nargs="+", choices=FAULTS, default=[], help="faults to leave out")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=4.0, help="size of the model")
    parser.add_argument("--timeout", type=float, default=2.0, help="of the scheme")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two lines of the log")
    parser.add_argument("--json", metavar="FILE", help="where to write the account")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="accounts to write as reStructuredText")
    parser.add_argument("--round", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hosts and options.scheme != "distributed":
        parser.error("--hosts is for --scheme distributed")
    return options


def _run(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from soak_drivers import driver_of
    from soak_run import Soak

    torch.set_num_threads(1)
    return Soak(driver_of(options), options, lambda line: print(line, flush=True)).run()


def _in_rounds(options: argparse.Namespace) -> dict[str, Any]:
    """Run a library that may hang: a new process follows each one that does, until the time is over."""
    end, accounts = time.monotonic() + options.seconds, []
    with tempfile.TemporaryDirectory() as directory:
        while (left := end - time.monotonic()) > 3.0:
            file = Path(directory, "account.json")
            file.unlink(missing_ok=True)
            given = [one for one in sys.argv[1:] if one != "--round"]
            seed = str(options.seed + len(accounts))
            command = [sys.executable, str(HERE), *given, "--round", "--json", str(file)]
            process = subprocess.Popen(
                [*command, "--seed", seed, "--seconds", str(left)], start_new_session=True
            )
            try:
                process.wait(left + _ROUND_EXTRA)
            except subprocess.TimeoutExpired:
                print("the round did not end")
            with_account = file.exists()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            accounts.append(json.loads(file.read_text()) if with_account else {"hangs": 1})
    return _together(accounts, options)


def _together(accounts: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    faults: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for one in accounts:
        faults.update(one.get("faults", {}))
        total.update({name: value for name, value in one.items() if type(value) is int and name != "seed"})
    whole = [one for one in accounts if "held" in one]
    if not whole:
        raise SystemExit("no round ended with an account")
    longest = max(whole, key=lambda one: one["seconds"])
    return {
        **longest,
        **total,
        "seed": options.seed,
        "seconds": options.seconds,
        "rounds": len(accounts),
        "faults": dict(sorted(faults.items())),
        "worst_send_seconds": max(one.get("worst_send_seconds", 0.0) for one in accounts),
        "problems": [problem for one in accounts for problem in one.get("problems", [])],
    }


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(HERE)]
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # c10d tells of every stranger, with its stack
    sys.exit(main())
