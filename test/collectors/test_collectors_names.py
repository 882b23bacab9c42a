"""The names and calls of TorchRL that programs use with these collectors."""

import inspect
import subprocess
import sys
from functools import partial

import pytest
import torch
import torchrl.collectors
import torchrl.collectors.distributed
from collector_parts import OPTIONS, Env, make_policy, require_stamps
from marks import slow
from tensordict.nn import TensorDictModule
from torch import nn

import collectors
from collectors import (
    AsyncCollector,
    Collector,
    DistributedCollector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
    RayCollector,
    RPCCollector,
    torchrl_names,
)


class Plain(nn.Module):
    """A policy that knows nothing of tensordicts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, observation):
        return self.linear(observation)


def test_every_public_name_of_torchrl_is_here():
    assert set(torchrl.collectors.__all__) <= set(collectors.__all__)
    changed = {name for name in torchrl.collectors.__all__ if "Collector" in name or "Updater" in name} - {
        "BaseCollector",
        "AsyncBatchedCollector",
    }
    for name in torchrl.collectors.__all__:
        ours, theirs = getattr(collectors, name), getattr(torchrl.collectors, name)
        assert (ours is not theirs) if name in changed else (ours is theirs), name
        assert issubclass(ours, torchrl.collectors.WeightUpdaterBase if "Updater" in name else theirs)


def test_the_documented_module_of_functions_is_here():
    from collectors.utils import split_trajectories

    assert split_trajectories is torchrl.collectors.utils.split_trajectories


def test_a_name_that_a_later_torchrl_adds_is_its_own(monkeypatch):
    monkeypatch.setattr(torchrl.collectors, "__all__", [*torchrl.collectors.__all__, "compare_returns"])
    monkeypatch.setattr(torchrl.collectors, "compare_returns", max, raising=False)
    from collectors import compare_returns

    assert compare_returns is max


def test_a_name_of_an_older_torchrl_leads_to_the_new_one():
    with pytest.raises(ImportError, match="renamed SyncDataCollector: from collectors import Collector"):
        from collectors import SyncDataCollector  # noqa: F401
    for name in collectors._RENAMED.values():
        assert name in collectors.__all__
    with pytest.raises(AttributeError, match="module 'collectors' has no attribute 'Collectr'"):
        collectors.Collectr  # noqa: B018


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_plain_module_is_wrapped(cls, made):
    policy = Plain()
    env = Env if cls is Collector else [Env]
    collector = made(cls, env, policy)
    frames = iter(collector)
    require_stamps(next(frames))
    with torch.no_grad():
        policy.linear.bias.fill_(3.0)
    report = collector.update_policy_weights_(policy)
    data = next(frames)
    while data["policy_version"].min() < report.version:
        data = next(frames)
    require_stamps(data)
    torch.testing.assert_close(data["action"], policy(data["observation"]))


def test_a_policy_that_writes_versions_itself_is_left_alone(made):
    policy = TensorDictModule(
        lambda observation: (observation, torch.full(observation.shape[:-1], 7)),
        in_keys=["observation"],
        out_keys=["action", "policy_version"],
    )
    collector = made(Collector, Env, policy)
    assert (next(iter(collector))["policy_version"] == 7).all()


def test_an_async_collector_is_one_of_ours(made):
    collector = made(AsyncCollector, Env, make_policy(), frames_per_batch=8, total_frames=-1, **OPTIONS)
    assert isinstance(collector, MultiAsyncCollector)
    require_stamps(next(iter(collector)))
    assert sorted(collector.update_policy_weights_().apply_seconds) == [0]


def test_the_collector_of_a_backend_is_one_of_ours(monkeypatch):
    class Made(Exception):
        pass

    def make(kind):
        def init(self, *args, **options):
            raise Made(kind, args, options)

        return init

    for kind in (MultiSyncCollector, MultiAsyncCollector, DistributedCollector, RPCCollector):
        monkeypatch.setattr(kind, "__init__", make(kind))

    def made(*args, **options):
        with pytest.raises(Made) as caught:
            Collector(*args, frames_per_batch=8, **options)
        return caught.value.args

    assert made(Env, num_collectors=2)[:2] == (MultiAsyncCollector, ([Env, Env],))
    assert made([Env] * 3, backend="process", sync=True)[:2] == (MultiSyncCollector, ([Env] * 3,))
    kind, _, options = made(Env, backend="submitit", backend_options={"tcp_port": 1})
    assert (kind, options["launcher"], options["tcp_port"]) == (DistributedCollector, "submitit", 1)
    with torchrl.service_backend("rpc"):
        assert made(Env, num_collectors=2)[0] is RPCCollector
        direct = Collector([Env], make_policy(), backend="direct", frames_per_batch=8, **OPTIONS)
    assert type(direct) is Collector
    direct.shutdown()
    for given, passed in [
        (None, {"track_policy_version": False}),
        ({"postproc": None}, {"track_policy_version": False, "postproc": None}),
        ([{"track_policy_version": True}], [{"track_policy_version": True}]),
    ]:
        more = {} if given is None else {"backend_options": {"collector_kwargs": given}}
        assert made(Env, backend="rpc", track_policy_version=False, **more)[2]["collector_kwargs"] == passed
    given = made(Env, backend="rpc", track_policy_version=True)[2]
    assert given["collector_kwargs"] == {"track_policy_version": True}
    assert "track_policy_version" not in given, "an option of the workers' collectors"


@pytest.mark.parametrize("backend", ["direct", "process", slow("distributed")])
@pytest.mark.parametrize("tracks", [True, False])
def test_every_backend_writes_or_omits_versions_when_told(backend, tracks, made):
    more = {"track_policy_version": tracks}
    if backend == "distributed":
        more["backend_options"] = {"backend": "gloo", "launcher": "mp", "collector_kwargs": OPTIONS}
    else:
        more.update(OPTIONS)
    make = partial(Collector, frames_per_batch=8)  # without the usual options, which its workers take
    collector = made(make, Env, make_policy(), backend=backend, total_frames=8, **more)
    assert ("policy_version" in next(iter(collector))) is tracks


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "has no backend 'thread'", {"backend": "thread"}),
        (ValueError, "at most one", {"backend": "direct", "num_collectors": 2}),
        (ValueError, "neither sync nor", {"backend": "direct", "sync": True}),
        (ValueError, "positive integer", {"num_collectors": 0}),
        (TypeError, "positive integer", {"num_collectors": True}),
        (TypeError, "sync is True", {"num_collectors": 2, "sync": "yes"}),
        (ValueError, "reserved", {"backend": "process", "backend_options": {"sync": True}}),
        (ValueError, "duplicate", {"backend": "process", "backend_options": {"policy": None}}),
        (ValueError, "requires launcher='submitit', not 'mp'", {"backend": "submitit", "launcher": "mp"}),
    ],
)
def test_arguments_of_a_backend_that_contradict_each_other(error, message, options):
    with pytest.raises(error, match=message):
        Collector(Env, make_policy(), frames_per_batch=8, **options)


def test_a_third_argument_needs_its_name():
    with pytest.raises(TypeError, match="at most two arguments without a name: create_env_fn and policy"):
        Collector(Env, None, 3, backend="process", frames_per_batch=8)


def test_the_signature_lists_the_options_of_torchrl():
    named = inspect.signature(Collector).parameters
    assert {"create_env_fn", "policy", "backend", "num_collectors", "frames_per_batch", "device"} <= set(
        named
    )
    assert named["track_policy_version"].default is None


@pytest.mark.parametrize(
    "cls",
    [
        MultiCollector,
        MultiSyncCollector,
        MultiAsyncCollector,
        DistributedCollector,
        RPCCollector,
        RayCollector,
    ],
)
def test_signatures_of_collectors_with_workers_list_the_options_of_torchrl(cls):
    class Derived(cls):
        pass

    class Own(cls):
        def __init__(self, env, frames):
            raise NotImplementedError

    for one in (cls, Derived):
        named = inspect.signature(one).parameters
        expected = {"create_env_fn", "policy", "frames_timeout", "frames_per_batch", "split_trajs", "device"}
        assert expected <= set(named)
        assert "self" not in named
        assert not {"options", "args", "kwargs"} & set(named)
    assert [*inspect.signature(Own).parameters] == ["env", "frames"]


def calls_of(method):
    """Return the arguments of two calls: as many as possible by place, and all by name."""
    named = [one for one in inspect.signature(method).parameters.values() if one.kind is not one.VAR_KEYWORD]
    named = [one for one in named[1:] if one.kind is not one.VAR_POSITIONAL]
    by_place = [one.name for one in named if one.kind is not one.KEYWORD_ONLY]
    rest = {one.name: None for one in named if one.kind is one.KEYWORD_ONLY}
    return (by_place, rest), ([], {one.name: None for one in named})


@pytest.mark.parametrize(
    "name", [name for name in collectors.__all__ if "Collector" in name or "Updater" in name]
)
def test_methods_take_the_calls_of_torchrl(name):
    """Each method can be called with each argument of TorchRL's, by its place and by its name."""
    ours = getattr(collectors, name)
    bases = {one.__name__: one for one in ours.__mro__[1:]}  # TorchRL's have our names
    theirs = (bases | vars(torchrl.collectors) | vars(torchrl.collectors.distributed))[name]
    for method, their_own in inspect.getmembers(theirs, inspect.isfunction):
        if method.startswith("_") or (name, method) == ("DistributedSyncCollector", "update_policy_weights_"):
            continue  # TorchRL's raises NotImplementedError
        our_own = getattr(ours, method)
        for args, options in calls_of(their_own):
            try:
                inspect.signature(our_own).bind(ours, *args, **options)
            except TypeError as error:
                pytest.fail(f"{name}.{method}{inspect.signature(our_own)}: {error}")


def test_a_hook_that_torchrl_lost_is_an_import_error():
    lost = {("torchrl.collectors", "MultiCollector"): ("pipes", "_no_such_hook")}
    with pytest.raises(ImportError, match=r"needs torchrl>=0\.14\.1,<0\.15.*MultiCollector\._no_such_hook"):
        torchrl_names.require_hooks(lost)


@pytest.mark.slow  # imports TorchRL
def test_the_import_fails_with_the_versions_that_work():
    program = "import torchrl.collectors.distributed.generic as g; del g._node_init_dist; import collectors"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert "ImportError: collectors needs torchrl>=0.14.1,<0.15" in result.stderr


def test_setup_asks_for_the_versions_that_work(pytestconfig):
    text = (pytestconfig.rootpath / "setup.py").read_text()
    assert f'"torchrl{torchrl_names.SUPPORTED}"' in text
