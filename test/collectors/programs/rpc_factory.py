"""RPCCollector whose workers make their own policies, and have workers themselves."""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from collector_parts import OPTIONS, Env, make_policy, use_forkserver

from collectors import MultiSyncCollector, RPCCollector


def main():
    warnings.simplefilter("ignore", UserWarning)  # PyTorch warns about what RPC does itself
    use_forkserver()
    collector = RPCCollector(
        [Env],
        policy_factory=lambda: make_policy(7.0),
        collector_class=MultiSyncCollector,
        num_workers_per_collector=2,
        frames_per_batch=8,
        launcher="mp",
        sync=True,
        collector_kwargs={**OPTIONS, "pre_collect_hook": lambda: None},
    )
    try:
        frames = iter(collector)
        print(next(frames)["action"].unique().tolist())
        report = collector.update_policy_weights_(make_policy(5.0))
        data = next(frames)
        print(data["action"].unique().tolist(), report.version, data["policy_version"].unique().tolist())
    finally:
        collector.shutdown()


if __name__ == "__main__":
    main()
