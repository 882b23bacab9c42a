"""RPCCollector, whoever is first: a worker is killed, and the program ends without shutdown()."""

import multiprocessing
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from collector_parts import OPTIONS, Env, fill, make_policy, use_forkserver, weights_of

from collectors import RPCCollector
from weight_update import SyncFailedError, WorkerError


def main():
    warnings.simplefilter("ignore", UserWarning)  # PyTorch warns about what RPC does itself
    use_forkserver()
    policy = make_policy(0.0)
    collector = RPCCollector(
        [Env] * 2,
        policy,
        frames_per_batch=8,
        launcher="mp",
        collector_kwargs=OPTIONS,
        update_after_each_batch=True,
    )
    frames = iter(collector)
    versions = set()
    for _ in range(20):
        fill(policy, 1.0)
        data = next(frames)
        assert (data["next", "policy_version"] == data["policy_version"]).all()
        versions.add(int(data["policy_version"].max()))
    assert len(versions) > 5, versions
    victim = multiprocessing.active_children()[0]
    victim.kill()
    victim.join()
    try:
        collector.update_policy_weights_(weights_of(9.0))
    except SyncFailedError as error:
        print("failed:", len(error.failures), "of 2")
    try:
        for _ in range(10):
            next(frames)
    except WorkerError as error:  # from the wait for frames, or from the update after a batch
        print("told:", str(error)[len("worker 0 ") :])


if __name__ == "__main__":
    main()
