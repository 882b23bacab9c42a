"""TorchRL's legacy weight updaters, which send through the schemes of our collectors.

The updaters of RPC and Ray are tested in ``programs/rpc_in_step.py`` and ``test_collectors_ray.py``.
"""

import functools
import threading

import pytest
import torch
import torchrl.collectors.distributed
from collector_parts import OPTIONS, Env, fill, make_policy, require_exact, see_versions, updates, weights_of
from tensordict import TensorDict
from torchrl.modules import RandomPolicy

import collectors
import collectors.distributed
import collectors.llm
from collectors import (
    Collector,
    DistributedCollector,
    DistributedSyncCollector,
    DistributedWeightUpdater,
    MultiAsyncCollector,
    MultiProcessedWeightUpdater,
    MultiSyncCollector,
    RayWeightUpdater,
    RemoteModuleWeightUpdater,
    RPCWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from weight_update import (
    DistributedWeightSyncScheme,
    LifecycleError,
    MemoryWeightSyncScheme,
    NothingToSendError,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    UnknownWorkerError,
    WeightSyncError,
)

CPU = torch.device("cpu")
READY = {
    "VanillaWeightUpdater": "MemoryWeightSyncScheme",
    "MultiProcessedWeightUpdater": "SharedMemWeightSyncScheme",
    "DistributedWeightUpdater": "DistributedWeightSyncScheme",
    "RPCWeightUpdater": "RPCWeightSyncScheme",
    "RayWeightUpdater": "RayWeightSyncScheme",
}
SILENT = pytest.mark.filterwarnings(
    r"ignore:\w+ is deprecated. instead of weight_updater=:DeprecationWarning"
)


def vanilla(policy, **options):
    return VanillaWeightUpdater(policy_weights=TensorDict.from_module(policy).data.clone(), **options)


def multiprocessed(policy, getter=None):
    weights = TensorDict.from_module(policy).data.clone()
    return MultiProcessedWeightUpdater(get_server_weights=getter, policy_weights={CPU: weights})


def distributed(policy, workers=2):
    return DistributedWeightUpdater(None, TensorDict.from_module(policy).data, workers, True)


OF_DISTRIBUTED = {
    "frames_per_batch": 8,
    "total_frames": -1,
    "launcher": "mp",
    "collector_kwargs": OPTIONS,
}
KINDS = {
    "Vanilla": (Collector, Env, vanilla, {}, MemoryWeightSyncScheme),
    "MultiProcessed sync": (
        MultiSyncCollector,
        [Env] * 2,
        multiprocessed,
        {},
        SharedMemWeightSyncScheme,
    ),
    "MultiProcessed async": (
        MultiAsyncCollector,
        [Env] * 2,
        multiprocessed,
        {},
        SharedMemWeightSyncScheme,
    ),
    "Distributed": (
        DistributedCollector,
        [Env] * 2,
        distributed,
        {**OF_DISTRIBUTED, "sync": True},
        DistributedWeightSyncScheme,
    ),
}


# -- the contract of all updaters that send through a scheme ---------------------------------------


@pytest.mark.parametrize("name", sorted(READY))
def test_the_warning_names_the_replacement(name):
    arguments = {
        "VanillaWeightUpdater": {"policy_weights": None},
        "MultiProcessedWeightUpdater": {"get_server_weights": None, "policy_weights": {}},
        "DistributedWeightUpdater": dict.fromkeys(("store", "policy_weights", "num_workers", "sync")),
        "RPCWeightUpdater": dict.fromkeys(
            ("collector_infos", "collector_class", "collector_rrefs", "policy_weights", "num_workers")
        ),
        "RayWeightUpdater": {"policy_weights": None, "remote_collectors": [], "max_interval": 3},
    }[name]
    text = rf"{name} is deprecated: .*weight_sync_schemes={{'policy': weight_update\.{READY[name]}\(\)}}"
    with pytest.warns(DeprecationWarning, match=text) as found:
        updater = getattr(collectors, name)(**arguments)
    assert [one.filename for one in found] == [__file__]
    assert isinstance(updater, WeightUpdaterBase)
    assert isinstance(updater, torchrl.collectors.WeightUpdaterBase)


def test_the_import_paths_of_torchrl():
    from torchrl.collectors import llm
    from torchrl.collectors import weight_update as theirs

    ours = collectors.weight_update
    for name in ("MultiProcessed", "Ray", "RemoteModule", "Vanilla"):
        assert hasattr(theirs, f"{name}WeightUpdater")
        assert getattr(ours, f"{name}WeightUpdater") is getattr(collectors, f"{name}WeightUpdater")
    for name in ("DistributedCollector", "DistributedSyncCollector", "RPCCollector", "RayCollector"):
        assert getattr(collectors.distributed, name) is getattr(collectors, name)
    assert collectors.distributed.RPCWeightUpdater is RPCWeightUpdater
    assert collectors.distributed.DistributedWeightUpdater is DistributedWeightUpdater
    assert set(torchrl.collectors.distributed.__all__) <= set(collectors.distributed.__all__)
    assert set(llm.__all__) <= set(collectors.llm.__all__)


@SILENT
@pytest.mark.parametrize("kind", KINDS)
def test_every_frame_names_its_version_while_updates_flow(kind, made):
    cls, envs, make_updater, options, scheme = KINDS[kind]
    policy = make_policy()
    collector = made(cls, envs, policy, weight_updater=make_updater(policy), **options)
    assert type(collector._weight_sync_schemes["policy"]) is scheme
    assert isinstance(collector.weight_updater, WeightUpdaterBase)
    with updates(collector, policy) as sent:
        seen = see_versions(iter(collector), require_exact, enough=10)
    assert max(seen) <= len(sent)
    assert collector.policy_version == sent[-1]


@SILENT
@pytest.mark.parametrize("kind", KINDS)
def test_ways_to_update_and_refusals(kind, made):
    cls, envs, make_updater, options, _ = KINDS[kind]
    policy, calls = make_policy(), []
    updater = make_updater(policy)
    updater.register_post_hook(lambda: calls.append(collector.policy_version))
    collector = made(cls, envs, policy, weight_updater=updater, **options)
    frames = iter(collector)

    def used():
        return newest(frames, collector)

    assert used() == {0.0}
    assert collector.update_policy_weights_(weights_of(1.0)).version == 1
    assert used() == {1.0}
    assert updater.push_weights(weights_of(2.0)).version == 2
    assert used() == {2.0}
    assert updater(policy_or_weights=make_policy(3.0)).version == 3
    assert used() == {3.0}
    updater._sync_weights_with_worker(worker_id=0, server_weights=weights_of(4.0))
    assert any(4.0 in used() for _ in range(10))  # batches of an asynchronous collector alternate
    assert calls == [1, 2, 3]
    with pytest.raises(SchemaMismatchError, match=r"module\.layers\.0"):
        updater.push_weights(weights_of(5.0).exclude(("module", "layers", "0")))
    with pytest.raises(UnknownWorkerError):
        updater.push_weights(weights_of(5.0), worker_ids=7)
    weights = weights_of(5.0)
    for others in ({"weights_dict": {"policy": weights}}, {"weights": weights, "model_id": "q"}):
        with pytest.raises(ValueError, match="serves only the model 'policy', without weights_dict="):
            collector.update_policy_weights_(**others)
    assert calls == [1, 2, 3]


def newest(frames, collector):
    """Return the weights of the next frames that were all made with their workers' newest versions."""
    scheme = collector._weight_sync_schemes["policy"]
    for _ in range(10):
        data = next(frames)
        if set(data["policy_version"].unique().tolist()) <= set(scheme.worker_versions.values()):
            break
    return set(data["action"].unique().tolist())


@SILENT
@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector, DistributedCollector])
def test_both_arguments_are_refused(cls):
    with pytest.raises(TypeError, match="either weight_sync_schemes or weight_updater"):
        cls(
            [Env],
            make_policy(),
            frames_per_batch=8,
            weight_sync_schemes={},
            weight_updater=VanillaWeightUpdater,
        )
    with pytest.raises(TypeError, match="WeightUpdaterBase, not int"):
        cls([Env], make_policy(), frames_per_batch=8, weight_updater=5)


