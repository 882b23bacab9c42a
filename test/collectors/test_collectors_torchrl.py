"""Our schemes inside TorchRL's own collectors."""

from concurrent.futures import ThreadPoolExecutor
from copy import copy

import pytest
import torchrl.collectors
from collector_parts import OPTIONS, Env, make_policy, weights_of
from marks import slow
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

from weight_update import (
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncFailedError,
)


def values(data):
    return set(data["action"].unique().tolist())


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (SharedMemWeightSyncScheme, "tensordict"),
        slow(SharedMemWeightSyncScheme, "state_dict"),
        slow(MultiProcessWeightSyncScheme, "tensordict"),
        slow(MultiProcessWeightSyncScheme, "state_dict"),
    ],
)
def test_workers_compute_with_what_was_sent(cls, kind, strategy):
    policy, scheme = make_policy(1.0), kind(strategy)
    collector = cls(
        [Env] * 2,
        policy,
        frames_per_batch=20,
        total_frames=-1,
        track_policy_version=True,
        weight_sync_schemes={"policy": scheme},
        **OPTIONS,
    )
    try:
        frames = iter(collector)
        assert values(next(frames)) == {1.0}
        for value in (2.0, 3.0):
            collector.update_policy_weights_(weights_of(value))
            data = next(frames)
            for _ in range(20):  # batches that were on their way
                if values(data) == {value}:
                    break
                data = next(frames)
            assert values(data) == {value}
            assert data["policy_version"].max() == scheme.version == value - 1
        collector.update_policy_weights_({0: weights_of(4.0), 1: weights_of(5.0)})
        seen = set()
        for _ in range(12):
            seen |= values(next(frames))
        assert seen >= {4.0, 5.0}
        collector.procs[1].kill()
        collector.procs[1].join()
        with pytest.raises(SyncFailedError):
            collector.update_policy_weights_(weights_of(6.0))
    finally:
        collector.shutdown()
        scheme.shutdown()


def test_the_trainers_weights_are_not_the_workers():
    """In TorchRL they become the shared memory itself."""
    policy = make_policy(1.0)
    scheme = SharedMemWeightSyncScheme()
    collector = MultiSyncCollector(
        [Env] * 2,
        policy,
        frames_per_batch=20,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
        **OPTIONS,
    )
    try:
        frames = iter(collector)
        next(frames)
        collector.update_policy_weights_(weights_of(2.0))
        assert policy.module.layers[0][0] == 1.0
        policy.module.layers[0].data.fill_(9.0)
        assert values(next(frames)) == {2.0}
    finally:
        collector.shutdown()
        scheme.shutdown()


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_a_single_collector_as_sender(kind, strategy):
    """TorchRL's single collector sends; a receiver elsewhere follows."""
    policy, mirror, scheme = make_policy(1.0), make_policy(), kind(strategy)
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=1)
    receiver = copy(scheme)
    receiver.init_on_receiver(model_id="policy", model=mirror, worker_idx=0)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(receiver.connect)
        collector = torchrl.collectors.Collector(
            Env,
            policy,
            frames_per_batch=8,
            total_frames=-1,
            weight_sync_schemes={"policy": scheme},
            **OPTIONS,
        )
        joined.result()
    assert mirror.module.layers[0][0] == 1.0
    collector.update_policy_weights_(weights_of(2.0))
    assert mirror.module.layers[0][0] == 2.0
    collector.shutdown()
    receiver.shutdown()
    scheme.shutdown()


def test_a_single_collector_as_receiver(made):
    scheme = made(MemoryWeightSyncScheme)
    scheme.init_on_sender(model_id="policy", weights=weights_of(1.0), num_workers=1)
    receiver = copy(scheme)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(scheme.connect)
        collector = torchrl.collectors.Collector(
            Env,
            make_policy(),
            frames_per_batch=8,
            total_frames=-1,
            worker_idx=0,
            track_policy_version=True,
            weight_recv_schemes={"policy": receiver},
            **OPTIONS,
        )
        joined.result()
    frames = iter(collector)
    assert values(next(frames)) == {1.0}
    scheme.send(weights_of(2.0))
    assert values(next(frames)) == {2.0}
    collector.shutdown()
    receiver.shutdown()
