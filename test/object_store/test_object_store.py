"""Versions that travel through an object store."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engine_parts import Notebook
from interpreters import use_template_for_forkserver
from marks import slow
from object_store_parts import ENCODINGS, TOKEN, Ends, Scheme, arrives, frames, nudge
from torch import nn

from weight_update import (
    BucketEncoding,
    SchemaMismatchError,
    SyncFailedError,
    WeightStrategy,
    group_schemes,
    send_together,
)
from weight_update.receiver import staging
from weight_update.testing import mlp, scramble
from weight_update.testing.models import Zoo, fingerprint
from weight_update.testing.processes import wait_until
from weight_update.testing.worker_processes import start_workers
from weight_update.transports.object_store import stored_frames
from weight_update.transports.object_store.manifest import StoreManifest


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize("protocol", ["directory", slow("memory")])
def test_bits_are_the_same_for_readers_that_join_at_any_time(
    ends: Ends, encoding: Any, protocol: str, tmp_path: Path
) -> None:
    if protocol == "memory":
        ends.url = f"memory://{tmp_path.name}"
    source = Zoo(1)
    strategy = WeightStrategy("state_dict", encoding=encoding)
    sender = ends.sender(source, strategy=strategy, most_changes=3)
    readers: list[tuple[Scheme, nn.Module]] = []
    for version in range(1, 10):
        model = Zoo(version + 1)
        readers.append((ends.reader(model), model))
        assert readers[-1][0].version == version - 1
        scramble(source.inner, version)
        source.note = {"version": version}
        assert sender.send().version == version
        assert (sender.version, sender.worker_versions) == (version, {0: version})
        for reader, mine in readers:
            arrives(reader, version)
            assert fingerprint(mine, strategy) == fingerprint(source, strategy)
            assert mine.note == source.note


def test_most_versions_are_changes_and_old_ones_are_removed(ends: Ends) -> None:
    source = mlp(1)
    sender = ends.sender(source, strategy=WeightStrategy(encoding="patch"), most_changes=3)
    sent = []
    for _ in range(12):
        nudge(source)
        sent.append(sender.send().wire_bytes)
    whole = [index for index, nbytes in enumerate(sent) if nbytes > max(sent) / 2]
    assert whole == [3, 7, 11]
    # the welcome, the chain before and the present one, of one frame a version
    wait_until(lambda: len(frames(ends.url)) == 1 + 4 + 1)


@pytest.mark.parametrize("bucket_size", [4096, 1 << 20], ids=["several", "one"])
def test_memory_for_buckets_is_used_again(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, bucket_size: int
) -> None:
    made: list[int] = []
    new_buffer = staging.new_buffer

    def note(nbytes: int, device: torch.device) -> torch.Tensor:
        made.append(nbytes)
        return new_buffer(nbytes, device)

    monkeypatch.setattr(staging, "new_buffer", note)
    model, mine = mlp(1), mlp(2)
    sender = ends.sender(model, strategy=WeightStrategy(encoding=BucketEncoding(bucket_size=bucket_size)))
    reader = ends.reader(mine)
    for turn in range(8):
        if turn == 4:
            assert made
            made.clear()
        nudge(model)
        arrives(reader, sender.send().version)
        assert fingerprint(mine) == fingerprint(model)
    assert made == []


def test_a_reader_that_was_away_gets_the_newest_version(ends: Ends) -> None:
    source, model = mlp(1), mlp(2)
    sender = ends.sender(source, strategy=WeightStrategy(encoding="patch"), most_changes=2)
    reader = ends.reader(model)
    with reader.hold():
        for _ in range(11):
            nudge(source)
            sender.send()
    arrives(reader, 11)
    assert fingerprint(model) == fingerprint(source)


def test_a_reader_that_failed_to_apply_an_update_gets_all_weights(ends: Ends) -> None:
    source, model = mlp(1), mlp(2)
    sender = ends.sender(source, strategy=WeightStrategy(encoding="patch"))
    reader = ends.reader(model)
    with torch.no_grad():
        next(model.parameters()).add_(1)  # the changes are for other weights
    nudge(source)
    sender.send()
    arrives(reader, 1)
    assert fingerprint(model) == fingerprint(source)


def test_a_reader_without_memory_for_all_weights_reads_them_later(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, model = mlp(1), mlp(2)
    sender = ends.sender(source, strategy=WeightStrategy(encoding="patch"))
    reader = ends.reader(model)
    refused = threading.Event()

    def refuse(nbytes: int) -> torch.Tensor:
        refused.set()
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(stored_frames, "fresh_bytes", refuse)
        with torch.no_grad():
            next(model.parameters()).add_(1)  # the changes are for other weights
        nudge(source)
        sender.send()
        assert refused.wait(10.0)
        time.sleep(0.1)
    arrives(reader, 1)
    assert fingerprint(model) == fingerprint(source)


def test_workers_in_processes(ends: Ends) -> None:
    use_template_for_forkserver()
    source = mlp(1)
    scheme = ends.scheme(strategy=WeightStrategy(encoding="patch"))
    with start_workers(scheme, [mlp(2), mlp(3)], "forkserver", model=source) as workers:
        for version in range(1, 4):
            scramble(source, version)
            scheme.send()
            wait_until(lambda expected=version: workers.ask("version") == [expected] * 2)
            assert workers.ask("fingerprint") == [fingerprint(source)] * 2


def test_a_pipeline(ends: Ends) -> None:
    source, model = mlp(1), mlp(2)
    strategy = WeightStrategy(encoding=BucketEncoding(bucket_size=256), max_in_flight=2)
    sender, reader = ends.sender(source, strategy=strategy), ends.reader(model)
    for version in range(1, 4):
        scramble(source, version)
        sender.send()
        arrives(reader, version)
        assert fingerprint(model) == fingerprint(source)


@pytest.mark.parametrize(("encoding", "most_changes"), [("dense", 20), ("patch", 1), ("patch", 0)])
def test_several_models(ends: Ends, url: str, encoding: str, most_changes: int) -> None:
    """Each model has a URL of its own, and workers switch each by itself."""
    options = {"strategy": WeightStrategy(encoding=encoding), "most_changes": most_changes}
    sources, models = [mlp(1), mlp(2)], [mlp(3), mlp(4)]
    schemes, readers = [], []
    for number, source in enumerate(sources):
        ends.url = f"{url}/{number}"
        schemes.append(ends.sender(source, connect=False, **options))
    group_schemes(schemes)
    for number, (scheme, model) in enumerate(zip(schemes, models, strict=True)):
        scheme.connect()
        ends.url = f"{url}/{number}"
        readers.append(ends.reader(model))
    for version in range(1, 4):
        for source in sources:
            nudge(source)
        send_together(dict(zip(schemes, sources, strict=True)))
        for reader, model, source in zip(readers, models, sources, strict=True):
            arrives(reader, version)
            assert fingerprint(model) == fingerprint(source)


def test_without_waiting(ends: Ends) -> None:
    source, model = mlp(1), mlp(2)
    sender, reader = ends.sender(source, sync=False), ends.reader(model)
    for version in range(1, 20):
        scramble(source, version)
        sender.send()
    arrives(reader, 19)
    assert fingerprint(model) == fingerprint(source)


def test_narrower_weights_and_no_model(ends: Ends) -> None:
    source, model = mlp(1), mlp(2).to(torch.bfloat16)
    sender = ends.sender(source)
    reader, listener = ends.reader(model), ends.reader(None, strategy="state_dict")
    scramble(source, 5)
    sender.send()
    received = listener.receive(timeout=10.0)
    arrives(reader, 1)
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.to(torch.bfloat16))
        assert torch.equal(received[name], value)


def test_an_engine(ends: Ends) -> None:
    source, engine = mlp(1), Notebook()
    sender = ends.sender(source, strategy=WeightStrategy("state_dict", encoding="patch"))
    reader = ends.reader(engine, strategy="state_dict")
    scramble(source, 5)
    sender.send()
    arrives(reader, 1)
    assert fingerprint(engine.loaded) == fingerprint(source)


def test_an_engine_that_could_not_begin_a_patch(ends: Ends) -> None:
    """The next patch changes a version that the engine does not have."""
    source, engine = mlp(1), Notebook(changes=True)
    sender = ends.sender(source, strategy=WeightStrategy("state_dict", encoding="patch"))
    reader = ends.reader(engine, strategy="state_dict")
    engine.fails = "begin"
    nudge(source)
    sender.send()
    wait_until(lambda: engine.fails is None)
    with torch.no_grad():
        source[0].weight.view(-1)[1] += 1
    sender.send()
    arrives(reader, 2)
    assert fingerprint(engine.loaded) == fingerprint(source)


@pytest.mark.parametrize("place", ["begin", 1, "finish"])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_version_that_an_engine_could_not_load_comes_again(
    ends: Ends, place: str | int, in_chunks: bool
) -> None:
    """It may be the last one of the trainer."""
    source, engine = mlp(1), Notebook(in_chunks)
    encoding = BucketEncoding(bucket_size=256)
    sender = ends.sender(source, strategy=WeightStrategy("state_dict", encoding=encoding))
    reader = ends.reader(engine, strategy="state_dict")
    engine.fails = place
    scramble(source, 5)
    sender.send()
    sender.shutdown()
    arrives(reader, 1)
    assert fingerprint(engine.loaded) == fingerprint(source)


def test_a_version_that_no_engine_could_load_is_not_read_all_the_time(ends: Ends) -> None:
    source, engine = mlp(1), Notebook()
    sender = ends.sender(source, strategy="state_dict")
    reader = ends.reader(engine, strategy="state_dict", poll_seconds=0.005)
    scramble(source, 5)
    with mock.patch.object(engine, "begin_update", side_effect=RuntimeError("broken")) as begin:
        sender.send()
        wait_until(lambda: begin.call_count > 1)
        time.sleep(0.5)
    assert begin.call_count < 10
    arrives(reader, 1)


def test_after_a_version_that_could_not_be_loaded_the_next_one_is_loaded_at_once(ends: Ends) -> None:
    source, engine = mlp(1), Notebook()
    sender = ends.sender(source, strategy="state_dict")
    reader = ends.reader(engine, strategy="state_dict")
    reader._receiver.link._again_after = 1000.0  # as after many failures
    with mock.patch.object(engine, "begin_update", side_effect=RuntimeError("broken")) as begin:
        sender.send()
        wait_until(lambda: begin.call_count > 0)
        time.sleep(0.5)
    assert begin.call_count == 1
    sender.send()
    arrives(reader, 2)


def test_a_worker_that_joined_again_and_could_not_apply_lives_on(ends: Ends, url: str) -> None:
    """A manifest that cannot be verified ends connect(), but not a worker that has weights."""
    engine, manifest = Notebook(), Path(url) / "latest.json"
    ends.sender(mlp(1), strategy="state_dict").shutdown()
    reader = ends.reader(engine, strategy="state_dict")
    with mock.patch.object(engine, "begin_update", side_effect=RuntimeError("broken")) as begin:
        source = mlp(2).bfloat16()  # of another schema, so that the worker joins again
        ends.sender(source, strategy="state_dict")
        wait_until(lambda: begin.call_count > 0)
        signed = manifest.read_bytes()
        manifest.write_bytes(StoreManifest.decode(signed, TOKEN).encode("other"))
        time.sleep(0.5)
    manifest.write_bytes(signed)
    weights = source.state_dict().items()
    wait_until(lambda: all(torch.equal(engine.loaded[name], value) for name, value in weights))
    assert reader.receive(timeout=0.0) is not None


@pytest.mark.parametrize("encoding", ["dense", "patch"])
def test_a_restarted_trainer_goes_on_counting(ends: Ends, encoding: str) -> None:
    strategy, model = WeightStrategy(encoding=encoding), mlp(2)
    first = ends.sender(mlp(1), strategy=strategy)
    reader = ends.reader(model)
    first.send()
    first.shutdown()
    source = mlp(3)
    second = ends.sender(source, strategy=strategy)
    assert second.version == 2
    arrives(reader, 2)
    assert fingerprint(model) == fingerprint(source)
    wait_until(lambda: sum(map(Path.is_dir, Path(ends.url).iterdir())) == 1)  # only that of the second run


def test_a_trainer_with_other_weights(ends: Ends) -> None:
    ends.sender(mlp(1)).shutdown()
    reader = ends.reader(mlp(2))
    ends.sender(nn.Linear(3, 2))
    with pytest.raises(SchemaMismatchError, match="worker 0 does not have the same weights"):
        reader.receive(timeout=10.0)


def test_a_second_trainer_ends_the_first(ends: Ends) -> None:
    first = ends.sender(mlp(1))
    source = mlp(2)
    second = ends.sender(source)
    with pytest.raises(SyncFailedError, match=r"another sender has published version 1 .* a URL of its own"):
        first.send()
    assert second.send().version == 2
    model = mlp(3)
    ends.reader(model)
    assert fingerprint(model) == fingerprint(source)