# -- each updater ----------------------------------------------------------------------------------


@SILENT
def test_vanilla_changes_its_own_weights_too(made):
    policy, given = make_policy(), []
    updater = vanilla(policy, weight_getter=lambda: given.pop())
    kept = updater.policy_weights["module", "layers", "0"]
    collector = made(Collector, Env, policy, weight_updater=updater)
    given.append(weights_of(6.0))
    assert collector.update_policy_weights_().version == 1
    assert kept.tolist() == [6.0] * 3
    with pytest.raises(SchemaMismatchError):
        updater.push_weights(weights_of(7.0).exclude(("module", "layers", "5")))
    assert kept.tolist() == [6.0] * 3


@SILENT
def test_an_updater_without_a_getter_sends_the_policy_of_the_collector(made):
    policy = make_policy()
    for updater in (VanillaWeightUpdater, functools.partial(vanilla, policy), lambda: vanilla(policy)):
        collector = made(Collector, Env, policy, weight_updater=updater)
        fill(policy, 0.0 if collector.policy is policy else 8.0)
        assert collector.update_policy_weights_().version == 1
        assert newest(iter(collector), collector) == {8.0}


@SILENT
def test_updaters_without_a_collector(made):
    policy = make_policy()
    updater = vanilla(policy)
    assert updater.push_weights(weights_of(2.0)) is None
    assert updater.policy_weights["module", "layers", "5"].tolist() == [2.0] * 3
    with pytest.raises(NothingToSendError, match="VanillaWeightUpdater has none"):
        updater.push_weights()
    for remote in (distributed(policy), distributed(policy, workers=0), RayWeightUpdater(None, [])):
        with pytest.raises(LifecycleError, match=r"pass the updater as weight_updater="):
            remote.push_weights(weights_of(2.0))
    own = made(torchrl.collectors.Collector, Env, policy, **OPTIONS)
    own.weight_updater = VanillaWeightUpdater.from_policy(policy)
    own.update_policy_weights_(weights_of(9.0))
    assert next(iter(own))["action"].unique().tolist() == [9.0]


