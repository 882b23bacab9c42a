import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from copy import copy

import pytest
import torch
from collector_parts import (
    OPTIONS,
    Env,
    fill,
    make_policy,
    policy_of_nine,
    policy_of_seven,
    weights_of,
)
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import Compose, ModuleTransform
from torchrl.modules import MultiAgentMLP, RandomPolicy
from torchrl.weight_update import SharedMemWeightSyncScheme as TorchRLScheme
from update_calls import require_every_call, require_refusals

from collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from weight_update import (
    LifecycleError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NothingToSendError,
    NoWeightSyncScheme,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    UnknownWorkerError,
    UnsupportedSourceError,
    WeightStrategy,
)


def two_workers(policy=None, **options):
    return MultiSyncCollector([Env] * 2, policy, frames_per_batch=8, total_frames=-1, **OPTIONS, **options)


def used(frames):
    """The weights that each worker computed the next batch with."""
    return [float(worker.unique()) for worker in next(frames)["action"]]


class Shifted(nn.Module):
    """The sum of a trained weight, a frozen weight and a buffer that is not persistent."""

    def __init__(self):
        super().__init__()
        self.trained = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("shift", torch.ones(()), persistent=False)

    def forward(self, observation):
        return self.trained + self.frozen + self.shift + 0 * observation


@pytest.mark.parametrize(
    ("strategy", "after"),
    [
        (WeightStrategy("state_dict", select="trainable"), 102.0),
        pytest.param(WeightStrategy("tensordict", select=["module.frozen"]), 102.0, marks=pytest.mark.slow),
        pytest.param(WeightStrategy("state_dict"), 201.0, marks=pytest.mark.slow),
    ],
)
def test_workers_start_with_the_weights_that_updates_do_not_carry(strategy, after, made):
    policy = TensorDictModule(Shifted(), in_keys=["observation"], out_keys=["action"])
    collector = made(two_workers, policy, weight_sync_schemes={"policy": SharedMemWeightSyncScheme(strategy)})
    frames = iter(collector)
    assert used(frames) == [3.0, 3.0]
    fill(policy, 100.0)
    policy.module.shift.fill_(100.0)
    collector.update_policy_weights_()
    assert used(frames) == [after, after]


@pytest.mark.parametrize(
    ("cls", "lag"), [(MultiSyncCollector, 0), pytest.param(MultiAsyncCollector, 1, marks=pytest.mark.slow)]
)
def test_update_at_each_batch(cls, lag, made):
    """Before a batch is collected in rounds; else before it is returned, when others are being collected."""
    collector = made(cls, [Env], make_policy(), frames_per_batch=6, update_at_each_batch=True)
    for batch, data in zip(range(1, 4), collector, strict=False):
        assert (data["policy_version"].unique().tolist(), collector.policy_version) == ([batch], batch + lag)


class Agents(nn.Module):
    """Two agents, each with weights of its own; the action is the sum of what they compute."""

    def __init__(self):
        super().__init__()
        options = {"depth": 0, "centralized": False, "share_params": False}
        self.agents = MultiAgentMLP(n_agent_inputs=2, n_agent_outputs=1, n_agents=2, **options)

    def forward(self, observation):
        return self.agents(observation.unsqueeze(-2).expand(2, 2)).sum() + 0 * observation


@pytest.mark.parametrize("strategy", ["tensordict", pytest.param("state_dict", marks=pytest.mark.slow)])
def test_agents_with_weights_of_their_own(strategy, made):
    """The weights are in a TensorDictParams, which TorchRL sends to workers on the meta device."""
    policy = TensorDictModule(Agents(), in_keys=["observation"], out_keys=["action"])
    fill(policy, 1.0)
    collector = made(two_workers, policy, weight_sync_schemes={"policy": SharedMemWeightSyncScheme(strategy)})
    frames = iter(collector)
    assert used(frames) == [2.0, 2.0]  # observations are zero, so the biases remain
    fill(policy, 3.0)
    collector.update_policy_weights_()
    assert used(frames) == [6.0, 6.0]


@pytest.mark.parametrize(
    "scheme", [None, MultiProcessWeightSyncScheme("state_dict")], ids=["default", "queues"]
)
def test_all_ways_to_call_with_workers(scheme, made):
    policy = make_policy()
    given = {} if scheme is None else {"weight_sync_schemes": {"policy": scheme}}
    collector = made(two_workers, policy, **given)
    frames = iter(collector)
    require_every_call(collector, lambda: used(frames), policy)
    require_refusals(collector, lambda: used(frames))
    with pytest.raises(KeyError, match=r"no weight sync scheme for .*critic.*: give one of .* as model_id="):
        collector.update_policy_weights_(weights_of(1.0), model_id="critic")
    collector.update_policy_weights_(weights_of(60.0), worker_ids=[1])
    assert used(frames) == [51.0, 60.0]
    collector.update_policy_weights_(weights_of(61.0), worker_ids=0)
    assert used(frames) == [61.0, 60.0]
    collector.update_policy_weights_({0: weights_of(62.0), 1: make_policy(63.0)})
    assert used(frames) == [62.0, 63.0]


