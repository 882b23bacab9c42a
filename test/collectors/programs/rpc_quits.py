"""RPCCollector whose second worker ends before it enters the RPC world."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from collector_parts import OPTIONS, Env, make_policy, use_forkserver

from collectors import RPCCollector, rpc
from weight_update import WorkerError

program = rpc.run_node


def quit_or_run(**options):
    if options["idx"] == 1:
        os._exit(3)
    program(**options)


def main():
    use_forkserver()
    rpc.run_node = quit_or_run
    start = time.monotonic()
    options = {"frames_per_batch": 8, "launcher": "mp", "collector_kwargs": OPTIONS}
    try:
        RPCCollector([Env] * 2, make_policy(), **options)
    except WorkerError as error:
        print(error, time.monotonic() - start < 60)


if __name__ == "__main__":
    main()
