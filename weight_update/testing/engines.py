"""The contract of every inference engine."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from weight_update.encodings import BucketEncoding, Encoding
from weight_update.engines.base import InferenceEngine
from weight_update.errors import SchemaMismatchError, SyncFailedError
from weight_update.schemes import MemoryWeightSyncScheme
from weight_update.strategy.strategy import WeightStrategy
from weight_update.testing.models import fingerprint, scramble
from weight_update.testing.watched_engines import Watched
from weight_update.threads import call_in_thread

ENCODINGS = ["dense", "bucket", "patch"]
SEVERAL_UPDATES = 5


class Link(NamedTuple):
    """A sender of the weights of ``source``, and a receiver of them with ``engine``."""

    sender: MemoryWeightSyncScheme
    receiver: MemoryWeightSyncScheme
    engine: Watched
    source: Any


class EngineContract:
    """Tests of one inference engine; subclass it, write :meth:`make_engine` and :meth:`read_weights`.

    The engine gets its weights from a ``MemoryWeightSyncScheme`` in the process of the tests. The tensors
    that it gets become zeros as soon as :class:`~weight_update.InferenceEngine` allows it.

    An engine that pauses its requests during an update also has :meth:`generate`, with which three more tests
    run. Write none for an engine whose users generate inside ``scheme.hold()``.

    Attributes:
        limit: seconds that an update or a request may take.
        moment: seconds in which a request that is not kept waiting gets its answer.
    """

    limit: float = 20.0
    moment: float = 0.2

    def make_engine(self) -> InferenceEngine:
        """Return a new engine, without weights or with any."""
        raise NotImplementedError(
            f"write {type(self).__name__}.make_engine(self): it returns a new InferenceEngine"
        )

    def read_weights(self, engine: InferenceEngine) -> Mapping[str, torch.Tensor]:
        """Return the weights with which ``engine`` generates.

        They have the names and shapes of :meth:`make_source`, and the dtypes of ``expected_weights()``; those
        of the source if that is None. An engine that fuses weights splits them here.
        """
        raise NotImplementedError(
            f"write {type(self).__name__}.read_weights(self, engine): it returns the engine's weights by name"
        )

    def make_source(self) -> nn.Module:
        """Return a trainer's model, with weights that the engine takes; by default a small network."""
        source = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
        change(source, 0)
        return source

    def generate(self, engine: InferenceEngine) -> object:
        """Answer a short request, and return an answer that differs if the weights do.

        Two answers by the same weights have to be equal (``==``), so use greedy decoding. By default there is
        no request, and tests that need one are skipped.
        """
        pytest.skip(f"{type(self).__name__} has no generate(self, engine)")

    # -- weights -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("encoding", ENCODINGS)
    def test_every_update_is_exact(self, encoding: str) -> None:
        """After each update the engine has the trainer's weights, bit for bit."""
        with self.connected(encoding) as link:
            self.require_equal(link, 0)
            for version in range(1, SEVERAL_UPDATES):
                change(link.source, version)
                link.sender.send()
                self.require_equal(link, version)

    def test_patches_of_one_weight(self) -> None:
        """A patch may change one element, or all of a weight, and leave all other weights as they are."""
        with self.connected("patch") as link:
            for name, weight in numbers_of(link.source).items():
                for part in (weight[(-1,) * weight.dim()], weight):
                    part.copy_(part.double() + 1)
                    self.require_equal(link, link.sender.send().version, f"and a change of {name}")
            engine = link.engine
            if engine.loads_changes and not engine.keeps_tensors and "load_changes" not in engine.calls:
                pytest.fail(
                    "all patches were as large as all weights: return a larger model in make_source()"
                )

    def test_weights_stay_when_the_trainer_leaves(self) -> None:
        """An engine keeps its weights after the sender's memory is gone."""
        with self.connected() as link:
            self.update(link)
            link.sender.shutdown()
            if link.engine.keeps_tensors:  # a receiver with shared memory calls this; ours has no such memory
                weights = {name: value.clone() for name, value in self.expected(link).items()}
                link.engine.load_weights(iter(weights.items()))
            self.require_weights(link, "after the trainer left")

    def test_a_trainer_that_starts_again(self) -> None:
        """An engine that has weights takes those of another trainer, whose versions begin at 0."""
        with self.connected() as link:
            self.update(link)
            self.update(link)
        with self.connected(engine=link.engine) as link:
            self.require_equal(link, 0)
            self.update(link)

    # -- expected weights --------------------------------------------------------------------------

    def test_expected_weights(self) -> None:
        """``expected_weights()`` has the names and shapes of the trainer, and all dtypes are converted."""
        engine = Watched(self.make_engine())
        expected = require_expected_weights(engine)
        given = WeightStrategy("state_dict").named(self.make_source()).tensors
        shapes = {name: tuple(value.shape) for name, value in given.items()}
        found = {name: tuple(value.shape) for name, value in expected.items()}
        assert found == shapes, "expected_weights() has other names or shapes than make_source()"
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            with self.connected(engine=engine, source=self.make_source().to(dtype)) as link:
                self.require_equal(link, 0, f"from a trainer in {dtype}")

    @pytest.mark.parametrize("difference", ["missing", "unexpected", "shape", "dtype"])
    def test_a_trainer_with_other_weights_is_refused(self, difference: str) -> None:
        """The error of ``connect()`` names the weight, and the engine keeps its weights."""
        with self.connected() as link:
            require_expected_weights(link.engine)
            self.update(link)
            before = fingerprint(self.read_weights(link.engine.engine))
            given = self.expected(link)
        name = next(iter(given))
        if difference == "missing":
            del given[name]
        elif difference == "unexpected":
            name = "weight_of_nobody"
            given[name] = torch.zeros(1)
        elif difference == "shape":
            given[name] = given[name].unsqueeze(-1)
        else:
            other = torch.int32 if given[name].is_floating_point() else torch.float32
            given[name] = torch.zeros(given[name].shape, dtype=other)
        link.engine.calls.clear()
        with pytest.raises(SchemaMismatchError) as caught, self.connected(engine=link.engine, source=given):
            pass
        assert name in [line.partition(":")[0] for line in caught.value.problems]
        assert not link.engine.calls
        after = fingerprint(self.read_weights(link.engine.engine))
        assert after == before, "the weights of the engine changed, though connect() refused the trainer"
        with self.connected(engine=link.engine) as link:
            self.require_equal(link, 0)

    # -- failures ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("place", ["first weight", "last weight", "finish"])
    @pytest.mark.parametrize("encoding", ENCODINGS)
    def test_an_update_that_fails(self, encoding: str, place: str) -> None:
        """The sender gets the error, no version is in force, and the next update repairs the engine."""
        with self.connected(encoding) as link:
            self.update(link)
            change(link.source, 2)
            self.fail_once(link, place)
            change(link.source, 3)
            assert link.sender.send().version == 3
            self.require_equal(link, 3, f"after an update that failed at: {place}")

    @pytest.mark.parametrize("place", ["first weight", "finish"])
    def test_a_patch_that_fails(self, place: str) -> None:
        """The engine recovers from a patch of which it has a part."""
        with self.connected("patch") as link:
            self.update(link)
            for weight in numbers_of(link.source).values():
                element = weight[(0,) * weight.dim()]
                element.copy_(element.double() + 1)
            self.fail_once(link, place)
            assert link.sender.send().version == 3
            self.require_equal(link, 3, f"after a patch that failed at: {place}")

    # -- requests ----------------------------------------------------------------------------------

    def test_no_request_sees_a_part_of_an_update(self) -> None:
        """A request that arrives during an update is answered by the weights before it or after it."""
        reached, goes_on = threading.Event(), threading.Event()

        def stop_at_the_last(place: int | str) -> None:
            if place == len(names) - 1:
                reached.set()
                goes_on.wait(self.limit)

        with self.connected() as link:
            engine, names = link.engine, list(self.expected(link))
            before = self.generate(engine.engine)
            assert self.generate(engine.engine) == before, "generate() gave two answers by the same weights"
            change(link.source, 1)
            engine.before = stop_at_the_last
            sending = call_in_thread("engine", link.sender.send)
            try:
                assert reached.wait(self.limit), "the update did not begin"
                request = call_in_thread("engine", partial(self.generate, engine.engine))
                wait([request], self.moment)
            finally:
                goes_on.set()
            during = request.result(self.limit)
            sending.result(self.limit)
            self.require_equal(link, 1)
            after = self.generate(engine.engine)
            assert before != after, "generate() gave equal answers by different weights"
            if during not in (before, after):
                pytest.fail(
                    "a request was answered by a mixture of two versions: pause requests in begin_update"
                )

    def test_requests_and_updates_at_the_same_time(self) -> None:
        """Requests and updates that follow each other do not keep each other waiting for long."""
        over = threading.Event()

        def generate_until_over() -> None:
            while not over.is_set():
                self.generate(link.engine.engine)

        with self.connected() as link:
            self.generate(link.engine.engine)
            generating = call_in_thread("engine", generate_until_over)
            try:
                for version in range(1, SEVERAL_UPDATES):
                    change(link.source, version)
                    link.sender.send()
                    self.require_equal(link, version)
            finally:
                over.set()
            generating.result(self.limit)

    def test_no_request_sees_an_update_that_failed(self) -> None:
        """After a failure, requests fail or wait until an update succeeds, or the old weights answer."""
        with self.connected() as link:
            engine = link.engine.engine
            before = self.generate(engine)
            change(link.source, 1)
            self.fail_once(link, "last weight")
            request = call_in_thread("engine", partial(self.generate, engine))
            wait([request], self.moment)
            if request.done() and request.exception() is None and request.result() != before:
                pytest.fail("a request was answered after an update had failed: refuse it until one succeeds")
            self.update(link)
            wait([request], self.limit)  # its error, if any, was allowed
            assert request.done(), "a request that arrived after a failure got neither an answer nor an error"
            assert self.generate(engine) != before, "the engine answers by the weights before the failure"

    # -- steps -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def connected(
        self, encoding: str = "bucket", engine: Watched | None = None, source: Any = None
    ) -> Iterator[Link]:
        """Return a context manager that connects an engine, by default a new one, with a trainer."""
        source = self.make_source() if source is None else source
        engine = Watched(self.make_engine()) if engine is None else engine
        strategy = WeightStrategy("state_dict", encoding=encoding_of(encoding, source))
        sender = MemoryWeightSyncScheme(strategy, timeout=self.limit, connect_timeout=self.limit)
        receiver = copy.copy(sender)
        with sender, receiver:
            sender.init_on_sender(model=source, num_workers=1)
            receiver.init_on_receiver(model=engine, worker_idx=0)
            joining = call_in_thread("engine", receiver.connect)
            try:
                sender.connect()
            finally:
                wait([joining], self.limit)
            joining.result(0)
            yield Link(sender, receiver, engine, source)

    def update(self, link: Link) -> None:
        """Change all weights of the trainer, and send them."""
        change(link.source, 100 + (link.receiver.version or 0))
        self.require_equal(link, link.sender.send().version)

    def fail_once(self, link: Link, place: str) -> None:
        """Send an update that fails; check that both sides have no version then."""
        count = len(self.expected(link))
        at = {"first weight": 0, "last weight": count - 1, "finish": "finish"}[place]
        engine, failed = link.engine, threading.Event()

        def fail(here: int | str) -> None:
            if here == at and not failed.is_set():
                failed.set()
                raise OSError("an error of the test")

        engine.before = fail
        text = ""
        try:
            link.sender.send()
            pytest.fail(f"{engine.calls[-2]}() returned, though its iterator had raised an error")
        except SyncFailedError as error:
            text = str(error)
        assert "an error of the test" in text, f"another error than that of the iterator: {text}"
        assert engine.calls[-1] == "abort_update"
        assert engine.abort_error is None, f"abort_update() raised {engine.abort_error!r}"
        assert (link.receiver.version, link.sender.worker_versions) == (None, {0: None})

    def expected(self, link: Link) -> dict[str, torch.Tensor]:
        """Return copies of the trainer's weights, in the dtypes of the engine."""
        dtypes = link.engine.dtypes
        given = WeightStrategy("state_dict").named(link.source).tensors
        return {
            name: value.detach().to(dtypes.get(name, value.dtype), copy=True) for name, value in given.items()
        }

    def require_equal(self, link: Link, version: int, when: str = "") -> None:
        """Check that the engine has the weights of the trainer, and that both sides know of ``version``."""
        assert link.engine.calls[-1] == "finish_update"
        assert (link.receiver.version, link.sender.worker_versions) == (version, {0: version})
        self.require_weights(link, f"after version {version} {when}")

    def require_weights(self, link: Link, when: str) -> None:
        """Check that the engine has the weights of the trainer."""
        expected = fingerprint(self.expected(link))
        found = fingerprint(dict(self.read_weights(link.engine.engine)))
        wrong = sorted(
            name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
        )
        if wrong:
            text = "\n".join(f"{name}: {found.get(name)}, not {expected.get(name)}" for name in wrong)
            pytest.fail(
                f"the engine has other weights than the trainer {when.strip()}. Does it keep a tensor "
                f"that is no longer valid?\n{text}"
            )


def change(source: nn.Module, seed: int) -> None:
    """Write new finite numbers into every tensor of ``source``."""
    scramble(source, 7000 + seed, finite=True)  # a user's source may have a small seed


def numbers_of(source: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of ``source`` to which 1 can be added in float64."""
    state = WeightStrategy("state_dict").named(source).tensors
    return {
        name: weight.detach()
        for name, weight in state.items()
        if weight.numel() and weight.dtype is not torch.bool and not weight.is_complex()
    }


def require_expected_weights(engine: InferenceEngine) -> Mapping[str, torch.Tensor]:
    """Return the weights that an engine expects; skip the test if it takes any."""
    expected = engine.expected_weights()
    if expected is None:
        pytest.skip("expected_weights() is None: the engine takes any weights")
    return expected


def encoding_of(name: str, source: object) -> Encoding | str:
    """Return an encoding of this name; buckets are small enough that ``source`` needs several."""
    if name != "bucket":
        return name
    nbytes = sum(value.nbytes for value in WeightStrategy("state_dict").named(source).tensors.values())
    return BucketEncoding(bucket_size=max(nbytes // 5 // 64 * 64, 64))
