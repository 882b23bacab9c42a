"""Contract of schemes: from initialization to the first weights."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from weight_update.errors import (
    LifecycleError,
    NothingToSendError,
    SchemaMismatchError,
    SyncFailedError,
    SyncTimeoutError,
    TransportError,
    UnsupportedSourceError,
)
from weight_update.report import SyncReport
from weight_update.testing.cases import Assemble, SchemeCase, assert_equal
from weight_update.testing.models import Zoo, fingerprint, mlp, scramble
from weight_update.testing.worker_processes import WorkerProcesses, context_of
from weight_update.testing.workers import flags_of


class Context:
    """The least that a scheme needs to know a model and its workers."""

    num_workers = 2

    def __init__(self, model: nn.Module) -> None:
        self.policy = model


class JoiningTests(SchemeCase):
    """Tests of ``init_on_sender``, ``init_on_receiver`` and ``connect``."""

    def test_first_weights(self, assemble: Assemble) -> None:
        """``connect`` gives version 0, bit for bit, and its report."""
        source = Zoo(1)
        procs = assemble(source, [Zoo(2), Zoo(3)])
        assert_equal(procs, source)
        assert procs.ask("version") == [0, 0]
        assert procs.scheme.version == 0
        assert procs.scheme.worker_versions == {0: 0, 1: 0}
        assert isinstance(procs.scheme.last_report, SyncReport)
        assert procs.scheme.last_report.version == 0

    def test_nothing_happens_before_connect(self, assemble: Assemble) -> None:
        """Initialization is local: workers keep their weights, and no version exists."""
        procs = assemble(mlp(1), connect=False)
        assert_equal(procs, mlp(100), mlp(101))
        assert procs.ask("version") == [None, None]
        assert procs.scheme.version is None
        assert procs.ask("flags") == [state("receiver", connected=False)] * 2
        procs.connect()
        assert procs.ask("flags") == [state("receiver", connected=True)] * 2
        assert flags_of(procs.scheme) == state("sender", connected=True)

    def test_weights_are_read_at_connect(self, assemble: Assemble) -> None:
        """Changes that the trainer makes between initialization and ``connect`` are in the first weights."""
        source = mlp(1)
        procs = assemble(source, connect=False)
        scramble(source, 2)
        procs.connect()
        assert_equal(procs, source)

    def test_first_weights_given_to_connect(self, assemble: Assemble) -> None:
        """``connect(weights=...)`` takes the place of the source, once."""
        procs = assemble(mlp(1), connect=False)
        procs.connect(weights=mlp(5))
        assert_equal(procs, mlp(5))
        procs.scheme.send()
        assert_equal(procs, mlp(1))

    @pytest.mark.parametrize("kind", ["tensordict", "dict", "callable"])
    def test_other_sources(self, assemble: Assemble, kind: str) -> None:
        """``weights=`` takes a TensorDict, a dict or a callable, live."""
        source = mlp(1)
        readers: dict[str, Callable[[Any], Any]] = {
            "tensordict": TensorDict.from_module,
            "dict": lambda model: dict(model.named_parameters()),
            "callable": lambda model: lambda: model,
        }
        procs = assemble(weights=readers[kind](source))
        assert_equal(procs, source)
        scramble(source, 2)
        procs.scheme.send()
        assert_equal(procs, source)

    def test_context(self, assemble: Assemble) -> None:
        """A context names model and workers; only a weak reference to it is kept."""
        source = mlp(1)
        context = Context(source)
        procs = assemble(context=context, model_id="policy")
        assert_equal(procs, source)
        assert procs.scheme.context is context
        context.policy = mlp(3)
        procs.scheme.send()
        assert_equal(procs, mlp(3))
        del context
        gc.collect()
        with pytest.raises(NothingToSendError):
            procs.scheme.send()
        assert procs.scheme.version == 1
        procs.scheme.send(mlp(4))
        assert_equal(procs, mlp(4))

    def test_params_map(self, assemble: Assemble) -> None:
        """Each worker has weights of its own."""
        sources = {0: mlp(1), 1: mlp(2)}
        procs = assemble(params_map=sources)
        assert_equal(procs, mlp(1), mlp(2))
        scramble(sources[1], 7)
        procs.scheme.send()
        assert_equal(procs, sources[0], sources[1])

    def test_device_map_fn(self, assemble: Assemble) -> None:
        """The function makes what each worker gets, at each update."""
        source = mlp(1)
        procs = assemble(source, device_map_fn=times_index)
        for version in range(3):
            procs.scheme.send()
            for index, found in enumerate(procs.ask("fingerprint")):
                assert found == fingerprint(times_index(index, source)), version
            scramble(source, version, finite=True)

    def test_devices(self, assemble: Assemble) -> None:
        """``devices`` gives the number of workers."""
        assert_equal(assemble(mlp(1), devices=["cpu", torch.device("cpu")]), mlp(1))

    def test_index_given_to_connect(self, assemble: Assemble) -> None:
        """A receiver may learn its index last."""
        procs = assemble(mlp(1), [], connect=False, num_workers=1, devices=["cpu"])
        worker = procs.hire(0, mlp(2), worker_idx=None)
        with pytest.raises(ValueError, match="worker_idx"):
            worker.call("connect")
        worker.post("connect", worker_idx=0)
        procs.scheme.connect()
        worker.answer()
        assert_equal(procs, mlp(1))

    def test_mismatch(self, assemble: Assemble) -> None:
        """Missing, unexpected and mis-shaped names are listed on both sides, which may try again."""
        bad = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2, bias=False), nn.Linear(1, 1))
        bad[0].bias = nn.Parameter(torch.zeros(1))  # of a shape that could be broadcast
        procs = assemble(mlp(1), [mlp(2), bad], connect=False)
        before = procs.workers[1].call("fingerprint")
        errors = procs.try_connect()
        for error in (errors[None], errors[1]):
            assert isinstance(error, SchemaMismatchError), error
            names = sorted(line.partition(":")[0] for line in error.problems)
            assert names == ["0.bias", "0.weight", "2.bias", "3.bias", "3.weight"]
        assert errors[0] is None
        assert procs.workers[1].call("fingerprint") == before
        try_again(procs)
        procs.scheme.send(mlp(4))
        assert_equal(procs, mlp(4))

    def test_a_model_that_cannot_take_weights(self, assemble: Assemble) -> None:
        """An error of a worker's own model reaches the sender at once; both may try again."""
        procs = assemble(mlp(1), [mlp(2), with_sparse_buffer()], connect=False)
        errors = procs.try_connect()
        assert isinstance(errors[1], UnsupportedSourceError), errors
        told = errors[None]
        assert isinstance(told, SyncFailedError), errors
        assert list(told.failures) == [1]
        assert "'odd' is a torch.sparse_coo tensor" in str(told)
        assert errors[0] is None
        try_again(procs)

    def test_the_own_error_comes_first(self, assemble: Assemble) -> None:
        """A worker that cannot join raises its own error, also if it cannot tell the sender."""
        procs = assemble(mlp(1), [with_sparse_buffer()], connect=False)
        procs.scheme.shutdown()
        with pytest.raises(UnsupportedSourceError, match="odd"):
            procs.workers[0].call("connect", timeout=0.5)

    def test_nobody_comes(self, assemble: Assemble) -> None:
        """A sender that waits in vain names the workers that did not join; all may try again."""
        procs = assemble(mlp(1), connect=False)
        with pytest.raises(SyncTimeoutError, match=r"\[0, 1\]"):
            procs.scheme.connect(timeout=0.3)
        procs.connect()
        assert_equal(procs, mlp(1))

    def test_receiver_waits_in_vain(self, assemble: Assemble) -> None:
        """A receiver whose sender does not connect gives up in time, and may try again."""
        procs = assemble(mlp(1), connect=False)
        with pytest.raises((SyncTimeoutError, TransportError)):
            procs.workers[0].call("connect", timeout=0.3)
        procs.connect()
        assert_equal(procs, mlp(1))

    def test_copies_are_fresh(self, assemble: Assemble) -> None:
        """The scheme that a worker gets knows options and addresses, and is not initialized."""
        procs = assemble(mlp(1), connect=False)
        fresh = copy.copy(procs.scheme)
        assert flags_of(fresh) == dict.fromkeys(flags_of(fresh), False)
        assert (fresh.timeout, fresh.strategy_str) == (20.0, procs.scheme.strategy_str)
        with pytest.raises(LifecycleError):
            fresh.send(mlp(1))

    @pytest.mark.parametrize(
        "arguments",
        [
            {"num_workers": 1},
            {"model": mlp()},
            {"model": mlp(), "num_workers": -1},
            {"model": mlp(), "weights": mlp(), "num_workers": 1},
            {"model": mlp(), "devices": ["cpu"], "num_workers": 2},
            {"model": mlp(), "devices": ["cpu"], "device_map_fn": lambda index, weights: weights},
            {"params_map": {}},
            {"params_map": {"policy": mlp()}},
            {"params_map": {0: mlp()}, "num_workers": 1},
            {"context": Context(mlp())},
        ],
        ids=lambda arguments: " ".join(arguments),
    )
    def test_contradicting_arguments(self, arguments: dict[str, Any]) -> None:
        """Too few or too many arguments are a ValueError, and the scheme can still be initialized."""
        with self.make_scheme() as scheme:
            with pytest.raises(ValueError, match=r"give|needs|maps|cannot|num_workers"):
                scheme.init_on_sender(**arguments)
            scheme.init_on_sender(model=mlp(), num_workers=1, ctx=context_of(self.method))
            assert scheme.initialized_on_sender

    def test_calls_out_of_order(self, assemble: Assemble) -> None:
        """Every call in the wrong state is a LifecycleError that says what to do."""
        scheme = self.make_scheme()
        for call in (scheme.connect, scheme.send, scheme.receive, scheme.send_async):
            with pytest.raises(LifecycleError, match="init_on_"):
                call()
        procs = assemble(mlp(1), connect=False)
        with pytest.raises(LifecycleError, match="connect"):
            procs.scheme.send()
        for init in (procs.scheme.init_on_receiver, procs.scheme.init_on_sender):
            with pytest.raises(LifecycleError, match="already"):
                init(model=mlp(1))
        with pytest.raises(LifecycleError):
            procs.scheme.connect(worker_idx=0)
        procs.connect()
        with pytest.raises(LifecycleError):
            procs.scheme.connect()
        for for_workers in (procs.scheme.receive, lambda: procs.scheme.hold().__enter__()):
            with pytest.raises(LifecycleError, match="this is the sender"):
                for_workers()
        with pytest.raises(LifecycleError):
            procs.scheme.apply_weights(mlp(1))
        with pytest.raises(LifecycleError):
            procs.workers[0].call("connect")


def try_again(procs: WorkerProcesses) -> None:
    """Give worker 1 a model that fits, and connect both sides again."""
    procs.workers[1].call("replace_model", mlp(3))
    procs.workers[1].post("connect")
    procs.scheme.connect()
    procs.workers[1].answer()
    assert_equal(procs, mlp(1))


def times_index(index: int, weights: Any) -> dict[str, torch.Tensor]:
    """Return ``weights`` multiplied by the index of the worker."""
    return {name: value.detach() * index for name, value in weights.named_parameters()}


def with_sparse_buffer() -> nn.Module:
    """Return a model that cannot take weights."""
    model = mlp(2)
    model.register_buffer("odd", torch.eye(3).to_sparse())
    return model


def state(end: str, *, connected: bool) -> dict[str, bool]:
    """Return the expected result of :func:`flags_of`."""
    here = {"initialized": True, "synchronized": connected}
    return {
        f"{done}_on_{at}": value and at == end
        for done, value in here.items()
        for at in ("sender", "receiver")
    }
