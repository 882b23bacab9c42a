"""Workers that have workers, and the weight updaters of TorchRL."""

from concurrent.futures import ThreadPoolExecutor
from copy import copy

import pytest
import torch
import torchrl.collectors
from collector_parts import OPTIONS, Env, make_policy, policy_of_seven, weights_of
from tensordict import TensorDict

from collectors import Collector, MultiSyncCollector
from weight_update import MemoryWeightSyncScheme, SharedMemWeightSyncScheme


def with_factory(above, **options):
    """Return a collector without a policy that receives from ``above``."""
    return MultiSyncCollector(
        [Env],
        policy_factory=policy_of_seven,
        frames_per_batch=8,
        total_frames=-1,
        worker_idx=0,
        weight_recv_schemes={"policy": copy(above)},
        **OPTIONS,
        **options,
    )


def test_a_worker_with_a_policy_factory_passes_updates_on():
    above = MemoryWeightSyncScheme()
    above.init_on_sender(model_id="policy", weights=weights_of(3.0), num_workers=1)
    with above, ThreadPoolExecutor(1) as pool:
        joined = pool.submit(above.connect)
        collector = with_factory(above, weight_sync_schemes={"policy": SharedMemWeightSyncScheme()})
        try:
            joined.result()
            frames = iter(collector)
            assert next(frames)["action"].unique().tolist() == [3.0]
            above.send(weights_of(4.0))
            assert next(frames)["action"].unique().tolist() == [4.0]
        finally:
            collector.shutdown()


def test_a_worker_with_a_policy_factory_and_no_way_to_its_workers_is_refused():
    above = MemoryWeightSyncScheme()
    above.init_on_sender(model_id="policy", weights=weights_of(3.0), num_workers=1)
    with above, pytest.raises(ValueError, match="No policy found"):
        with_factory(above)


@pytest.mark.filterwarnings("ignore:Using WeightUpdaterBase is deprecated:DeprecationWarning")
def test_an_updater_of_torchrl_in_one_process(made):
    policy = make_policy()
    updater = torchrl.collectors.VanillaWeightUpdater(policy_weights=TensorDict.from_module(policy).data)
    collector = made(Collector, Env, policy, weight_updater=updater)
    frames = iter(collector)
    assert collector.update_policy_weights_(weights_of(3.0)) is None
    data = next(frames)
    assert data["action"].unique().tolist() == [3.0]
    assert data["policy_version"].unique().tolist() == [1]
    with pytest.raises(ValueError, match="serves only the model 'policy'"):
        collector.update_policy_weights_(weights_dict={"policy": weights_of(1.0)})


def test_an_updater_of_torchrl_with_workers(made):
    policy = make_policy()
    weights = TensorDict.from_module(policy).share_memory_()
    updater = torchrl.collectors.MultiProcessedWeightUpdater(
        get_server_weights=lambda: weights_of(4.0), policy_weights={torch.device("cpu"): weights}
    )
    collector = made(MultiSyncCollector, [Env] * 2, policy, policy_device="cpu", weight_updater=updater)
    frames = iter(collector)
    assert next(frames)["action"].unique().tolist() == [0.0]
    assert collector.update_policy_weights_() is None
    assert next(frames)["action"].unique().tolist() == [4.0]
