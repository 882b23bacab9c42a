"""DistributedCollector and DistributedSyncCollector: what they collect, and with which weights."""

import multiprocessing
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial

import pytest
import torch
import torchrl.collectors.distributed
from collector_parts import (
    OPTIONS,
    Env,
    fill,
    make_policy,
    policy_of_seven,
    require_exact,
    require_stamps,
    see_versions,
    updates,
    weights_of,
)
from marks import quick_for, slow
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import RandomPolicy
from torchrl.weight_update import DistributedWeightSyncScheme as TorchRLScheme
from update_calls import require_every_call, require_refusals

from collectors import (
    Collector,
    DistributedCollector,
    DistributedSyncCollector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from collectors.nodes import free_port
from collectors.remote import inner_class
from weight_update import (
    DistributedWeightSyncScheme,
    LifecycleError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    SyncReport,
    WeightStrategy,
)

KINDS = {
    "async": (DistributedCollector, {}),
    "sync": (DistributedCollector, {"sync": True}),
    "ahead": (DistributedSyncCollector, {"update_interval": 10**6}),
}


def make(kind="sync", policy=None, workers=2, **options):
    cls, chosen = KINDS[kind]
    chosen = {"frames_per_batch": 8, "total_frames": -1, "launcher": "mp", **chosen, **options}
    given = chosen.pop("collector_kwargs", {})
    given = [OPTIONS | one for one in given] if isinstance(given, list) else OPTIONS | given
    envs = chosen.pop("envs", [Env] * workers)
    return cls(envs, policy, collector_kwargs=given, **chosen)


@pytest.fixture
def made():
    """Makes collectors that are shut down at the end; there can be one at a time."""
    collectors, others = [], multiprocessing.active_children()

    def make_one(*args, **options):
        collectors.append(make(*args, **options))
        return collectors[-1]

    yield make_one
    for collector in collectors:
        collector.shutdown()
    assert set(multiprocessing.active_children()) <= set(others)
    assert not torch.distributed.is_initialized()


def used(frames, kind="sync"):
    """The weights that each worker computed the next batch with."""
    if kind == "ahead":
        next(frames)  # was collected before
    return [float(worker.unique()) for worker in next(frames)["action"]]


@pytest.mark.parametrize("kind", ["sync", slow("ahead")])
def test_all_ways_to_call(kind, made):
    policy = make_policy()
    collector = made(kind, policy)
    scheme = collector._weight_sync_schemes["policy"]
    assert type(scheme) is DistributedWeightSyncScheme
    assert scheme.address == "127.0.0.1"
    frames = iter(collector)
    next(frames)
    require_every_call(collector, lambda: used(frames, kind), policy)
    require_refusals(collector, lambda: used(frames, kind))
    with pytest.raises(KeyError, match=r"no weight sync scheme for .*critic"):
        collector.update_policy_weights_(weights_of(1.0), model_id="critic")
    collector.update_policy_weights_(weights_of(60.0), worker_ids=[1])
    assert used(frames, kind) == [51.0, 60.0]
    collector.update_policy_weights_(weights_of(61.0), worker_ids=0)
    assert used(frames, kind) == [61.0, 60.0]
    report = collector.update_policy_weights_({0: weights_of(62.0), 1: make_policy(63.0)})
    assert sorted(report.apply_seconds) == [0, 1]
    assert used(frames, kind) == [62.0, 63.0]


@pytest.mark.parametrize("kind", ["async", slow("sync")])
def test_every_frame_names_its_version_while_updates_flow(kind, made):
    policy = make_policy()
    collector = made(kind, policy, frames_per_batch=60)
    with updates(collector, policy) as sent:
        seen = see_versions(iter(collector), require_exact, enough=100)
    assert max(seen) <= len(sent)
    assert collector.policy_version == sent[-1]


@pytest.mark.parametrize("kind", [slow("sync"), "ahead"])
def test_workers_of_this_machine_need_no_address_of_its_name(kind, made, monkeypatch):
    def fail(name):
        raise socket.gaierror(f"no address for {name}")

    monkeypatch.setattr(socket, "gethostbyname", fail)
    assert used(iter(made(kind, make_policy(1.0))), kind) == [1.0, 1.0]


@pytest.mark.slow
def test_workers_that_run_ahead_name_their_versions(made):
    policy = make_policy()
    collector = made("ahead", policy, update_interval=1, frames_per_batch=20)
    frames, seen = iter(collector), set()
    for number in range(30):
        fill(policy, number + 1)
        data = next(frames)
        require_exact(data)
        seen |= set(data["policy_version"].unique().tolist())
    assert data.shape == (2, 10)
    assert len(seen) > 20
    assert collector.policy_version == 30


@pytest.mark.slow
def test_trajectories_of_two_workers_have_different_numbers(made):
    for data, _ in zip(made("sync", make_policy(), frames_per_batch=20), range(3), strict=False):
        one, two = data["collector", "traj_ids"]
        assert not set(one.tolist()) & set(two.tolist())


STRATEGIES = {
    "dense": {},
    "in place": {"stable_addresses": True},
    "patches": {"strategy": WeightStrategy("state_dict", encoding=PatchEncoding())},
}


@pytest.mark.parametrize("options", quick_for(STRATEGIES.values(), STRATEGIES["patches"]), ids=STRATEGIES)
def test_the_trainers_weights_are_not_the_workers(options, made):
    policy = make_policy(1.0)
    collector = made(policy=policy, weight_sync_schemes={"policy": DistributedWeightSyncScheme(**options)})
    frames = iter(collector)
    fill(policy, 9.0)
    assert used(frames) == [1.0, 1.0]
    collector.update_policy_weights_(weights_of(2.0))
    assert used(frames) == [2.0, 2.0]
    assert set(policy.module.layers[0].tolist()) == {9.0}
    assert not any(parameter.is_shared() for parameter in policy.parameters())


@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, slow(MultiProcessWeightSyncScheme)])
def test_schemes_for_one_machine_serve_as_well(kind, made):
    collector = made(policy=make_policy(1.0), weight_sync_schemes={"policy": kind()})
    frames = iter(collector)
    assert used(frames) == [1.0, 1.0]
    assert collector.update_policy_weights_(weights_of(2.0)).version == 1
    data = next(frames)
    assert data["action"].unique().tolist() == [2.0]
    assert data["policy_version"].unique().tolist() == [1]


