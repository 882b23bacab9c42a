"""Models that change between updates: autograd, parts that are replaced, tensors of odd kinds."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engine_parts import Pointing
from pairs import PATHS, add_one, connect_pair, same
from torch import nn

from weight_update import (
    DenseEncoding,
    InferenceEngine,
    MemoryWeightSyncScheme,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    UnsupportedSourceError,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.encodings import WholeEncoding
from weight_update.receiver import flat_buffers
from weight_update.receiver.flat_buffers import MissingBaseError, OwnCopy
from weight_update.receiver.targets import EngineTarget, ModelTarget, StagedUpdate, target_for
from weight_update.strategy import binding
from weight_update.strategy.binding import count_writes
from weight_update.testing import fingerprint
from weight_update.testing.processes import wait_until
from weight_update.wire.schema import WeightSchema

WAIT = 20.0

Join = Callable[..., tuple[WeightSyncScheme, WeightSyncScheme]]


@pytest.fixture
def join() -> Iterator[Join]:
    """Connect a receiver in this thread to a sender in another thread; raise the receiver's error first."""
    with contextlib.ExitStack() as stack:

        def connect(source: Any, target: Any, encoding: str = "dense", **options: Any) -> Any:
            strategy = WeightStrategy("state_dict", encoding=encoding)
            sender = stack.enter_context(MemoryWeightSyncScheme(strategy=strategy, timeout=WAIT, **options))
            given = {"model": source} if isinstance(source, nn.Module) else {"weights": source}
            sender.init_on_sender(num_workers=1, **given)
            receiver = stack.enter_context(copy.copy(sender))
            receiver.init_on_receiver(model=target, worker_idx=0)
            with ThreadPoolExecutor(1) as pool:
                serving = pool.submit(sender.connect, timeout=WAIT)
                receiver.connect(timeout=WAIT)
                serving.result()
            return sender, receiver

        yield connect


