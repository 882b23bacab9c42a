"""Common parts of the tests of schemes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from torch import nn

from weight_update.schemes import WeightSyncScheme
from weight_update.testing.models import fingerprint, mlp
from weight_update.testing.worker_processes import WorkerProcesses, start_workers
from weight_update.testing.workers import Method

Assemble = Callable[..., WorkerProcesses]


class SchemeCase:
    """A base class that builds a sender and its workers."""

    method: Method = "fork"

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        """Return a new scheme; ``options`` are options of WeightSyncScheme."""
        raise NotImplementedError(
            f"write {type(self).__name__}.make_scheme(self, **options): it returns a new scheme"
        )

    @pytest.fixture
    def assemble(self) -> Iterator[Assemble]:
        """Return a function that builds a :class:`WorkerProcesses`, which is closed after the test.

        Its arguments: ``source``, the sender's model; ``models``, one for each worker; ``options`` of the
        scheme; ``connect``, whether to; all others go to ``init_on_sender``.
        """
        with ExitStack() as stack:

            def build(
                source: Any = None,
                models: Sequence[Any] | None = None,
                options: dict[str, Any] | None = None,
                connect: bool = True,
                **init: Any,
            ) -> WorkerProcesses:
                models = [mlp(100), mlp(101)] if models is None else models
                scheme = self.make_scheme(**{"timeout": 20.0, "connect_timeout": 30.0, **(options or {})})
                if source is not None:
                    init["model"] = source
                procs = start_workers(scheme, models, self.method, connect=connect, **init)
                return stack.enter_context(procs)

            yield build


def assert_equal(procs: WorkerProcesses, *expected: nn.Module) -> None:
    """Assert that every worker has exactly the weights of its model, or all of the only model."""
    strategy = procs.scheme.strategy
    models = expected * len(procs.workers) if len(expected) == 1 else expected
    assert procs.ask("fingerprint") == [fingerprint(model, strategy) for model in models]
