"""RPCCollector, and TorchRL's with our scheme: programs, for a process can be in one RPC world only."""

import pytest
from test_collectors_programs import PROGRAMS, run


def test_every_call_and_refusal():
    assert run(PROGRAMS / "rpc_in_step.py", quick_spawn=True) == ["a second one: True"]


@pytest.mark.slow
def test_a_killed_worker_is_told_and_the_program_ends():
    assert run(PROGRAMS / "rpc_killed.py") == [
        "failed: 1 of 2",
        "told: has ended (exit code -9, SIGKILL, often the kernel when memory ran out)",
    ]


@pytest.mark.slow
def test_the_collector_of_torchrl():
    assert run(PROGRAMS / "rpc_torchrl.py") == ["[[1.0], [2.0], [3.0], [3.0, 4.0]] {0: 2, 1: 3}"]


@pytest.mark.slow
def test_workers_of_workers_with_a_policy_factory():
    assert run(PROGRAMS / "rpc_factory.py") == ["[7.0]", "[5.0] 1 [1]"]


@pytest.mark.slow
def test_a_scheme_that_knows_nothing_of_rpc():
    assert run(PROGRAMS / "rpc_shared.py", quick_spawn=True) == ["[5.0] 1 [1]"]


@pytest.mark.slow
def test_a_worker_that_ends_before_it_joins_is_told():
    assert run(PROGRAMS / "rpc_quits.py", quick_spawn=True) == ["worker 1 has ended (exit code 3) True"]
