"""Slots on a GPU, opened by CUDA IPC; needs torch, tensordict and a GPU alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weight_update import BucketEncoding, SharedMemWeightSyncScheme, SyncFailedError, WeightStrategy
from weight_update.testing import Body, WorkerProcesses, Zoo, fingerprint, scramble
from weight_update.transports.shared_memory.cuda_slots import CudaBuffer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).resolve().parent.parent
KINDS: dict[str, WeightStrategy] = {
    "dense": WeightStrategy("state_dict"),
    "buckets, kept": WeightStrategy(
        "state_dict", encoding=BucketEncoding(bucket_size=3 << 20, load_instant=False)
    ),
    "buckets": WeightStrategy("state_dict", encoding=BucketEncoding(bucket_size=1 << 20)),
    "two in flight": WeightStrategy(
        "state_dict", encoding=BucketEncoding(bucket_size=1 << 20), max_in_flight=2
    ),
    "converted": WeightStrategy(
        "state_dict", encoding=BucketEncoding(bucket_size=1 << 20, bucket_dtype="bfloat16")
    ),
}
KEPT = ["dense", "buckets, kept"]  # weights lie in the slots, nothing is copied
LAYERS = 4
NBYTES = LAYERS << 20

Hire = Callable[..., WorkerProcesses]


def layers(device: str = "cuda", dtype: torch.dtype = torch.float32) -> nn.Module:
    """4 MiB in float32."""
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(LAYERS)))
    return net.to(device=device, dtype=dtype)


@pytest.fixture
def hire(hired: Hire) -> Hire:
    def build(source: nn.Module, target: nn.Module, kind: str = "dense", workers: int = 1) -> WorkerProcesses:
        scheme = SharedMemWeightSyncScheme(
            KINDS[kind], slot_device="cuda", timeout=60.0, connect_timeout=120.0
        )
        return hired(scheme, [target] * workers, "spawn", model=source, connect=False)

    return build


def slots_of(procs: WorkerProcesses) -> dict[str, int]:
    """Address of each slot, by its key."""
    slots = [slot.buffer for slot in procs.scheme._sender._pool._slots]
    assert all(type(slot) is CudaBuffer for slot in slots)
    return {slot.key: slot.tensor.data_ptr() for slot in slots}


def memory_here(body: Body) -> int:
    """Bytes of the GPU that this process has allocated itself."""
    del body
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def compute(body: Body, seconds: float) -> int:
    """Forward passes on a stream of its own; how many of them saw weights of two versions."""
    mixed = 0
    end = time.monotonic() + seconds
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        given = torch.ones(8, 512, device="cuda")
        while time.monotonic() < end:
            with body.scheme.hold():
                means = [part.weight.mean() for part in body.model]
                body.model(given)
                mixed += len({value.item() for value in means}) > 1
    return mixed


def as_sent(source: nn.Module, kind: str) -> dict[str, str]:
    if kind != "converted":
        return fingerprint(source)
    return fingerprint({name: value.bfloat16().float() for name, value in source.state_dict().items()})


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits(hire: Hire, kind: str) -> None:
    source = layers()
    procs = hire(source, layers(), kind, workers=2)
    procs.connect()
    for seed in range(5):
        assert procs.ask("fingerprint") == [as_sent(source, kind)] * 2
        scramble(source, seed, finite=kind == "converted")
        procs.scheme.send()
    assert procs.ask("fingerprint") == [as_sent(source, kind)] * 2


@pytest.mark.parametrize("kind", ["dense", "buckets", "two in flight"])
def test_every_bit_of_bfloat16(hire: Hire, kind: str) -> None:
    """CUDA's own copy of many tensors gives NaNs other bits."""
    source = layers(dtype=torch.bfloat16)
    scramble(source, 0)
    procs = hire(source, layers(dtype=torch.bfloat16), kind, workers=2)
    procs.connect()
    scramble(source, 1)
    procs.scheme.send()
    assert procs.ask("fingerprint") == [fingerprint(source)] * 2


@pytest.mark.parametrize("kind", ["dense", "two in flight"])
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "cpu")])
def test_models_elsewhere_get_copies(hire: Hire, devices: tuple[str, str], kind: str) -> None:
    source = layers(devices[0])
    procs = hire(source, layers(devices[1], torch.bfloat16), kind)
    procs.connect()
    for seed in range(3):
        scramble(source, seed, finite=True)
        procs.scheme.send()
        expected = {name: value.bfloat16() for name, value in source.state_dict().items()}
        assert procs.ask("fingerprint") == [fingerprint(expected)]


def test_every_dtype_and_shape(hire: Hire) -> None:
    source = Zoo(1).cuda()
    strategy = KINDS["two in flight"]
    procs = hire(source, Zoo(2).cuda(), "two in flight")
    procs.connect()
    assert procs.ask("fingerprint") == [fingerprint(source, strategy)]


