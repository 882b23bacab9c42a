"""Collectors whose workers are jobs of submitit, here as processes of this machine instead of Slurm's."""

import sys

import pytest
from collector_parts import Env
from interpreters import JOB_PYTHON, run_python
from marks import slow
from test_collectors_programs import PROGRAMS

from collectors import Collector, DistributedCollector, DistributedSyncCollector, RPCCollector
from collectors.nodes import free_port

PYTHON_OF = {"DistributedCollector": {"JOB_PYTHON": JOB_PYTHON}}
"""The environment of the programs; the jobs of slow tests are new interpreters."""
KINDS = ["DistributedCollector", slow("DistributedSyncCollector"), slow("RPCCollector")]


def run(program, *arguments, **how):
    done = run_python(PROGRAMS / program, *arguments, timeout=280.0, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_collect_follow_updates_and_end_well(kind):
    assert run("batch_jobs.py", kind, env=PYTHON_OF.get(kind)) == ["[None, None]"]


@pytest.mark.slow  # test_collectors_distributed_end.py has workers that cannot start
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_cannot_start_is_told(kind):
    lines = run("batch_jobs.py", kind, "cannot_start", env=PYTHON_OF.get(kind))
    assert lines[0] == "workers could not start:"
    assert "ZeroDivisionError: this environment cannot be made" in lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DistributedCollector", "DistributedSyncCollector"])
def test_a_killed_job_is_told(kind):
    first, *_ = run("batch_jobs.py", kind, "killed")
    assert first.startswith("worker 1 has ended (job ")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DistributedCollector", "RPCCollector"])
def test_jobs_that_were_started_before(kind):
    assert run("delayed_jobs.py", kind, quick_spawn=True) == ["[0, 0]"]


def test_a_kind_that_cannot_have_jobs_that_were_started_before():
    with pytest.raises(ValueError, match="use DistributedCollector with sync=True"):
        DistributedSyncCollector([Env], frames_per_batch=8, launcher="submitit_delayed", tcp_port=free_port())


@pytest.mark.parametrize("kind", [DistributedCollector, DistributedSyncCollector, RPCCollector])
def test_a_launcher_that_cannot_be_used(kind, monkeypatch):
    with pytest.raises(ValueError, match=r"one of \('mp', 'submitit', 'submitit_delayed'\), not 'slurm'"):
        kind([Env], frames_per_batch=8, launcher="slurm")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ImportError, match=r'pip install "weight-update\[slurm\]"'):
        kind([Env], frames_per_batch=8)


def test_a_backend_whose_launcher_cannot_be_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ImportError, match=r'launcher="mp" \(Collector takes that with backend="distrib'):
        Collector([Env], frames_per_batch=8, backend="submitit")
    with pytest.raises(ValueError, match="backend='submitit' requires launcher='submitit', not 'mp'"):
        Collector([Env], frames_per_batch=8, backend="submitit", launcher="mp")


@pytest.mark.slow
def test_a_node_of_rpc_ends_with_its_trainer():
    done = run_python(PROGRAMS / "rpc_orphan.py", timeout=100.0)
    assert done.returncode == -9
    assert done.stdout == "the node has ended\n"
