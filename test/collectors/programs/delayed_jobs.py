"""A collector whose jobs were started before, which TorchRL's submitit_delayed_launcher does by Slurm.

Usage: delayed_jobs.py CLASS
"""

import multiprocessing
import socket
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from batch_jobs import follow_an_update
from collector_parts import OPTIONS, Env, make_policy, use_forkserver
from torchrl.collectors.distributed.generic import _distributed_init_delayed
from torchrl.collectors.distributed.rpc import DEFAULT_TENSORPIPE_OPTIONS, _rpc_init_collection_node

import collectors
from collectors.nodes import free_port

WORKERS = 2


def job(name, rank, port):
    """Run TorchRL's program of a job."""
    address = socket.gethostbyname(socket.gethostname())
    if name == "RPCCollector":
        _rpc_init_collection_node(rank, address, port, WORKERS + 1, None, DEFAULT_TENSORPIPE_OPTIONS)
    else:
        _distributed_init_delayed(rank, "gloo", address, port, WORKERS + 1)


def main(name):
    warnings.simplefilter("ignore", UserWarning)  # PyTorch warns about what RPC does itself
    use_forkserver()
    port = free_port()
    jobs = [multiprocessing.Process(target=job, args=(name, rank + 1, port)) for rank in range(WORKERS)]
    for process in jobs:
        process.start()
    collector = getattr(collectors, name)(
        [Env] * WORKERS,
        make_policy(),
        frames_per_batch=8,
        total_frames=-1,
        launcher="submitit_delayed",
        tcp_port=port,
        collector_kwargs=OPTIONS,
    )
    follow_an_update(collector)
    collector.shutdown()
    for process in jobs:
        process.join(20.0)
    print([process.exitcode for process in jobs])


if __name__ == "__main__":
    main(*sys.argv[1:])
