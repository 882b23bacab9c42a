"""RPCCollector in step: every way to update its workers, and what it refuses."""

import contextlib
import multiprocessing
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from collector_parts import OPTIONS, Env, make_policy, require_exact, use_forkserver, weights_of
from update_calls import require_every_call, require_refusals

from collectors import RPCCollector, RPCWeightUpdater
from weight_update import LifecycleError, PolicyLag, RPCWeightSyncScheme


def main():
    warnings.simplefilter("ignore", UserWarning)  # PyTorch warns about what RPC does itself
    use_forkserver()
    policy = make_policy(0.0)
    options = {"frames_per_batch": 8, "launcher": "mp", "sync": True, "collector_kwargs": OPTIONS}
    collector = RPCCollector([Env] * 2, policy, **options)
    told = []
    collector.add_observer(told.append)
    frames = iter(collector)

    def used_now():
        data = next(frames)
        assert torch.equal(*data["action"].unbind(-1))
        assert (data["policy_version"] == collector.policy_version).all()
        return data["action"].unique().tolist()

    require_exact(next(frames))
    assert isinstance(collector._weight_sync_schemes["policy"], RPCWeightSyncScheme)
    require_every_call(collector, used_now, policy)
    require_refusals(collector, used_now)
    require_legacy_updater(collector, used_now)
    collector.update_policy_weights_({0: make_policy(3.0), 1: make_policy(4.0)})
    assert used_now() == [3.0, 4.0]
    collector.update_policy_weights_(make_policy(5.0), worker_ids=1)
    assert next(frames)["action"].unique().tolist() == [3.0, 5.0]
    assert collector.set_seed(1) > 1
    for _ in range(2):
        collector.shutdown()
    assert multiprocessing.active_children() == []
    with contextlib.suppress(LifecycleError):
        raise AssertionError(f"a seed after the shutdown: {collector.set_seed(1)}")
    last = [one for one in told if isinstance(one, PolicyLag)][-1]
    assert (last.version, last.frames, last.mean, last.max) == (collector.policy_version, 8, 0.5, 1)
    try:
        RPCCollector([Env], policy, **options)
    except LifecycleError as error:
        print("a second one:", "one RPCCollector in each process" in str(error))


def require_legacy_updater(collector, used_now):
    """The updater of TorchRL's name sends through the collector's scheme."""
    workers = collector.collector_infos, collector.collector_class, collector.collector_rrefs
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        updater = RPCWeightUpdater(*workers, policy_weights=weights_of(6.0), num_workers=2)
    assert "weight_update.RPCWeightSyncScheme()" in str(found[0].message)
    collector.weight_updater = updater
    before = collector.policy_version
    assert collector.update_policy_weights_().version == before + 1
    assert used_now() == [6.0]
    assert collector.update_policy_weights_(weights_of(7.0)).version == before + 2
    assert used_now() == [7.0]
    assert updater.push_weights(weights=weights_of(8.0), worker_ids=[0, 1]).version == before + 3
    assert used_now() == [8.0]
    assert collector.policy_version == before + 3
    collector.weight_updater = None


if __name__ == "__main__":
    main()