def test_several_models_are_one_step(made):
    policy = TensorDictModule(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), in_keys=["observation"], out_keys=["action"]
    )
    paths = ["policy.module[0]", "policy.module[1]"]
    collector = made(
        policy=policy, weight_sync_schemes={path: DistributedWeightSyncScheme() for path in paths}
    )
    with torch.no_grad():
        policy.module[1].bias.fill_(5.0)
    reports = collector.update_policy_weights_(weights_dict=dict(zip(paths, policy.module, strict=True)))
    assert {report.version for report in reports.values()} == {1}
    data = next(iter(collector))
    torch.testing.assert_close(data["action"], policy.module(data["observation"]))


# -- updates that the collector makes itself -------------------------------------------------------


def values(data):
    return sorted(data["action"].unique().tolist())


def test_update_after_each_batch(made):
    """As in TorchRL, before the batch is handed out."""
    policy = make_policy()
    collector = made("sync", policy, update_after_each_batch=True)
    for number, data in zip(range(4), collector, strict=False):
        assert values(data) == [float(number)]
        fill(policy, number + 1)
    collector.shutdown()
    policy = make_policy(5.0)
    collector = made("async", policy, workers=1, update_after_each_batch=True)
    frames = iter(collector)
    next(frames)
    fill(policy, 6.0)
    assert (values(next(frames)), collector.policy_version) == ([5.0], 2)
    assert values(next(frames)) == [6.0]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_update_interval(kind, made):
    policy = make_policy()
    collector = made(kind, policy, workers=1, update_interval=2)
    found = []
    for number, data in zip(range(6), collector, strict=False):
        found += values(data)
        fill(policy, number + 1)
    assert found == [0.0, 0.0, 2.0, 2.0, 4.0, 4.0]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_max_weight_update_interval_counts_from_the_last_update(kind, made):
    policy = make_policy()
    collector = made(kind, policy, workers=1, max_weight_update_interval=2)
    found = []
    for number, data in zip(range(9), collector, strict=False):
        found += values(data)
        if number == 3:
            collector.update_policy_weights_(weights_of(50.0))
        fill(policy, number + 1)
    assert found == [0.0, 0.0, 0.0, 3.0, 50.0, 50.0, 50.0, 7.0, 7.0]


