"""A node of RPCCollector that no process of this machine started; its trainer is killed."""

import os
import signal
import subprocess
import sys
import time

from torch.distributed import rpc

from collectors.nodes import free_port
from collectors.rpc_node import join_world, run_node

ADDRESS = "127.0.0.1"


def main(port):
    """Start a node and end as a trainer that is killed; the node has this process's output."""
    subprocess.Popen([sys.executable, "-W", "ignore", __file__, str(port)])
    join_world("TRAINER_NODE", 0, 2, rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{ADDRESS}:{port}"))
    time.sleep(2.0)  # the node connects once more
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1:]:
        run_node(
            idx=0,
            address=ADDRESS,
            port=int(sys.argv[1]),
            world_size=2,
            devices=None,
            options={},
            end_seconds=5.0,
        )
        print("the node has ended")
    else:
        main(free_port())
