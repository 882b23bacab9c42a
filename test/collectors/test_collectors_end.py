import collections
import gc
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
from collector_parts import OPTIONS, Env, make_policy, weights_of
from interpreters import run_python
from marks import slow
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer

from collectors import Collector, MultiAsyncCollector, MultiSyncCollector, updating
from weight_update import (
    LifecycleError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    UnsupportedSourceError,
    WorkerError,
)
from weight_update.testing.processes import wait_until

ROOT = Path(__file__).parents[2]


class Dies(Env):
    def __init__(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Fails(Env):
    def __init__(self):
        raise ZeroDivisionError("this environment is broken")


def ours():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weight_update")]


def make(cls, **options):
    env = Env if cls is Collector else [Env]
    return cls(env, make_policy(), frames_per_batch=8, total_frames=800, **OPTIONS, **options)


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector, slow(MultiAsyncCollector)])
def test_a_collector_that_was_shut_down_yields_nothing(cls):
    message = "this collector was shut down; make a new collector"
    collector = make(cls)
    batches = iter(collector)
    next(batches)
    collector.shutdown()
    for iterator in (batches, iter(collector)):
        with pytest.raises(LifecycleError, match=message):
            next(iterator)


def require_end_by_another_thread(collector):
    """Shut down a collector in another thread; require that its iteration says so."""
    ending = threading.Timer(0.3, collector.shutdown)
    batches = iter(collector)
    next(batches)
    ending.start()
    with pytest.raises(LifecycleError, match="this collector was shut down; make a new collector"):
        collections.deque(batches, maxlen=0)
    ending.join()


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_shutdown_by_another_thread_ends_an_iteration(cls):
    collector = make(cls)
    collector.total_frames = math.inf
    require_end_by_another_thread(collector)
    assert ours() == []


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_calls_after_the_shutdown_speak_of_the_collector(cls):
    kind = MemoryWeightSyncScheme if cls is Collector else SharedMemWeightSyncScheme
    collector = make(cls, weight_sync_schemes={"policy": kind()})
    state = collector.state_dict()
    collector.shutdown()
    calls = [collector.update_policy_weights_, lambda: collector.add_observer(print)]
    calls += [collector.state_dict, lambda: collector.load_state_dict(state), collector.start]
    if cls is MultiSyncCollector:
        calls += [collector.reset, lambda: collector.set_seed(1)]
    for call in calls:
        with pytest.raises(LifecycleError, match="this collector was shut down; make a new collector"):
            call()


class Breaks(Env):
    def _step(self, tensordict):
        raise ValueError("the environment broke")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_the_thread_of_start_is_the_cause_of_later_errors(made):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    collector = made(Collector, Breaks, make_policy(), replay_buffer=buffer)
    collector.start()
    wait_until(lambda: not collector.is_running())
    with pytest.raises(LifecycleError, match="this collector was shut down") as caught:
        collector.update_policy_weights_()
    assert str(caught.value.__cause__) == "the environment broke"


class Hangs(Env):
    def _step(self, tensordict):
        time.sleep(3.0)
        return super()._step(tensordict)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_asynchronous_shutdown_ends_in_time(made):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    collector = made(Collector, Hangs, make_policy(), replay_buffer=buffer)
    collector.start()
    start = time.monotonic()
    collector.async_shutdown(timeout=0.3)
    assert time.monotonic() - start < 2
    wait_until(lambda: not collector.is_running())


def test_a_collector_that_cannot_be_made_ends_its_schemes():
    schemes = {model_id: SharedMemWeightSyncScheme() for model_id in ("policy", "nothing")}
    with pytest.raises(AttributeError, match="no model 'nothing'"):
        make(Collector, weight_sync_schemes=schemes)
    gc.collect()
    wait_until(lambda: ours() == [])


def test_weights_dict_that_is_no_dict():
    collector, policy = make(Collector), make_policy(1.0)
    message = "weights_dict is a dict of weights by model id, such as {'policy': policy}, not "
    for given in (policy, [policy]):
        with pytest.raises(TypeError, match=re.escape(message)):
            collector.update_policy_weights_(weights_dict=given)
    collector.shutdown()


def test_modules_by_model_id_that_are_not_given_as_weights_dict():
    collector, policy = make(Collector), make_policy(1.0)
    with pytest.raises(UnsupportedSourceError, match=r"dict of modules, \['policy'\], .* as weights_dict="):
        collector.update_policy_weights_({"policy": policy})
    collector.shutdown()