@pytest.mark.parametrize("kind", KEPT)
def test_workers_allocate_no_memory_for_weights(hire: Hire, kind: str) -> None:
    source = layers()
    procs = hire(source, layers(), kind, workers=2)
    before = procs.ask("run", memory_here)
    assert min(before) >= NBYTES
    procs.connect()
    for _ in range(6):
        procs.scheme.send()
    assert all(now <= then - NBYTES for now, then in zip(procs.ask("run", memory_here), before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_slots_serve_fifty_updates(hire: Hire, kind: str) -> None:
    source = layers()
    procs = hire(source, layers(), kind)
    procs.connect()
    for _ in range(3):
        procs.scheme.send()
    slots, memory = slots_of(procs), torch.cuda.memory_allocated()
    there = procs.ask("run", memory_here)
    for seed in range(50):
        scramble(source, seed, finite=True)
        procs.scheme.send()
    assert slots_of(procs) == slots
    assert torch.cuda.memory_allocated() == memory
    assert procs.ask("run", memory_here) == there
    assert procs.ask("fingerprint") == [as_sent(source, kind)]


@pytest.mark.parametrize("kind", ["dense", "buckets"])
def test_weights_in_use_stay_as_they_are_while_others_are_sent(hire: Hire, kind: str) -> None:
    source = layers()
    procs = hire(source, layers(), kind, workers=2)
    procs.connect()
    held = fingerprint(source)
    procs.workers[0].call("hold")
    for seed in range(4):
        scramble(source, seed, finite=True)
        handle = procs.scheme.send_async()
        assert procs.workers[0].call("fingerprint") == held
    procs.workers[0].call("release")
    handle.wait()
    assert procs.ask("fingerprint") == [fingerprint(source)] * 2


@pytest.mark.parametrize("kind", ["dense", "buckets", "two in flight"])
def test_no_mixture_while_a_worker_computes_without_pause(hire: Hire, kind: str) -> None:
    source = layers()
    procs = hire(source, layers(), kind)
    for parameter in source.parameters():
        nn.init.constant_(parameter, 0.0)
    procs.connect()
    procs.workers[0].post("run", compute, 3.0)
    value = 0
    while procs.workers[0].busy():
        value += 1
        for parameter in source.parameters():
            nn.init.constant_(parameter, float(value))
        procs.scheme.send()
    assert procs.workers[0].answer() == 0
    assert value > 10


@pytest.mark.parametrize("kind", ["dense", "two in flight"])
def test_weights_that_another_stream_still_writes(hire: Hire, kind: str) -> None:
    source = layers()
    procs = hire(source, layers(), kind)
    procs.connect()
    for value in range(1, 4):
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            torch.cuda._sleep(50_000_000)  # so that the weights are not written yet when send() is called
            for parameter in source.parameters():
                parameter.fill_(value)
            procs.scheme.send()
        assert procs.ask("fingerprint") == [fingerprint(source)]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_stay_when_the_sender_goes_and_its_memory_is_free(hire: Hire, kind: str) -> None:
    source = layers()
    before = torch.cuda.memory_allocated()
    procs = hire(source, layers(), kind, workers=2)
    procs.connect()
    procs.scheme.send()
    assert torch.cuda.memory_allocated() > before
    procs.scheme.shutdown()
    expected = as_sent(source, kind)
    assert freed_to(before)
    with torch.no_grad():
        others = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(8)]  # where the slots were
    assert procs.ask("fingerprint") == [expected] * 2
    del others


@pytest.mark.parametrize("kind", ["dense", "two in flight"])
def test_memory_of_a_worker_that_is_killed_is_given_back(hire: Hire, kind: str) -> None:
    source = layers()
    before = torch.cuda.memory_allocated()
    procs = hire(source, layers(), kind, workers=2)
    procs.connect()
    victim = procs.workers.pop(0)
    os.kill(victim.runner.pid, signal.SIGKILL)
    victim.runner.join(10.0)
    for seed in range(4):
        scramble(source, seed, finite=True)
        with contextlib.suppress(SyncFailedError):
            procs.scheme.send()
        assert procs.workers[0].call("fingerprint") == fingerprint(source)
    procs.scheme.shutdown()
    assert freed_to(before)


def freed_to(nbytes: int) -> bool:
    """Whether no more than so much is allocated, after at most ten seconds."""
    deadline = time.monotonic() + 10.0
    while torch.cuda.memory_allocated() > nbytes and time.monotonic() < deadline:
        time.sleep(0.05)
    return torch.cuda.memory_allocated() <= nbytes


def test_a_worker_that_does_not_see_the_gpu(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    procs = hire(layers(), layers("cpu"))
    errors = procs.try_connect()
    with pytest.raises(SyncFailedError, match="CUDA_VISIBLE_DEVICES"):
        raise errors[None]


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_programs_end_without_a_word(tmp_path: Path, allocator: str) -> None:
    """PyTorch warns of shared tensors that are alive when their process ends."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import sys
            import torch
            from torch import nn
            from weight_update import SharedMemWeightSyncScheme
            from weight_update.testing import WorkerProcesses, fingerprint

            if __name__ == "__main__":
                source = nn.Linear(512, 512).cuda()
                scheme = SharedMemWeightSyncScheme(slot_device="cuda")
                scheme.init_on_sender(model=source, num_workers=1)
                procs = WorkerProcesses(scheme, "spawn")
                worker = procs.hire(0, nn.Linear(512, 512).cuda())
                procs.connect()
                scheme.send()
                assert worker.call("fingerprint") == fingerprint(source)
                if "shutdown" in sys.argv:
                    scheme.shutdown()
                worker.stop()
                print("done")
        """)
    )
    environment: dict[str, Any] = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTORCH_CUDA_ALLOC_CONF": allocator,
    }
    for arguments in ([], ["shutdown"]):
        done = subprocess.run(
            [sys.executable, str(program), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
        assert "shared CUDA tensors" not in done.stderr
