"""Arguments of collectors with workers that are refused before a worker starts."""

import inspect
import re
import socket
from functools import partial

import pytest
from collector_parts import Env, make_policy

from collectors import (
    Collector,
    DistributedCollector,
    DistributedSyncCollector,
    MultiAsyncCollector,
    MultiSyncCollector,
    RayCollector,
    RPCCollector,
)
from collectors.llm import RayLLMCollector
from weight_update import WorkerError

INTERVALS = "update_interval", "max_weight_update_interval"


@pytest.mark.parametrize(
    "make",
    [
        partial(MultiSyncCollector, [Env] * 2),
        partial(MultiSyncCollector, Env, num_workers=2),
        partial(DistributedCollector, [Env] * 2),
        partial(RPCCollector, [Env] * 2),
        partial(RayCollector, [Env] * 2),
        partial(RayCollector, Env, num_collectors=2),
    ],
)
def test_a_list_of_policy_factories_has_one_for_each_worker(make):
    with pytest.raises(ValueError, match="policy_factory is a list of 1, and there are 2 workers; give"):
        make(policy_factory=[make_policy], frames_per_batch=8)


@pytest.mark.parametrize("cls", [DistributedCollector, DistributedSyncCollector, RPCCollector])
def test_arguments_of_another_form_are_refused_before_workers_start(cls):
    make_one = partial(cls, policy=make_policy(), frames_per_batch=8, launcher="mp")
    with pytest.raises(ValueError, match="collector_kwargs is a list of 1, and there are 2 workers; give"):
        make_one([Env] * 2, collector_kwargs=[{}])
    with pytest.raises(TypeError, match=rf"create_env_fn of {cls.__name__} is a list, such as \[make_env\]"):
        make_one(Env)
    with pytest.raises(TypeError, match=rf"create_env_fn of {cls.__name__} is a list, .* not \[\]"):
        make_one([])
    with pytest.raises(ValueError, match=r"collector_class is a class or one of .*'sync'.*, not 'parallel'"):
        make_one([Env], collector_class="parallel")


def test_workers_elsewhere_need_an_address_of_this_machine(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(OSError, match=r"'no-such-host\.invalid', .* own address into /etc/hosts"):
        DistributedCollector([Env], make_policy(), frames_per_batch=8)


@pytest.mark.parametrize(
    ("make", "takes"),
    [
        (partial(Collector, Env), set()),
        (partial(MultiSyncCollector, [Env]), {"update_at_each_batch"}),
        (partial(MultiAsyncCollector, [Env]), {"update_at_each_batch"}),
        (partial(DistributedCollector, [Env]), {"update_after_each_batch", *INTERVALS}),
        (partial(DistributedSyncCollector, [Env]), {*INTERVALS}),
        (partial(RPCCollector, [Env]), {"update_after_each_batch", "max_weight_update_interval"}),
        (partial(RayCollector, [Env]), {"update_after_each_batch", "max_weight_update_interval"}),
    ],
)
def test_arguments_for_automatic_updates_that_a_collector_does_not_have(make, takes):
    given = {"policy": make_policy(), "frames_per_batch": 8}
    if make.func in (DistributedCollector, DistributedSyncCollector, RPCCollector):
        given["launcher"] = "mp"
    for name in {"update_at_each_batch", "update_after_each_batch", *INTERVALS} - takes:
        with pytest.raises(TypeError, match=name):
            make(**given, **{name: 1})


@pytest.mark.parametrize("interval", [0, -1, None])
def test_a_collector_that_always_updates_needs_an_interval(interval):
    with pytest.raises(
        ValueError, match=rf"update_interval is a number of batches, at least 1, not {interval}"
    ):
        DistributedSyncCollector(
            [Env], make_policy(), frames_per_batch=8, launcher="mp", update_interval=interval
        )


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector, RayCollector])
@pytest.mark.parametrize("create_env_fn", [[], Env])
def test_a_collector_without_workers_is_refused(cls, create_env_fn):
    with pytest.raises(ValueError, match=r"with a function for each worker, .* not (\[\]|<class.*Env)"):
        cls(create_env_fn, make_policy(), frames_per_batch=8)


def test_a_list_of_policy_factories_for_one_function_that_makes_environments(monkeypatch):
    """The list is accepted: the next step is to make a scheme."""

    def stop(*_, **__):
        raise NotImplementedError("a scheme would be made now")

    monkeypatch.setattr(RayCollector, "_default_scheme", stop)
    with pytest.raises(NotImplementedError, match="would be made now"):
        RayCollector(Env, num_collectors=2, policy_factory=[make_policy] * 2, frames_per_batch=8)


@pytest.mark.parametrize("cls", [RayCollector, RayLLMCollector])
def test_a_lost_actor_is_told_with_an_argument_that_its_collector_takes(cls, monkeypatch):
    ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "weight-update[ray]"')

    def get(reference):
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(cls, "_finished", lambda self, pending: (0, None))
    with pytest.raises(WorkerError, match="worker 0 is lost") as caught:
        cls._next_of(object.__new__(cls), {})
    name = re.search(r"if (\w+) has max_restarts", str(caught.value))[1]
    assert name in inspect.signature(cls).parameters