@pytest.mark.parametrize("policy", [lambda td: td.set("action", td["observation"]), None])
def test_a_scheme_of_a_policy_without_weights(policy):
    scheme = MemoryWeightSyncScheme()
    with pytest.raises(
        TypeError, match=r"'policy' of Collector is of type .*; policies without parameters need no"
    ):
        Collector(
            Env,
            policy,
            frames_per_batch=8,
            total_frames=800,
            weight_sync_schemes={"policy": scheme},
            **OPTIONS,
        )


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_ctrl_c_while_workers_start(cls, monkeypatch):
    monkeypatch.setattr(BaseProcess, "start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(cls)
    monkeypatch.undo()
    assert ours() == []
    collector = make(cls)
    next(iter(collector))
    collector.shutdown()


def test_a_scheme_for_threads_and_workers_that_are_processes():
    with pytest.raises(WorkerError, match="in other processes need another scheme, such as SharedMemWeight"):
        make(MultiSyncCollector, weight_sync_schemes={"policy": MemoryWeightSyncScheme()})


def test_the_module_inside_the_policy():
    collector, policy = make(Collector), make_policy(1.0)
    with pytest.raises(
        SchemaMismatchError, match=r"contain module\., which .* TensorDictModule \(module\) add"
    ):
        collector.update_policy_weights_(policy.module)
    collector.shutdown()


@pytest.mark.parametrize(
    ("scheme", "cure"),
    [
        ("shared", "WeightSyncScheme.from_backend('shared')"),
        ("shm", "SharedMemWeightSyncScheme()"),
        (3, "SharedMemWeightSyncScheme()"),
    ],
)
def test_a_scheme_that_is_no_object_of_a_scheme(scheme, cure):
    message = f"the scheme of 'policy' is {scheme!r}; give a scheme of weight_update, such as {cure}"
    with pytest.raises(TypeError, match=re.escape(message)):
        make(Collector, weight_sync_schemes={"policy": scheme})


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_a_scheme_of_an_unknown_model(cls):
    kind = MemoryWeightSyncScheme if cls is Collector else SharedMemWeightSyncScheme
    with pytest.raises(
        AttributeError, match="this collector has no model 'polcy'; a model id is 'policy' or"
    ):
        make(cls, weight_sync_schemes={"polcy": kind()})
    with pytest.raises(AttributeError, match=re.escape("this collector has no model 'policy.module[17]'; a")):
        make(cls, weight_sync_schemes={"policy.module[17]": kind()})
    with pytest.raises(AttributeError, match=r"no model 'module'.*; the policy has one: 'policy.module'"):
        make(cls, weight_sync_schemes={"module": kind()})
    with pytest.raises(TypeError, match="a model id is a string, such as 'policy', not 3"):
        make(cls, weight_sync_schemes={3: kind()})


def test_a_scheme_of_a_model_that_only_workers_have_names_the_call_that_it_needs():
    path = "env.transform[0].module"
    call = f"if only the workers have it, call init_on_sender(model_id={path!r}, weights=..., num_workers=1)"
    with pytest.raises(AttributeError, match=re.escape(call)):
        make(MultiSyncCollector, weight_sync_schemes={path: SharedMemWeightSyncScheme()})


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, slow(MultiProcessWeightSyncScheme)])
def test_a_worker_that_dies_before_it_connects_is_named_at_once(scheme):
    start = time.monotonic()
    with pytest.raises(SyncFailedError, match=r"worker 1: .*(ended|gone)") as caught:
        MultiSyncCollector(
            [Env, Dies],
            make_policy(),
            frames_per_batch=8,
            weight_sync_schemes={"policy": scheme()},
            **OPTIONS,
        )
    assert set(caught.value.failures) == {1}
    assert time.monotonic() - start < 30
    assert ours() == []


def test_what_a_worker_raised_before_it_connected_is_told():
    with pytest.raises(WorkerError, match=r"worker 0: (.|\n)*this environment is broken"):
        MultiSyncCollector([Fails, Env], make_policy(), frames_per_batch=8, **OPTIONS)
    assert ours() == []


class FailsLate(Env):
    def _reset(self, tensordict=None):
        raise IndexError("this environment cannot begin")


@pytest.mark.parametrize("with_policy", [True, False])
def test_what_a_worker_raised_after_it_connected_is_told(with_policy):
    with pytest.raises(WorkerError, match=r"^workers could not start:\nworker 1: (.|\n)*cannot begin"):
        MultiSyncCollector(
            [Env, FailsLate], make_policy() if with_policy else None, frames_per_batch=8, **OPTIONS
        )
    assert ours() == []


def test_a_policy_without_values_is_reported_before_workers_start():
    policy = TensorDictModule(nn.LazyLinear(2), in_keys=["observation"], out_keys=["action"])
    with pytest.raises(UnsupportedSourceError, match=r"module\.weight, .*call the model once with a batch"):
        MultiSyncCollector([Env] * 2, policy, frames_per_batch=8, **OPTIONS)
    assert ours() == []


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_shutdown_ends_workers_threads_and_schemes(cls):
    scheme = SharedMemWeightSyncScheme()
    collector = cls(
        [Env] * 2,
        make_policy(),
        frames_per_batch=8,
        weight_sync_schemes={"policy": scheme},
        **OPTIONS,
    )
    next(iter(collector))
    workers = [psutil.Process(process.pid) for process in collector.procs]
    collector.update_policy_weights_(weights_of(1.0))
    collector.shutdown()
    collector.shutdown()
    assert not any(worker.is_running() for worker in workers)
    assert ours() == []
    with pytest.raises(LifecycleError):
        scheme.send()