class Scale(nn.Module):
    """A module of which autograd keeps ``weight`` for the backward pass; of nn.Linear it keeps a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * self.weight


def linear() -> nn.Module:
    module = nn.Linear(4, 4)
    nn.init.ones_(module.weight)
    return module


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("make", [linear, Scale])
def test_a_backward_pass_across_an_update_raises(
    join: Join, monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], path: str
) -> None:
    monkeypatch.setattr(flat_buffers, "_MANY", 1 if path == "flat buffer" else 1 << 30)
    source, target = make(), make()
    sender, receiver = join(source, target, **PATHS[path])
    for _ in range(2):
        given = torch.ones(1, 4, requires_grad=True)
        output = target(given).sum()
        add_one(source)
        sender.send()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()
    with receiver.hold():
        given = torch.ones(1, 4, requires_grad=True)
        output = target(given).sum()
        handle = sender.send_async()
        output.backward()
    handle.wait(WAIT)
    assert torch.equal(given.grad, torch.full((1, 4), 3.0 if make is Scale else 12.0))


def test_patches_stay_patches_when_writes_are_counted(join: Join) -> None:
    source = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    source[1].weight = source[0].weight  # a tie is counted twice
    target = copy.deepcopy(source)
    sender, _ = join(source, target, "patch")
    for _ in range(4):
        with torch.no_grad():
            source[0].bias[1] += 1
            source[0].weight[1, 1] += 1
        assert sender.send().encoding == "patch"
    assert same(source, target)


class FlatFirst(PatchEncoding):
    """Patches after weights that arrive as one payload, in the memory of the sender."""

    @property
    def whole(self) -> WholeEncoding:
        return DenseEncoding()


def test_patches_are_not_written_into_memory_of_the_sender() -> None:
    """The sender writes to that memory again as soon as the first weights are applied."""
    source, target = nn.Linear(64, 64), nn.Linear(64, 64)
    strategy = WeightStrategy(encoding=FlatFirst())
    sender = SharedMemWeightSyncScheme(strategy, timeout=WAIT)
    with sender, connect_pair(sender, source, target) as receiver:
        assert not receiver._receiver.staging.lies_in_payloads
        with torch.no_grad():
            source.weight[1, 1] += 1
        assert sender.send().encoding == "patch"
        assert same(source, target)


# -- parts that are replaced ---------------------------------------------------------------------------


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def replace_inner(model: nn.Module) -> None:
    model[1][0] = nn.Linear(4, 4)


def replace_outer(model: nn.Module) -> None:
    model[1] = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def replace_parameter(model: nn.Module) -> None:
    model[1][0].weight = nn.Parameter(torch.zeros(4, 4))


def replace_with_double(model: nn.Module) -> None:
    model[1][0] = nn.Linear(4, 4, dtype=torch.float64)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("replace", [replace_inner, replace_outer, replace_parameter])
def test_a_part_that_was_replaced_is_kept_current(
    join: Join, monkeypatch: pytest.MonkeyPatch, path: str, waits: bool, replace: Callable[[nn.Module], None]
) -> None:
    monkeypatch.setattr(flat_buffers, "_MANY", 1 if path == "flat buffer" else 1 << 30)
    source, target = net(), net()
    sender, receiver = join(source, target, **PATHS[path])
    add_one(source)
    if waits:
        with receiver.hold():
            handle = sender.send_async()
            wait_until(lambda: receiver._receiver.gate._updates)
            replace(target)
        with contextlib.suppress(SyncFailedError):  # a change of weights that are not there any more
            handle.wait(WAIT)
    else:
        replace(target)
    for _ in range(2):
        add_one(source)
        sender.send()
        assert same(source, target)


def test_a_part_of_another_dtype(join: Join) -> None:
    source, target = net(), net()
    sender, receiver = join(source, target)
    with receiver.hold():
        handle = sender.send_async()
        wait_until(lambda: receiver._receiver.gate._updates)
        replace_with_double(target)
    handle.wait(WAIT)
    assert target[1][0].weight.dtype is torch.float64
    assert torch.equal(target[1][0].weight.float(), source[1][0].weight)


def replace_weight(module: nn.Linear, weight: torch.Tensor) -> None:
    module.weight = nn.Parameter(weight)


def replace_data(module: nn.Linear, weight: torch.Tensor) -> None:
    module.weight.data = weight


@pytest.mark.parametrize("replace", [replace_weight, replace_data])
@pytest.mark.parametrize("encoding", ["dense", "bucket", "patch"])
@pytest.mark.parametrize("stable", [False, True])
def test_a_tensor_of_another_shape_is_named_until_it_fits(
    join: Join, replace: Any, encoding: str, stable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = nn.Linear(4, 2), nn.Linear(4, 2)
    sender, receiver = join(source, target, encoding, stable_addresses=stable)
    bias = target.bias.detach().clone()
    replace(target, torch.zeros(3, 4))
    for _ in range(2):
        add_one(source)
        with pytest.raises(SyncFailedError, match=r"weight: float32\[2, 4\]: shape \[3, 4\] in the model"):
            sender.send()
        assert torch.equal(target.bias, bias)
        assert target.weight.shape == (3, 4)
    assert "worker 0 keeps version 0: " in caplog.text
    replace(target, torch.zeros(2, 4))
    sender.send()
    assert same(source, target)
    assert receiver.version == sender.version


def test_a_part_that_does_not_fit_is_named_until_it_does(join: Join) -> None:
    source, target = net(), net()
    sender, receiver = join(source, target)
    before = target[0].weight.detach().clone()
    target[1][0] = nn.Linear(4, 5)
    for _ in range(2):
        add_one(source)
        with pytest.raises(SyncFailedError, match=r"a part of which was replaced(.|\n)*1\.0\.weight"):
            sender.send()
        assert torch.equal(target[0].weight, before)
    target[1][0] = nn.Linear(4, 4)
    sender.send()
    assert same(source, target)
    assert receiver.version == sender.version


def test_a_dict_within_a_dict(join: Join) -> None:
    source = {"a": {"b": torch.ones(3)}, "c": torch.ones(3)}
    target: dict[str, Any] = {"a": {"b": torch.zeros(3)}, "c": torch.zeros(3)}
    sender, _ = join(source, target)
    target["a"] = {"b": torch.zeros(3)}
    sender.send()
    assert torch.equal(target["a"]["b"], torch.ones(3))


def target_of(model: nn.Module, *, stable: bool = False) -> ModelTarget:
    return ModelTarget(WeightStrategy(), model, stable)


def with_ones(target: ModelTarget, schema: WeightSchema) -> OwnCopy:
    """Return the weights of a receiver that were switched to version 0, which is all ones."""
    weights = OwnCopy(schema, target.binding, lambda payload: False)
    ones = [torch.ones(shape) for shape in schema.shapes]
    update = StagedUpdate(0, None, [], ones, {}, weights)
    weights.stage(update, target)
    weights.switch(update, target)
    return weights


def own_copy(model: nn.Module) -> OwnCopy:
    """Return the weights of a receiver whose ``model`` has version 0, and that may be changed."""
    target = target_of(model)
    weights = with_ones(target, target.schema())
    weights.require(0)
    return weights


class WritingDelta:
    """A change of nothing, while whose application another thread writes into the model."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def write(self, flat: torch.Tensor) -> None:
        with torch.no_grad():
            self._parameter.view(-1)[0] = 5.0

    def touched(self, schema: WeightSchema) -> list[int]:
        return []