@pytest.mark.parametrize(
    "scheme",
    [None, MemoryWeightSyncScheme, SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme],
)
def test_all_ways_to_call_in_one_process(scheme, made):
    policy = make_policy()
    schemes = None if scheme is None else {"policy": scheme()}
    collector = made(Collector, Env, policy, frames_per_batch=4, weight_sync_schemes=schemes)
    frames = iter(collector)

    def used_now():
        return [float(next(frames)["action"].unique())]

    require_every_call(collector, used_now, policy)
    require_refusals(collector, used_now)
    if scheme is None:
        with pytest.raises(NothingToSendError, match="give the weights"):
            collector.update_policy_weights_(model_id="policy.module")
        collector.receive_weights(weights_of(70.0))
        assert used_now() == [70.0]
    else:
        fill(policy, 80.0)  # the collector has its own copy
        assert used_now() == [51.0]


@pytest.mark.parametrize(
    ("ids", "name"), [(["policy"], "module"), (["policy", "policy.module"], r"\(policy\)\.module")]
)
def test_errors_of_one_process_name_weights_as_the_policy_does(ids, name, made):
    policy = make_policy()
    collector = made(Collector, Env, policy)
    layers = policy.module.state_dict()
    given = {"policy": {"module.layers.0": torch.ones(3)}, "policy.module": layers}
    with pytest.raises(SchemaMismatchError, match=rf"\n  - {name}\.layers\.1: .*only in the destination"):
        collector.update_policy_weights_(weights_dict={model_id: given[model_id] for model_id in ids})
    assert not any(parameter.any() for parameter in policy.parameters())


def test_one_process_without_weights(made):
    collector = made(Collector, Env, RandomPolicy(Env().action_spec), frames_per_batch=4)
    with pytest.raises(UnsupportedSourceError, match="RandomPolicy"):
        collector.update_policy_weights_(weights_of(1.0))