def test_shutdown_of_one_process_ends_its_schemes():
    collector = Collector(
        Env,
        make_policy(),
        frames_per_batch=8,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
        **OPTIONS,
    )
    next(iter(collector))
    assert ours() != []
    collector.shutdown()
    collector.shutdown()
    assert ours() == []


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_everything_is_closed_when_one_close_raises(cls, monkeypatch):
    policy = make_policy()
    schemes = {"env": NoWeightSyncScheme(), "policy": SharedMemWeightSyncScheme()}
    monkeypatch.setattr(NoWeightSyncScheme, "shutdown", fail)
    env = Env if cls is Collector else [Env] * 2
    collector = cls(env, policy, frames_per_batch=8, weight_sync_schemes=schemes, **OPTIONS)
    next(iter(collector))
    with pytest.raises(ZeroDivisionError):
        collector.shutdown()
    assert ours() == []


def interrupt(*args, **options):
    raise KeyboardInterrupt


def fail(*args, **options):
    raise ZeroDivisionError("it cannot be closed")


def test_at_exit_every_collector_is_closed_when_one_close_raises(monkeypatch):
    made = [MultiSyncCollector([Env], make_policy(), frames_per_batch=8, **OPTIONS) for _ in range(3)]
    monkeypatch.setattr(made[0], "shutdown", fail)
    monkeypatch.setattr(made[2], "shutdown", fail)
    with pytest.raises(ZeroDivisionError):
        updating._end_all()
    assert [collector.procs[0].is_alive() for collector in made] == [True, False, True]
    monkeypatch.undo()
    for collector in made:
        collector.shutdown()


def test_a_collector_that_is_dropped_ends():
    collector = MultiSyncCollector([Env] * 2, make_policy(), frames_per_batch=8, **OPTIONS)
    next(iter(collector))
    workers = [psutil.Process(process.pid) for process in collector.procs]
    del collector
    assert not any(worker.is_running() for worker in workers)
    assert ours() == []


FORGETFUL = """
    import sys
    sys.path.insert(0, {here!r})
    from collector_parts import OPTIONS, Env, make_policy, weights_of
    from collectors import Collector, MultiSyncCollector
    from weight_update import SharedMemWeightSyncScheme

    if __name__ == "__main__":
        workers = MultiSyncCollector([Env] * 2, make_policy(), frames_per_batch=8, **OPTIONS)
        next(iter(workers))
        workers.update_policy_weights_(weights_of(1.0))
        schemes = {{"policy": SharedMemWeightSyncScheme()}}
        single = Collector(Env, make_policy(), frames_per_batch=8, weight_sync_schemes=schemes, **OPTIONS)
        next(iter(single))
        {end}
        print("the end", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "raise KeyError('on purpose')"])
def test_an_interpreter_exits_without_shutdown(end, tmp_path):
    """With workers started the usual way, by spawn."""
    program = tmp_path / "forgetful.py"
    program.write_text(textwrap.dedent(FORGETFUL).format(here=str(Path(__file__).parent), end=end))
    start = time.monotonic()
    done = run_python(program, timeout=90.0)
    assert ("the end" in done.stdout) == (done.returncode == 0) == (end == "pass"), done.stderr
    assert ("on purpose" in done.stderr) == (end != "pass")
    assert time.monotonic() - start < 90


STARTED = """
    import sys, time
    sys.path.insert(0, {here!r})
    from collector_parts import OPTIONS, Env, make_policy
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from collectors import Collector

    frames = ReplayBuffer(storage=LazyTensorStorage(1000))
    collector = Collector(
        Env, make_policy(), frames_per_batch=8, total_frames=-1, replay_buffer=frames, **OPTIONS
    )
    collector.start()
    while frames.write_count < 100:
        time.sleep(0.01)
    {end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("raise KeyError('on purpose')", 1)])
def test_an_interpreter_exits_while_a_thread_collects(end, code, tmp_path):
    """PyTorch aborts a process (SIGABRT) in which its threads run to the end of the interpreter."""
    program = tmp_path / "started.py"
    program.write_text(textwrap.dedent(STARTED).format(here=str(Path(__file__).parent), end=end))
    done = run_python(program, timeout=90.0)
    assert done.returncode == code, done.stderr
    assert ("Traceback" in done.stderr) == ("on purpose" in done.stderr) == (end != "pass")


def test_without_torchrl_the_error_names_the_extra():
    program = "import sys; sys.modules['torchrl'] = None; import collectors"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert 'ImportError: collectors needs torchrl: pip install "weight-update[collectors]"' in done.stderr
