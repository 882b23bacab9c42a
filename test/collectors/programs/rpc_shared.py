"""RPCCollector with a scheme that knows nothing of RPC."""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from collector_parts import OPTIONS, Env, make_policy, use_forkserver

from collectors import RPCCollector
from weight_update import SharedMemWeightSyncScheme


def main():
    warnings.simplefilter("ignore", UserWarning)  # PyTorch warns about what RPC does itself
    use_forkserver()
    collector = RPCCollector(
        [Env],
        make_policy(),
        frames_per_batch=8,
        launcher="mp",
        sync=True,
        collector_kwargs=OPTIONS,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
    )
    try:
        report = collector.update_policy_weights_(make_policy(5.0))
        data = next(iter(collector))
        print(data["action"].unique().tolist(), report.version, data["policy_version"].unique().tolist())
    finally:
        collector.shutdown()


if __name__ == "__main__":
    main()