@pytest.mark.slow
def test_frames_come_to_an_end_and_updates_go_on(made):
    for kind in ("async", "ahead"):
        collector = made(kind, make_policy(), total_frames=32)
        assert sum(data.numel() for data in collector) == 32
        assert set(collector.update_policy_weights_(weights_of(1.0)).apply_seconds) == {0, 1}
        collector.shutdown()


# -- policies and workers of other kinds -----------------------------------------------------------


@pytest.mark.parametrize("kind", [slow("sync"), "ahead"])
def test_a_policy_factory_and_a_lambda_among_the_options_of_workers(kind, made):
    options = {"postproc": lambda batch: batch.set("marked", batch["action"] > 0)}
    collector = made(kind, policy_factory=policy_of_seven, collector_kwargs=options)
    frames = iter(collector)
    data = next(frames)
    require_stamps(data)
    assert data["marked"].all()
    assert values(data) == [7.0]
    collector.update_policy_weights_(make_policy(8.0))
    assert used(frames, kind) == [8.0, 8.0]


@pytest.mark.parametrize("kind", [slow("sync"), "ahead"])
def test_each_worker_has_options_of_its_own(kind, made):
    options = [{"postproc": partial(mark, number=number)} for number in range(2)]
    collector = made(kind, policy=make_policy(), collector_kwargs=options, max_frames_per_traj=2)
    data = next(iter(collector))
    assert data["marked"].tolist() == [[0] * 4, [1] * 4]
    assert data["next", "truncated"].sum() == 4  # from an argument of the collector


def mark(batch, number):
    return batch.set("marked", torch.full(batch.shape, number))


def test_random_frames_name_the_version_in_force(made):
    policy = make_policy()
    collector = made(policy=policy, frames_per_batch=20, total_frames=60, init_random_frames=40)
    for number, data in enumerate(collector):
        require_stamps(data)
        assert set(data["policy_version"].unique().tolist()) == {number}
        assert bool((data["action"] == number).all()) == (number == 2)
        collector.update_policy_weights_(fill(policy, number + 1))


@pytest.mark.slow
def test_an_update_reaches_the_workers_of_a_worker(made):
    collector = made(policy=make_policy(1.0), workers=1, num_workers_per_collector=2)
    assert collector.collector_class is MultiSyncCollector
    frames = iter(collector)
    for version in range(3):
        data = next(frames)
        assert data.shape == (1, 2, 4)
        require_stamps(data)
        assert data["policy_version"].unique().tolist() == [version]
        assert values(data) == [1.0 + version]
        assert collector.update_policy_weights_(weights_of(2.0 + version)).version == version + 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "ahead"])
def test_workers_of_a_worker_with_a_policy_factory(kind, made):
    collector = made(kind, policy_factory=policy_of_seven, workers=1, num_workers_per_collector=2)
    frames = iter(collector)
    assert values(next(frames)) == [7.0]
    collector.update_policy_weights_(weights_of(2.0))
    next(frames)  # collected ahead
    assert values(next(frames)) == [2.0]


