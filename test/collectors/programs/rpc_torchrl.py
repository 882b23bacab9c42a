"""TorchRL's own RPCCollector with our scheme."""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from collector_parts import OPTIONS, Env, make_policy, use_forkserver, weights_of
from torchrl.collectors import Collector
from torchrl.collectors.distributed import RPCCollector

from collectors.nodes import free_port
from weight_update import RPCWeightSyncScheme


def main():
    warnings.simplefilter("ignore")
    use_forkserver()
    scheme = RPCWeightSyncScheme(timeout=20.0, connect_timeout=60.0)
    collector = RPCCollector(
        [Env] * 2,
        make_policy(1.0),
        frames_per_batch=20,
        total_frames=10**6,
        launcher="mp",
        tcp_port=free_port(),
        sync=True,
        collector_class=Collector,
        collector_kwargs=OPTIONS,
        weight_sync_schemes={"policy": scheme},
    )
    frames = iter(collector)
    seen = [next(frames)["action"].unique().tolist()]
    for value in (2.0, 3.0):
        collector.update_policy_weights_(weights_of(value))
        seen.append(next(frames)["action"].unique().tolist())
    collector.update_policy_weights_(weights_of(4.0), worker_ids=1)
    seen.append(next(frames)["action"].unique().tolist())
    print(seen, scheme.worker_versions)
    collector.shutdown()


if __name__ == "__main__":
    main()