def test_a_write_while_a_change_is_applied_is_noticed() -> None:
    model = linear()
    weights = own_copy(model)
    weights.apply([WritingDelta(model.weight)], 1)
    with pytest.raises(MissingBaseError, match="wrote into its weights"):
        weights.require(1)


def test_a_parameter_replaced_while_a_change_is_applied_is_noticed() -> None:
    """``set_extra_state()``, which runs between the two steps, may replace one."""
    model = linear()
    weights = own_copy(model)
    model.weight = nn.Parameter(torch.zeros(4, 4))
    weights.apply([], 1)
    with pytest.raises(MissingBaseError, match="wrote into its weights"):
        weights.require(1)


def test_a_write_right_after_a_switch_is_noticed() -> None:
    model = linear()
    target = target_of(model)
    write = target.write

    def write_and_be_followed(*args: Any) -> None:
        write(*args)
        model.weight.data[0, 0] = 5.0
        torch.autograd.graph.increment_version([model.weight])

    target.write = write_and_be_followed  # type: ignore[method-assign]
    weights = with_ones(target, target.schema())
    with pytest.raises(MissingBaseError, match="wrote into its weights"):
        weights.require(0)


def test_a_write_right_after_a_change_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear()
    weights = own_copy(model)

    def count_and_be_followed(targets: Any) -> None:
        count_writes(targets)
        with torch.no_grad():
            model.weight[0, 0] = 5.0

    monkeypatch.setattr(flat_buffers, "count_writes", count_and_be_followed)
    weights.apply([], 1)
    with pytest.raises(MissingBaseError, match="wrote into its weights"):
        weights.require(1)


@pytest.mark.parametrize("stable", [False, True])
def test_changes_of_tied_and_cast_weights_fit_again_and_again(stable: bool) -> None:
    """The receiver's own writes are never taken for writes of the worker."""
    model = nn.Sequential(linear(), linear(), linear().to(torch.bfloat16))
    model[1].weight = model[0].weight
    target = target_of(model, stable=stable)
    weights = with_ones(target, target.schema().with_dtype(torch.float32))
    for version in range(3):
        weights.require(version)
        weights.apply([TouchingDelta()], version + 1)
    weights.require(3)


class TouchingDelta:
    """A change of every weight, to the value that it has."""

    def write(self, flat: torch.Tensor) -> None: ...

    def touched(self, schema: WeightSchema) -> list[int]:
        return list(range(len(schema.tensors)))


