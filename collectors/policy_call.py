"""Calls of the policy, each with one version of all weights, whose number is written into the data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDictBase
from torch import nn

from collectors.substitute import Substitute
from collectors.versions import stamp
from weight_update import Gate, WeightSyncScheme

Policy = Callable[[TensorDictBase], TensorDictBase]


@runtime_checkable
class _KeepsResults(Protocol):
    """A module that keeps results of its weights, such as a cache of keys and values.

    TorchRL's collectors after 0.14 call its method after each update, and so do these ones.
    """

    def mark_weight_update(self) -> None:
        """Drop the results."""


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
        updates: function that returns the versions of all parts of the policy. When these have changed,
            ``mark_weight_update()`` of the modules that have it is called before the policy.
    """

    def __init__(
        self,
        policy: Any,
        run: Policy,
        *,
        gate: Gate,
        schemes: Iterable[WeightSyncScheme],
        unhooked: Collection[WeightSyncScheme],
        version: Callable[[], int] | None,
        updates: Callable[[], list[int | None]],
    ) -> None:
        super().__init__(policy)
        self._run, self._gate, self._version, self._updates = run, gate, version, updates
        modules = policy.modules() if isinstance(policy, nn.Module) else ()
        # by class, because a TensorDictModule has the methods of its module as well
        self._told: list[Any] = [module for module in modules if issubclass(type(module), _KeepsResults)]
        self._seen: list[int | None] | None = None
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
        self._tell_of_updates()
        version = None if self._version is None else self._version()
        output = self._run(data)
        if version is not None:
            stamp(output, version)
        return output

    def _tell_of_updates(self) -> None:
        """Call ``mark_weight_update()`` of modules if the weights have changed since the last call."""
        if not self._told:
            return
        updates = self._updates()
        if updates != self._seen:
            self._seen = updates
            for module in self._told:
                module.mark_weight_update()
