"""Slots on a GPU, opened by CUDA IPC; needs torch, tensordict and a GPU alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weight_update import BucketEncoding, SharedMemWeightSyncScheme, SyncFailedError, WeightStrategy
from weight_update.testing import Body, Crew, Zoo, fingerprint, scramble
from weight_update.testing.crew import context_of
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

Hire = Callable[..., Crew]


def layers(device: str = "cuda", dtype: torch.dtype = torch.float32) -> nn.Module:
    """4 MiB in float32."""
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(LAYERS)))
    return net.to(device=device, dtype=dtype)


@pytest.fixture
def hire() -> Iterator[Hire]:
    crews: list[Crew] = []

    def build(source: nn.Module, target: nn.Module, kind: str = "dense", workers: int = 1) -> Crew:
        scheme = SharedMemWeightSyncScheme(
            KINDS[kind], slot_device="cuda", timeout=60.0, connect_timeout=120.0
        )
        scheme.init_on_sender(model=source, num_workers=workers, ctx=context_of("spawn"))
        crews.append(Crew(scheme, "spawn"))
        for index in range(workers):
            crews[-1].hire(index, target)
        return crews[-1]

    yield build
    for crew in crews:
        crew.__exit__()


def slots_of(crew: Crew) -> dict[str, int]:
    """Address of each slot, by its key."""
    slots = [slot.buffer for slot in crew.scheme._sender._pool._slots]
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
    crew = hire(source, layers(), kind, workers=2)
    crew.connect()
    for seed in range(5):
        assert crew.ask("fingerprint") == [as_sent(source, kind)] * 2
        scramble(source, seed, finite=True)
        crew.scheme.send()
    assert crew.ask("fingerprint") == [as_sent(source, kind)] * 2


@pytest.mark.parametrize("kind", ["dense", "two in flight"])
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "cpu")])
def test_models_elsewhere_get_copies(hire: Hire, devices: tuple[str, str], kind: str) -> None:
    source = layers(devices[0])
    crew = hire(source, layers(devices[1], torch.bfloat16), kind)
    crew.connect()
    for seed in range(3):
        scramble(source, seed, finite=True)
        crew.scheme.send()
        expected = {name: value.bfloat16() for name, value in source.state_dict().items()}
        assert crew.ask("fingerprint") == [fingerprint(expected)]


def test_every_dtype_and_shape(hire: Hire) -> None:
    source = Zoo(1).cuda()
    strategy = KINDS["two in flight"]
    crew = hire(source, Zoo(2).cuda(), "two in flight")
    crew.connect()
    assert crew.ask("fingerprint") == [fingerprint(source, strategy)]


@pytest.mark.parametrize("kind", KEPT)
def test_workers_allocate_no_memory_for_weights(hire: Hire, kind: str) -> None:
    source = layers()
    crew = hire(source, layers(), kind, workers=2)
    before = crew.ask("run", memory_here)
    assert min(before) >= NBYTES
    crew.connect()
    for _ in range(6):
        crew.scheme.send()
    assert all(now <= then - NBYTES for now, then in zip(crew.ask("run", memory_here), before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_slots_serve_fifty_updates(hire: Hire, kind: str) -> None:
    source = layers()
    crew = hire(source, layers(), kind)
    crew.connect()
    for _ in range(3):
        crew.scheme.send()
    slots, memory = slots_of(crew), torch.cuda.memory_allocated()
    there = crew.ask("run", memory_here)
    for seed in range(50):
        scramble(source, seed, finite=True)
        crew.scheme.send()
    assert slots_of(crew) == slots
    assert torch.cuda.memory_allocated() == memory
    assert crew.ask("run", memory_here) == there
    assert crew.ask("fingerprint") == [as_sent(source, kind)]


@pytest.mark.parametrize("kind", ["dense", "buckets"])
def test_weights_in_use_stay_as_they_are_while_others_are_sent(hire: Hire, kind: str) -> None:
    source = layers()
    crew = hire(source, layers(), kind, workers=2)
    crew.connect()
    held = fingerprint(source)
    crew.workers[0].call("hold")
    for seed in range(4):
        scramble(source, seed, finite=True)
        handle = crew.scheme.send_async()
        assert crew.workers[0].call("fingerprint") == held
    crew.workers[0].call("release")
    handle.wait()
    assert crew.ask("fingerprint") == [fingerprint(source)] * 2


@pytest.mark.parametrize("kind", ["dense", "buckets", "two in flight"])
def test_no_mixture_while_a_worker_computes_without_pause(hire: Hire, kind: str) -> None:
    source = layers()
    crew = hire(source, layers(), kind)
    for parameter in source.parameters():
        nn.init.constant_(parameter, 0.0)
    crew.connect()
    crew.workers[0].post("run", compute, 3.0)
    value = 0
    while crew.workers[0].busy():
        value += 1
        for parameter in source.parameters():
            nn.init.constant_(parameter, float(value))
        crew.scheme.send()
    assert crew.workers[0].answer() == 0
    assert value > 10


@pytest.mark.parametrize("kind", ["dense", "two in flight"])
def test_weights_that_another_stream_still_writes(hire: Hire, kind: str) -> None:
    source = layers()
    crew = hire(source, layers(), kind)
    crew.connect()
    for value in range(1, 4):
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            torch.cuda._sleep(50_000_000)  # so that the weights are not written yet when send() is called
            for parameter in source.parameters():
                parameter.fill_(value)
            crew.scheme.send()
        assert crew.ask("fingerprint") == [fingerprint(source)]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_stay_when_the_sender_goes_and_its_memory_is_free(hire: Hire, kind: str) -> None:
    source = layers()
    before = torch.cuda.memory_allocated()
    crew = hire(source, layers(), kind, workers=2)
    crew.connect()
    crew.scheme.send()
    assert torch.cuda.memory_allocated() > before
    crew.scheme.shutdown()
    expected = as_sent(source, kind)
    assert freed_to(before)
    with torch.no_grad():
        others = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(8)]  # where the slots were
    assert crew.ask("fingerprint") == [expected] * 2
    del others


@pytest.mark.parametrize("kind", ["dense", "two in flight"])
def test_memory_of_a_worker_that_is_killed_is_given_back(hire: Hire, kind: str) -> None:
    source = layers()
    before = torch.cuda.memory_allocated()
    crew = hire(source, layers(), kind, workers=2)
    crew.connect()
    victim = crew.workers.pop(0)
    os.kill(victim.runner.pid, signal.SIGKILL)
    victim.runner.join(10.0)
    for seed in range(4):
        scramble(source, seed, finite=True)
        with contextlib.suppress(SyncFailedError):
            crew.scheme.send()
        assert crew.workers[0].call("fingerprint") == fingerprint(source)
    crew.scheme.shutdown()
    assert freed_to(before)


def freed_to(nbytes: int) -> bool:
    """Whether no more than so much is allocated, after at most ten seconds."""
    deadline = time.monotonic() + 10.0
    while torch.cuda.memory_allocated() > nbytes and time.monotonic() < deadline:
        time.sleep(0.05)
    return torch.cuda.memory_allocated() <= nbytes


def test_a_worker_that_does_not_see_the_gpu(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    crew = hire(layers(), layers("cpu"))
    errors = crew.try_connect()
    with pytest.raises(SyncFailedError, match="CUDA_VISIBLE_DEVICES"):
        raise errors[None]


def test_programs_end_without_a_word(tmp_path: Path) -> None:
    """PyTorch warns of shared tensors that are alive when their process ends."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import sys
            import torch
            from torch import nn
            from weight_update import SharedMemWeightSyncScheme
            from weight_update.testing import Crew

            if __name__ == "__main__":
                source = nn.Linear(512, 512).cuda()
                scheme = SharedMemWeightSyncScheme(slot_device="cuda")
                scheme.init_on_sender(model=source, num_workers=1)
                crew = Crew(scheme, "spawn")
                worker = crew.hire(0, nn.Linear(512, 512).cuda())
                crew.connect()
                scheme.send()
                if "shutdown" in sys.argv:
                    scheme.shutdown()
                worker.stop()
                print("done")
        """)
    )
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT)}
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