def test_a_write_before_the_model_is_replaced_is_not_forgotten() -> None:
    model = linear()
    weights = own_copy(model)
    with torch.no_grad():
        model.weight[0, 0] = 5.0
    weights.bind(target_of(linear()).binding)
    with pytest.raises(MissingBaseError, match="wrote into its weights"):
        weights.require(0)


@pytest.mark.parametrize("path", PATHS)
def test_a_payload_that_was_released_is_kept_by_nobody(
    join: Join, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(flat_buffers, "_MANY", 1 if path == "flat buffer" else 1 << 30)
    source = net()
    sender, receiver = join(source, net(), **PATHS[path])
    updates, released = receiver._receiver._updates, list[torch.Tensor]()
    monkeypatch.setattr(receiver._receiver.link, "release", released.append)
    add_one(source)
    sender.send()
    with updates.busy:  # until the update is finished
        current = updates.staging.current
    wait_until(lambda: released and not updates.leftovers)
    kept = [*current.payloads, *current.used_up]
    assert not any(memory is one for memory in kept for one in released)


# -- code of the model that ends its thread ------------------------------------------------------------


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise KeyError("no message")


class Exits(nn.Linear):
    """A module that ends the thread which applies an update with a certain extra state."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.note = 0

    def get_extra_state(self) -> int:
        return self.note

    def set_extra_state(self, note: int) -> None:
        if note == 1:
            raise SystemExit(3)
        if note == 3:
            raise UnreadableError
        self.note = note


@pytest.mark.parametrize("encoding", ["dense", "patch"])
@pytest.mark.parametrize(
    ("note", "message"), [(1, r"SystemExit\(3\)"), (3, r"UnreadableError, .* \(KeyError\)")]
)
def test_exiting_in_the_middle_of_an_update_is_an_error_of_that_update(
    join: Join, encoding: str, note: int, message: str
) -> None:
    source, target = Exits(), Exits()
    sender, receiver = join(source, target, encoding)
    source.note = note
    add_one(source)
    with pytest.raises(SyncFailedError, match=message):
        sender.send()
    assert receiver.version == 0
    source.note = 2
    sender.send()
    assert target.note == 2
    assert torch.equal(target.weight, source.weight)


class Moments(nn.Module):
    """A module that changes its extra state in place."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.total = {"count": 0}, torch.zeros(2)

    def get_extra_state(self) -> dict[str, Any]:
        return {"sums": self.sums, "total": self.total}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.sums.update(state["sums"])
        self.total.copy_(state["total"])


@pytest.mark.parametrize("encoding", ["dense", "patch"])
def test_extra_state_that_changes_in_place_is_kept_with_the_version(join: Join, encoding: str) -> None:
    source, target = (nn.Sequential(Moments(), Exits()) for _ in range(2))
    sender, _ = join(source, target, encoding)
    source[0].sums["count"] = 7
    source[0].total += 7
    source[1].note = 1
    with pytest.raises(SyncFailedError, match="SystemExit"):
        sender.send()
    assert (target[0].sums, target[0].total.tolist()) == ({"count": 0}, [0.0, 0.0])
    source[1].note = 2
    sender.send()
    assert (target[0].sums, target[0].total.tolist()) == ({"count": 7}, [7.0, 7.0])


class Statistics(nn.Linear):
    """A module that has a buffer of several pages."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("seen", torch.zeros(4096))


class FailingObserver:
    """An observer of a receiver's updates, of which one call fails once."""

    def __init__(self) -> None:
        self.fails = ""

    def _tell(self, call: str) -> None:
        if self.fails == call:
            self.fails = ""
            raise RuntimeError("the context has failed")

    def switched(self) -> None:
        self._tell("switched")

    def applied(self, weights: Callable[[], Any]) -> None:
        self._tell("applied")


@pytest.mark.parametrize("call", ["switched", "applied"])
def test_writes_of_the_worker_do_not_come_back_after_an_error_of_an_observer(call: str) -> None:
    source, target, observer = Statistics(), Statistics(), FailingObserver()
    sender = SharedMemWeightSyncScheme(timeout=WAIT)
    with sender, connect_pair(sender, source, target) as receiver:
        receiver._process.receiver.options.observer = observer
        for version in range(1, 8):
            add_one(source)
            if version == 3:
                observer.fails = call
                with pytest.raises(SyncFailedError, match="the context has failed"):
                    sender.send()
            else:
                sender.send()
            assert same(source, target)
            with receiver.hold():
                target.seen += 0.5


def test_extra_state_is_that_of_the_weights_after_an_error_of_an_observer(join: Join) -> None:
    source, target = (nn.Sequential(Moments(), nn.Linear(2, 2)) for _ in range(2))
    sender, receiver = join(source, target)
    receiver._process.receiver.options.observer = observer = FailingObserver()
    add_one(source[1])
    source[0].sums["count"] = 7
    observer.fails = "switched"
    with pytest.raises(SyncFailedError, match="the context has failed"):
        sender.send()
    assert same(source[1], target[1])
    assert target[0].sums == {"count": 7}


# -- tensors of odd kinds ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_model_of_inference_tensors_is_refused(join: Join, path: str) -> None:
    with torch.inference_mode():
        target = linear()
    with pytest.raises(UnsupportedSourceError, match=r"'weight' of the target is an inference tensor"):
        join(linear(), target, **PATHS[path])


def test_connecting_under_inference_mode_leaves_a_model_that_learns(join: Join) -> None:
    source, target = linear(), linear()
    add_one(source)
    with torch.inference_mode():
        sender, _ = join(source, target)
    for _ in range(2):
        target(torch.ones(1, 4)).sum().backward()
        assert same(source, target)
        add_one(source)
        sender.send()


@pytest.mark.parametrize("encoding", ["dense", "bucket", "patch"])
@pytest.mark.parametrize("before", ["init_on_sender", "connect"])
def test_a_sender_under_inference_mode(before: str, encoding: str) -> None:
    source, target = linear(), linear()
    strategy = WeightStrategy("state_dict", encoding=encoding, convert=doubled)
    with MemoryWeightSyncScheme(strategy=strategy, timeout=WAIT) as sender:
        with torch.inference_mode(before == "init_on_sender"):
            sender.init_on_sender(model=source, num_workers=1)
        with copy.copy(sender) as receiver:
            receiver.init_on_receiver(model=target, worker_idx=0)
            joining = threading.Thread(target=receiver.connect)
            joining.start()
            with torch.inference_mode():
                sender.connect(timeout=WAIT)
                sender.send()
            joining.join()
            for _ in range(3):
                add_one(source)
                sender.send()
                assert torch.equal(target.weight, 2 * source.weight)
            with torch.inference_mode():
                source.load_state_dict(linear().state_dict())
                sender.send()
            assert torch.equal(target.weight, 2 * source.weight)


def doubled(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        yield name, 2 * tensor


@pytest.mark.parametrize("kind", [{"dtype": torch.float64}, {"device": "meta"}])
@pytest.mark.parametrize("inplace", [True, False])
def test_applying_under_inference_mode_leaves_a_model_that_learns(
    kind: dict[str, Any], inplace: bool
) -> None:
    target, weights = nn.Linear(4, 4, **kind), linear().state_dict()
    with torch.inference_mode():
        WeightStrategy().apply_weights(target, weights, inplace)
    assert not any(one.is_inference() for one in target.parameters())


def conjugate() -> torch.Tensor:
    return torch.zeros(3, dtype=torch.complex64).conj()


def negative() -> torch.Tensor:
    return conjugate().imag


@pytest.mark.parametrize("encoding", ["dense", "patch"])
@pytest.mark.parametrize("make", [conjugate, negative])
def test_views_that_are_conjugate_or_negative(
    join: Join, make: Callable[[], torch.Tensor], encoding: str
) -> None:
    source = {"a": torch.randn(3, dtype=make().dtype), "b": torch.ones(3)}
    target = {"a": make(), "b": torch.zeros(3)}
    sender, _ = join(source, target, encoding)
    for _ in range(2):
        assert torch.equal(target["a"], source["a"])
        source["a"][1] += 1
        sender.send()
    assert target["a"].is_conj() or target["a"].is_neg()


class Wide(Pointing):
    """An engine in float32."""

    def expected_weights(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.empty(4)}


def test_tensors_that_leave_the_senders_memory_keep_the_dtype_that_an_engine_expects() -> None:
    """As when a sender on a GPU leaves: the engine is given equal tensors in other memory."""
    engine, sent = Wide(), torch.randn(4, dtype=torch.bfloat16)
    target = EngineTarget(engine)
    target.schema()
    target.write(("weight",), [sent], 1)
    before = fingerprint(engine.kept)
    target.move(("weight",), [sent.clone()])
    assert fingerprint(engine.kept) == before
    assert engine.kept["weight"].dtype is torch.float32


class OnAGpu(torch.Tensor):
    """A tensor on the CPU that says it is on a GPU."""

    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    device = property(lambda self: torch.device("cuda", 1))  # type: ignore[assignment]


def test_forward_passes_are_awaited_on_the_gpu_that_a_model_was_moved_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    awaited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", awaited.append)
    monkeypatch.setattr(binding, "_convert", lambda target, value: value)
    weights = {"weight": torch.zeros(3)}
    target = target_for(weights, WeightStrategy("state_dict"), stable=True)
    schema = WeightSchema.of(weights)
    for moved, expected in ((torch.zeros(3).as_subclass(OnAGpu), 2), (torch.zeros(3), 0)):
        weights["weight"] = moved
        awaited.clear()
        target.write(schema.names, target.prepare(schema, [torch.ones(3)]), 1)
        assert awaited == [torch.device("cuda", 1)] * expected  # before the weights are written, and after


def with_empty_buffers() -> nn.Module:
    """Return a module with empty buffers of several shapes, and elements of several sizes."""
    model = nn.BatchNorm1d(3)
    for number, shape in enumerate([(0,), (3, 0, 2), (0,), (0, 4)]):
        model.register_buffer(f"empty{number}", torch.empty(shape))
    return model


@pytest.mark.parametrize("path", PATHS)
def test_empty_buffers_keep_their_shapes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "flat buffer":
        monkeypatch.setattr(flat_buffers, "_MANY", 1)
    source, target = with_empty_buffers(), with_empty_buffers()
    options = dict(PATHS[path])
    strategy = WeightStrategy(encoding=options.pop("encoding", "dense"))
    shapes = [one.shape for one in target.buffers()]
    with MemoryWeightSyncScheme(strategy, timeout=10.0, **options) as scheme:
        receiver = connect_pair(scheme, source, target)
        assert [one.shape for one in target.buffers()] == shapes
        add_one(source)
        scheme.send()
        assert same(source, target)
        receiver.shutdown()


class HalfLoaded(InferenceEngine):
    """An engine that fails after it has begun to load."""

    fails = False

    def expected_weights(self) -> None:
        return None

    def begin_update(self, version: int) -> None: ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _ in weights:
            if self.fails:
                raise ValueError("no room")

    def finish_update(self, version: int) -> None: ...


def test_the_log_of_a_worker_that_has_no_version_any_more(caplog: pytest.LogCaptureFixture) -> None:
    engine = HalfLoaded()
    with MemoryWeightSyncScheme(timeout=10.0) as scheme, connect_pair(scheme, nn.Linear(2, 2), engine):
        engine.fails = True
        with pytest.raises(SyncFailedError):
            scheme.send()
        wait_until(lambda: "no room" in caplog.text)
    assert "worker 0 has no complete version: no room" in caplog.text