@SILENT
def test_an_updater_assigned_later(made):
    collector = made(Collector, Env, make_policy())
    collector.weight_updater = vanilla(make_policy())
    report = collector.update_policy_weights_(weights_of(2.0))
    assert (report.version, collector.policy_version) == (1, 1)
    assert next(iter(collector))["action"].unique().tolist() == [2.0]


@SILENT
def test_workers_that_make_their_own_policy(made):
    updater = multiprocessed(make_policy(), lambda: weights_of(3.0))
    collector = made(MultiSyncCollector, [Env] * 2, None, policy_factory=make_policy, weight_updater=updater)
    frames = iter(collector)
    assert collector.update_policy_weights_().version == 1
    assert newest(frames, collector) == {3.0}
    assert updater.all_worker_ids() == [CPU]
    assert updater._policy_weights[CPU]["module", "layers", "0"].tolist() == [3.0] * 3


@SILENT
def test_devices_as_workers(made):
    updater = multiprocessed(make_policy())
    collector = made(
        MultiSyncCollector, [Env] * 2, make_policy(), policy_device="cpu", weight_updater=updater
    )
    frames = iter(collector)
    assert sorted(updater.push_weights(weights_of(3.0), worker_ids=CPU).apply_seconds) == [0, 1]
    assert newest(frames, collector) == {3.0}
    assert sorted(updater.push_weights(weights_of(4.0), worker_ids=[1]).apply_seconds) == [1]
    assert newest(frames, collector) == {3.0, 4.0}
    updater._policy_weights.clear()
    assert sorted(updater.push_weights(weights_of(5.0)).apply_seconds) == [0, 1]
    assert sorted(updater.push_weights(weights_of(6.0), worker_ids=[1]).apply_seconds) == [1]


@SILENT
def test_updates_at_intervals_are_those_of_the_updater(made):
    updater, calls = distributed(make_policy(5.0), workers=1), []
    updater.register_post_hook(lambda: calls.append(1))
    collector = made(
        DistributedSyncCollector,
        [Env],
        make_policy(),
        weight_updater=updater,
        update_interval=1,
        **OF_DISTRIBUTED,
    )
    frames = iter(collector)
    for _ in range(3):
        data = next(frames)
    assert data["action"].unique().tolist() == [5.0]
    assert len(calls) == 3


@SILENT
def test_ray_passes_workers_over():
    sent = []

    class Recorder(collectors.weight_update.Updating):
        remote_collectors = ("a", "b")
        _legacy_weight_updater = True

        def _update(self, request):
            sent.append((request.weights["policy"], request.worker_ids))

    updater, collector = RayWeightUpdater("weights", [], max_interval=2), Recorder()
    updater.register_collector(collector)
    for _ in range(2):
        assert updater.push_weights() is None
    updater.push_weights(worker_ids=1)
    updater.push_weights("given")
    for _ in range(2):
        updater.push_weights(worker_ids=[1])
    updater.push_weights(worker_ids=[1])
    assert sent == [("weights", [1]), ("given", [0]), ("weights", [1])]


