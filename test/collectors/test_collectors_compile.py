import pytest
import torch
from collector_parts import OPTIONS, Env, fill, make_policy, require_exact, see_versions, updates
from marks import slow
from pairs import connect_pair

from collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from weight_update import (
    LifecycleError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WorkerError,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),  # torch, on importing inductor
    pytest.mark.filterwarnings("ignore:This module is instantiated on a machine without CUDA"),
    pytest.mark.filterwarnings("ignore:Tensordict is registered in PyTree"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"),  # torch
]


def require_current(collector, policy):
    frames = iter(collector)
    for value in range(1, 4):
        require_exact(next(frames))
        report = collector.update_policy_weights_(fill(policy, value))
        data = next(frames)
        assert data["policy_version"].unique().tolist() == [report.version] == [value]
        require_exact(data)


@pytest.mark.parametrize("scheme", [slow(None), SharedMemWeightSyncScheme, slow(MemoryWeightSyncScheme)])
def test_a_policy_compiled_as_one_graph(scheme, made):
    policy = make_policy()
    collector = made(
        Collector,
        Env,
        policy,
        frames_per_batch=6,
        compile_policy={"fullgraph": True},
        weight_sync_schemes=None if scheme is None else {"policy": scheme()},
    )
    require_current(collector, policy)


@pytest.mark.slow
def test_a_compiled_policy_under_back_to_back_updates(made):
    policy = make_policy()
    collector = made(
        MultiAsyncCollector,
        [Env] * 2,
        policy,
        frames_per_batch=30,
        compile_policy={"fullgraph": True},
        weight_sync_schemes={"policy": MultiProcessWeightSyncScheme()},
    )
    frames = iter(collector)
    for _ in range(4):
        next(frames)  # both workers have compiled
    with updates(collector, policy):
        see_versions(frames, require_exact)


@pytest.mark.slow  # one process is quick below
@pytest.mark.parametrize(
    "options",
    [{"cudagraph_policy": True}, slow({"compile_policy": {"mode": "reduce-overhead"}})],
    ids=["cudagraph_policy", "reduce-overhead"],
)
def test_captured_policies_keep_their_addresses(options, made):
    """Without a GPU nothing is captured, but the policy runs and its parameters must not move."""
    policy = make_policy()
    scheme = SharedMemWeightSyncScheme()
    collector = made(
        MultiSyncCollector,
        [Env] * 2,
        policy,
        frames_per_batch=12,
        weight_sync_schemes={"policy": scheme},
        **options,
    )
    assert scheme.stable_addresses
    path = "policy.module.layers[0].data_ptr"
    before = collector.map_fn(path)
    require_current(collector, policy)
    assert collector.map_fn(path) == before


@pytest.mark.parametrize(
    "options",
    [{"cudagraph_policy": True}, slow({"compile_policy": {"mode": "reduce-overhead"}})],
    ids=["cudagraph_policy", "reduce-overhead"],
)
def test_captured_policy_of_one_process(options, made):
    policy = make_policy()
    collector = made(
        Collector,
        Env,
        policy,
        frames_per_batch=6,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
        **options,
    )
    address = collector.policy.module.layers[0].data_ptr()
    require_current(collector, policy)
    assert collector.policy.module.layers[0].data_ptr() == address


def test_schemes_of_policies_that_torch_compile_captures(made):
    """Its own, and one that it is given by the collector whose worker it is."""
    options = {"frames_per_batch": 6, "compile_policy": {"mode": "reduce-overhead"}}
    own, given = MemoryWeightSyncScheme(), SharedMemWeightSyncScheme()
    made(Collector, Env, make_policy(), weight_sync_schemes={"policy": own}, **options)
    worker = made(Collector, Env, make_policy(), **options)
    worker.register_scheme_receiver({"policy": given}, synchronize_weights=False)
    assert own.stable_addresses
    assert given.stable_addresses


def test_a_policy_that_cannot_be_sent_to_workers_is_reported():
    """TorchRL drops the error of starting such a worker."""
    policy = make_policy()
    policy.compile()
    with pytest.raises(WorkerError, match=r"worker 1: .*cannot be pickled .*give compile_policy"):
        MultiSyncCollector([Env] * 2, policy, frames_per_batch=12, total_frames=-1, **OPTIONS)


def test_a_scheme_that_moves_captured_weights_is_refused():
    sender, receiver = connected_here(make_policy(), mirror := make_policy())
    collector = Collector(Env, mirror, frames_per_batch=6, total_frames=-1, cudagraph_policy=True, **OPTIONS)
    with pytest.raises(LifecycleError, match="stable_addresses=True"):
        collector.register_scheme_receiver({"policy": receiver})
    other_sender, stable = connected_here(make_policy(), mirror, stable_addresses=True)
    collector.register_scheme_receiver({"policy": stable})
    collector.shutdown()
    for scheme in (receiver, sender, stable, other_sender):
        scheme.shutdown()


def connected_here(policy, mirror, **options):
    sender = MemoryWeightSyncScheme(**options)
    sender.init_on_sender(model_id="policy", model=policy, num_workers=1)
    return sender, connect_pair(sender, policy, mirror, model_id="policy")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own, when it begins to record
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "options", [{"cudagraph_policy": True}, {"compile_policy": {"mode": "reduce-overhead"}}]
)
def test_graphs_on_a_gpu_see_new_weights(options, made):
    policy = make_policy().to("cuda:0")
    collector = made(
        Collector,
        Env,
        policy,
        frames_per_batch=12,
        policy_device="cuda:0",
        env_device="cpu",
        storing_device="cpu",
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
        **options,
    )
    require_current(collector, policy)