def test_a_collector_that_is_a_worker_itself_passes_updates_on(made):
    above = MemoryWeightSyncScheme()
    above.init_on_sender(model_id="policy", weights=weights_of(3.0), num_workers=1)
    with above, ThreadPoolExecutor(1) as pool:
        joined = pool.submit(above.connect)
        receiver = copy(above)
        receiver.init_on_receiver(model_id="policy", model=(policy := make_policy(1.0)), worker_idx=0)
        collector = made(policy=policy, weight_recv_schemes={"policy": receiver})
        joined.result()
        frames = iter(collector)
        assert used(frames) == [3.0, 3.0]
        above.send(weights_of(4.0))
        assert used(frames) == [4.0, 4.0]


@pytest.mark.filterwarnings("ignore:The policy is not an nn.Module:UserWarning")
def test_a_policy_without_weights(made):
    collector = made(policy=RandomPolicy(Env().action_spec))
    assert next(iter(collector)).shape == (2, 4)
    assert collector.policy_version is None
    with pytest.raises(LifecycleError, match="no weight_sync_schemes"):
        collector.update_policy_weights_(weights_of(1.0))


@pytest.mark.parametrize("kind", ["sync", "ahead"])
@pytest.mark.filterwarnings("ignore:Using WeightUpdaterBase is deprecated:DeprecationWarning")
def test_an_updater_of_torchrl(kind, made):
    mirror = weights_of(0.0)
    updater = torchrl.collectors.VanillaWeightUpdater(policy_weights=mirror)
    collector = made(kind, make_policy(), workers=1, weight_updater=updater)
    next(iter(collector))
    assert collector.update_policy_weights_(weights_of(4.0)) is None
    assert mirror["module", "layers", "0"].tolist() == [4.0] * 3


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "ahead"])
def test_refusals(kind, made):
    with pytest.raises(TypeError, match="these collectors need one of weight_update"):
        made(kind, make_policy(), weight_sync_schemes={"policy": TorchRLScheme()})
    with pytest.raises(TypeError, match="either weight_sync_schemes or weight_updater"):
        made(kind, make_policy(), weight_sync_schemes={}, weight_updater=object)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(LifecycleError, match="destroy that group, or shut down the collector"):
            made(kind, make_policy())
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


# -- TorchRL's own ---------------------------------------------------------------------------------


def test_torchrls_own_collector_with_our_scheme():
    """Its workers go by their rank, from 1; the indices of our scheme begin with 0."""
    policy, scheme = make_policy(), DistributedWeightSyncScheme()
    port = free_port()
    collector = torchrl.collectors.distributed.DistributedCollector(
        [Env] * 2,
        policy,
        frames_per_batch=8,
        total_frames=1000,
        launcher="mp",
        sync=True,
        tcp_port=port,
        collector_kwargs=OPTIONS,
        weight_sync_schemes={"policy": scheme},
    )
    try:
        assert scheme.worker_versions == {0: 0, 1: 0}
        frames = iter(collector)
        assert used(frames) == [0.0, 0.0]
        collector.update_policy_weights_(weights_of(1.0))
        assert used(frames) == [1.0, 1.0]
        collector.update_policy_weights_({0: weights_of(2.0), 1: weights_of(3.0)})
        assert used(frames) == [2.0, 3.0]
    finally:
        collector.shutdown()


@pytest.mark.slow
def test_a_trainer_may_think_longer_than_ten_seconds(made):
    """TorchRL's workers give up then."""
    collector = made(policy=make_policy())
    frames = iter(collector)
    next(frames)
    time.sleep(11)
    assert isinstance(collector.update_policy_weights_(weights_of(1.0)), SyncReport)
    assert used(frames) == [1.0, 1.0]


def test_workers_run_our_collectors(made):
    names = {"single": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}
    assert {name: inner_class(name, 1) for name in names} == names
    assert inner_class(None, 1) is Collector
    assert inner_class(None, 2) is MultiSyncCollector
    assert inner_class(torchrl.collectors.Collector, 1) is torchrl.collectors.Collector