# -- updaters of the program -----------------------------------------------------------------------


def test_a_subclass_of_the_base(made):
    with pytest.warns(
        DeprecationWarning, match=r"Own derives from WeightUpdaterBase.*weight_sync_schemes="
    ) as found:

        class Own(WeightUpdaterBase):
            def __init__(self):
                self.synced = []

            def all_worker_ids(self):
                return [0, 1]

            def _get_server_weights(self):
                return weights_of(2.0)

            def _maybe_map_weights(self, weights):
                return weights * 3

            def _sync_weights_with_worker(self, worker_id, server_weights):
                self.synced.append(worker_id)
                self.collector.pipes[worker_id].send((server_weights, "update"))
                assert self.collector.pipes[worker_id].recv()[1] == "updated"

    assert [one.filename for one in found] == [__file__]
    updater = Own()
    collector = made(MultiSyncCollector, [Env] * 2, None, policy_factory=make_policy, weight_updater=updater)
    assert collector._weight_sync_schemes is None
    frames = iter(collector)
    assert next(frames)["action"].unique().tolist() == [0.0]
    assert collector.update_policy_weights_() is None
    assert updater.synced == [0, 1]
    assert next(frames)["action"].unique().tolist() == [6.0]


@pytest.mark.filterwarnings("ignore:.* derives from WeightUpdaterBase:DeprecationWarning")
@SILENT
def test_subclasses_of_ready_updaters(made):
    class Doubling(VanillaWeightUpdater):
        def _maybe_map_weights(self, weights):
            return weights * 2

    class Silent(VanillaWeightUpdater):
        def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
            seen.append((worker_id, server_weights))

    policy, seen = make_policy(), []
    collector = made(Collector, Env, policy, weight_updater=Doubling.from_policy(policy))
    assert collector.update_policy_weights_(weights_of(2.0)).version == 1
    assert newest(iter(collector), collector) == {4.0}
    collector.weight_updater = Silent.from_policy(policy)
    assert collector.update_policy_weights_("anything") is None
    assert seen == [(None, "anything")]
    assert collector.policy_version == 1


@pytest.mark.filterwarnings("ignore:Using WeightUpdaterBase is deprecated:DeprecationWarning")
def test_the_updater_that_sends_nothing(made):
    updater = RemoteModuleWeightUpdater()
    assert isinstance(updater, WeightUpdaterBase)
    collector = made(Collector, Env, make_policy(1.0), weight_updater=updater)
    assert collector.update_policy_weights_(weights_of(2.0)) is None
    assert next(iter(collector))["action"].unique().tolist() == [1.0]
    with pytest.raises(RuntimeError, match=r"the weights: RemoteModuleWeightUpdater has none"):
        collector.update_policy_weights_()
    with pytest.raises(RuntimeError, match=r"^give the weights: "):
        updater.push_weights()


@SILENT
@pytest.mark.filterwarnings("ignore:The policy is not an nn.Module:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_without_weights_has_no_scheme(kind, made):
    cls, envs, make_updater, options, _ = KINDS[kind]
    policy = RandomPolicy(Env().action_spec)
    collector = made(cls, envs, policy, weight_updater=make_updater(make_policy()), **options)
    assert not collector._weight_sync_schemes
    next(iter(collector))
    with pytest.raises(WeightSyncError, match="no weight"):
        collector.update_policy_weights_(weights_of(1.0))


@SILENT
def test_an_updater_of_the_policy_itself_waits_for_forward_passes(made):
    """It keeps the tensors of the policy, which change only between two forward passes."""
    collector = made(Collector, Env, make_policy(), weight_updater=VanillaWeightUpdater)
    collector.weight_updater = VanillaWeightUpdater.from_policy(collector.policy)
    collector.update_policy_weights_()
    (receiver,) = collector._updates.receivers.values()
    with receiver.hold():
        update = threading.Thread(target=collector.update_policy_weights_, args=(weights_of(5.0),))
        update.start()
        update.join(0.3)
        assert all((weight == 0).all() for weight in collector.policy.parameters())
    update.join(10.0)
    assert all((weight == 5).all() for weight in collector.policy.parameters())
