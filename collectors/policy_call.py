"""Calls of the policy, each with one version of all weights, whose number is written into the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from tensordict import TensorDictBase

from collectors.substitute import Substitute
from collectors.versions import stamp
from weight_update import Gate, WeightSyncScheme

Policy = Callable[[TensorDictBase], TensorDictBase]


class PolicyCall(Substitute):
    """A substitute for the policy of a collector.

    Args:
        policy: object for attribute lookup.
        run: function to call: ``policy`` itself, compiled, or captured.
        gate: gate that is held during each call.
        schemes: receivers that are held during each call.
        unhooked: receivers among ``schemes`` whose hooks on the model are removed, because ``run`` cannot
            contain them; this object holds them instead.
        version: function that returns the version in force; None to write no version.
    """

    def __init__(
        self,
        policy: Any,
        run: Policy,
        *,
        gate: Gate,
        schemes: Iterable[WeightSyncScheme],
        unhooked: Iterable[WeightSyncScheme],
        version: Callable[[], int] | None,
    ) -> None:
        super().__init__(policy)
        self._run, self._gate, self._version = run, gate, version
        unhooked = list(unhooked)
        self._schemes = [scheme for scheme in schemes if scheme not in unhooked]
        self._held: Policy = self._stamped
        for scheme in unhooked:
            self._held = scheme.guarded(self._held)

    def __call__(self, data: TensorDictBase) -> TensorDictBase:
        """Run the policy on ``data`` of shape ``(*env.batch_size,)``."""
        with ExitStack() as stack:
            for scheme in self._schemes:
                stack.enter_context(scheme.hold())
            stack.enter_context(self._gate.hold())
            return self._held(data)

    def _stamped(self, data: TensorDictBase) -> TensorDictBase:
        version = None if self._version is None else self._version()
        output = self._run(data)
        if version is not None:
            stamp(output, version)
        return output