class Shift(nn.Module):
    """Adds its weight to the observation."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, observation):
        return observation + self.shift


def shifted_env():
    module = TensorDictModule(Shift(), in_keys=["observation"], out_keys=["observation"])
    return TransformedEnv(Env(), Compose(ModuleTransform(module_factory=lambda: module)))


def shift_of(value):
    return TensorDict({"module": {"shift": torch.full((2,), value)}})


def test_a_model_inside_the_environment(made):
    path = "env.transform[0].module"
    scheme = MultiProcessWeightSyncScheme()
    scheme.init_on_sender(model_id=path, weights=shift_of(0.0), num_workers=2)
    collector = made(
        MultiSyncCollector,
        [shifted_env] * 2,
        make_policy(),
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme(), path: scheme},
    )
    frames = iter(collector)
    collector.update_policy_weights_(weights=shift_of(3.0), model_id=path)
    data = next(frames)
    assert set(data["next", "observation"].unique().tolist()) == {3.0}
    assert data["policy_version"].max() == 0
    reports = collector.update_policy_weights_(weights_dict={path: shift_of(4.0), "policy": weights_of(1.0)})
    assert {key: report.version for key, report in reports.items()} == {path: 2, "policy": 1}
    data = next(frames)
    assert set(data["next", "observation"].unique().tolist()) == {4.0}
    assert data["policy_version"].max() == 1


def test_a_model_inside_the_environment_of_one_process():
    path = "env.transform[0].module"
    for schemes in (None, {path: SharedMemWeightSyncScheme()}):
        collector = Collector(
            shifted_env,
            make_policy(),
            frames_per_batch=4,
            total_frames=-1,
            weight_sync_schemes=schemes,
            **OPTIONS,
        )
        frames = iter(collector)
        collector.update_policy_weights_(weights=shift_of(3.0), model_id=path)
        data = next(frames)
        assert set(data["next", "observation"].unique().tolist()) == {3.0}
        assert data["policy_version"].max() == 0
        collector.shutdown()


def test_distinct_factories_and_weights_for_each_worker(made):
    collector = made(
        two_workers,
        policy_factory=[policy_of_seven, policy_of_nine],
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
    )
    frames = iter(collector)
    assert used(frames) == [7.0, 9.0]
    report = collector.update_policy_weights_({0: weights_of(1.0), 1: weights_of(2.0)})
    assert sorted(report.apply_seconds) == [0, 1]
    assert used(frames) == [1.0, 2.0]
    collector.update_policy_weights_({1: weights_of(3.0)})
    assert used(frames) == [1.0, 3.0]


def test_other_weights_do_not_change_the_policy_that_a_call_without_weights_sends(made):
    policy = make_policy(1.0)
    collector = made(two_workers, policy)
    frames = iter(collector)
    collector.update_policy_weights_(weights_of(5.0))
    assert used(frames) == [5.0, 5.0]
    collector.update_policy_weights_()
    assert used(frames) == [1.0, 1.0]


def test_a_factory_without_scheme_cannot_be_updated(made):
    collector = made(MultiAsyncCollector, [Env], policy_factory=policy_of_seven)
    assert next(iter(collector))["action"].unique().tolist() == [7.0]
    with pytest.raises(LifecycleError, match="no weight_sync_schemes"):
        collector.update_policy_weights_(weights_of(1.0))


def test_policies_without_weights():
    for policy in (RandomPolicy(Env().action_spec), Constant()):
        collector = two_workers(policy)
        try:
            assert next(iter(collector))["policy_version"].max() == 0
        finally:
            collector.shutdown()
    assert collector.policy_version == 0


@pytest.mark.parametrize("encoding", ["dense", pytest.param("bucket", id="pipeline")])
def test_weights_of_another_policy(encoding, made):
    """The error speaks of nothing that a program with a collector never calls."""
    in_flight = 2 if encoding == "bucket" else None
    strategy = WeightStrategy("state_dict", encoding=encoding, max_in_flight=in_flight)
    collector = made(
        Collector, Env, make_policy(), weight_sync_schemes={"policy": MemoryWeightSyncScheme(strategy)}
    )
    with pytest.raises(SchemaMismatchError, match="not those of this scheme's model"):
        collector.update_policy_weights_(nn.Linear(3, 2))
    assert collector.update_policy_weights_().version == 1 + (encoding == "bucket")


def test_a_patch_after_a_checkpoint_is_loaded(made, caplog):
    """It becomes a full update; the warning names the reason."""
    layers = nn.Sequential(nn.Linear(2, 500), nn.Linear(500, 2))
    policy = TensorDictModule(layers, in_keys=["observation"], out_keys=["action"])
    scheme = MemoryWeightSyncScheme(WeightStrategy("state_dict", encoding="patch"))
    collector = made(Collector, Env, policy, weight_sync_schemes={"policy": scheme})
    collector.load_state_dict(collector.state_dict())
    with torch.no_grad():
        layers[0].bias[:5] = 1.0
    assert collector.update_policy_weights_().version == 1
    assert "wrote into its weights, as load_state_dict() does, or" in caplog.text


def test_a_policy_that_is_no_module_with_a_scheme_that_sends_nothing(made):
    policy = RandomPolicy(Env().action_spec)
    collector = made(two_workers, policy, weight_sync_schemes={"policy": NoWeightSyncScheme()})
    frames = iter(collector)
    assert next(frames)["action"].unique().numel() > 1
    collector.update_policy_weights_()
    assert next(frames)["policy_version"].max() == 0


class Constant(TensorDictModuleBase):
    in_keys = ("observation",)
    out_keys = ("action",)

    def forward(self, tensordict):
        return tensordict.set("action", torch.ones_like(tensordict["observation"]))


def test_a_model_that_is_never_synchronized(made):
    collector = made(
        two_workers, policy_factory=policy_of_seven, weight_sync_schemes={"policy": NoWeightSyncScheme()}
    )
    collector.update_policy_weights_(weights_of(1.0))
    collector.update_policy_weights_(weights_dict={"policy": weights_of(1.0)})
    data = next(iter(collector))
    assert data["action"].unique().tolist() == [7.0]
    assert data["policy_version"].max() == 0


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_schemes_of_torchrl_are_refused_by_name(cls):
    with pytest.raises(TypeError, match=r"torchrl\.weight_update.*change the import"):
        cls(
            [Env] if cls is MultiSyncCollector else Env,
            make_policy(),
            frames_per_batch=8,
            weight_sync_schemes={"policy": TorchRLScheme()},
        )


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
@pytest.mark.parametrize(
    ("schemes", "message"),
    [
        (MemoryWeightSyncScheme(), "schemes are a dict by model id, such as {'policy': scheme}, not"),
        ({"policy": MemoryWeightSyncScheme}, r"is a class; give an instance: MemoryWeightSyncScheme\(\)"),
    ],
)
def test_schemes_that_are_no_dict_of_instances(cls, schemes, message):
    with pytest.raises(TypeError, match=message):
        cls(
            [Env] if cls is MultiSyncCollector else Env,
            make_policy(),
            frames_per_batch=8,
            weight_sync_schemes=schemes,
        )


def test_a_scheme_of_another_collector_is_refused_and_goes_on(made):
    scheme = SharedMemWeightSyncScheme()
    collector = made(two_workers, make_policy(), weight_sync_schemes={"policy": scheme})
    with pytest.raises(LifecycleError, match=r"version 0>\); give each collector a scheme of its own"):
        two_workers(make_policy(), weight_sync_schemes={"policy": scheme})
    report = collector.update_policy_weights_(weights_of(3.0))
    assert report.apply_seconds.keys() == {0, 1}
    collector.shutdown()
    with pytest.raises(LifecycleError, match=r"shut down>\); give each collector a scheme of its own"):
        two_workers(make_policy(), weight_sync_schemes={"policy": scheme})


@pytest.mark.parametrize("workers", [True, False])
def test_a_collector_for_evaluation_does_not_take_the_scheme_of_training(workers, made):
    scheme = SharedMemWeightSyncScheme()
    options = {
        "frames_per_batch": 8,
        "total_frames": -1,
        "weight_sync_schemes": {"policy": scheme},
        **OPTIONS,
    }
    training = made(
        MultiSyncCollector if workers else Collector, [Env] if workers else Env, make_policy(), **options
    )
    with pytest.raises(LifecycleError, match="give each collector a scheme of its own"):
        Collector(Env, make_policy(), **options)
    training.update_policy_weights_(weights_of(3.0))
    data = next(iter(training))
    assert data["action"].unique().tolist() == [3.0]


def evaluate(scheme, go, seen):
    """Follow the training in another process, as docs/collectors.rst shows."""
    policy = make_policy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=2)
    evaluation = Collector(Env, policy, frames_per_batch=8, total_frames=-1, **OPTIONS)
    evaluation.register_scheme_receiver({"policy": scheme})
    for data in evaluation:
        seen.send([data[key].unique().tolist() for key in ("policy_version", "action")])
        if not go.recv():
            break
    evaluation.shutdown()
    seen.send("ended")


def test_another_process_evaluates_the_newest_version(made):
    scheme = SharedMemWeightSyncScheme()
    training = made(two_workers, make_policy(), weight_sync_schemes={"policy": scheme})
    context = multiprocessing.get_context("forkserver")
    (go, ask), (answer, seen) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    process = context.Process(target=evaluate, args=(scheme, go, seen))
    process.start()
    assert answer.poll(60)
    assert answer.recv() == [[0], [0.0]]
    for version in (1, 2):
        report = training.update_policy_weights_(weights_of(float(version)))
        assert report.apply_seconds.keys() == {0, 1, 2}
        ask.send(True)
        assert answer.poll(60)
        assert answer.recv() == [[version], [float(version)]]
    ask.send(False)
    assert answer.poll(60)
    assert answer.recv() == "ended"
    process.join(60)
    assert process.exitcode == 0
    assert training.update_policy_weights_(weights_of(3.0)).apply_seconds.keys() == {0, 1}


def test_a_scheme_of_another_sender_is_only_connected():
    """A single collector that is itself a worker's trainer: its owner cares for the receivers."""
    scheme = MemoryWeightSyncScheme()
    policy = make_policy()
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=1)
    mirror, receiver = make_policy(), copy(scheme)
    receiver.init_on_receiver(model_id="policy", model=mirror, worker_idx=0)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(receiver.connect)
        collector = Collector(
            Env,
            policy,
            frames_per_batch=4,
            total_frames=-1,
            weight_sync_schemes={"policy": scheme},
            **OPTIONS,
        )
        joined.result()
    collector.update_policy_weights_(fill(policy, 5.0))
    assert all((parameter == 5.0).all() for parameter in mirror.parameters())
    assert next(iter(collector))["action"].unique().tolist() == [5.0]
    collector.shutdown()
    receiver.shutdown()


@pytest.mark.parametrize("workers", [(0,), [0, 1], 1])
def test_a_collector_without_workers_states_which_worker_ids_it_takes(workers, made):
    collector = made(Collector, Env, make_policy())
    with pytest.raises(UnknownWorkerError, match=r"worker_ids is None, 0 or \[0\], not [\[(1]"):
        collector.update_policy_weights_(weights_of(2.0), worker_ids=workers)
    for taken in (None, 0, [0]):
        collector.update_policy_weights_(weights_of(2.0), worker_ids=taken)
