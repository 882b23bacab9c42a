"""The collector of one process, which also runs inside each worker of the other collectors."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torchrl.collectors
from tensordict import TensorDictBase
from torch import nn

from collectors.backends import BackendChoice
from collectors.in_process import apply_all, receive_here
from collectors.policy_call import PolicyCall
from collectors.requests import Request, find_model, group_once, own, real, require_ours, require_unowned
from collectors.updates import Updates, close_all
from collectors.updating import Updating
from collectors.versions import (
    KEY,
    FrameVersion,
    VersionSource,
    choose_tracking,
    in_policy,
    policy_scheme,
    stamp,
    stamp_outcomes,
    unstamp_outcomes,
    writes_version,
)
from collectors.weight_update import make_updater
from weight_update import (
    Gate,
    LifecycleError,
    MemoryWeightSyncScheme,
    NothingToSendError,
    SyncReport,
    UnknownWorkerError,
    UnsupportedSourceError,
    WeightSyncScheme,
)

_EXIT_SECONDS = 10.0  # an environment may hang


class Collector(Updating, torchrl.collectors.Collector, metaclass=BackendChoice):
    """TorchRL's ``Collector``, whose data has the exact version of the policy that made each frame.

    Args:
        policy: as in TorchRL. With a scheme for it or a part of it, the collector runs a copy, which changes
            only when ``update_policy_weights_`` is called. Without a scheme, and without a device of its own,
            it runs the given module itself. Modules in it with a method ``mark_weight_update()`` keep results
            of their weights, such as a cache of keys and values: the method is called before the first call
            of the policy after each update.
        track_policy_version: whether to write the version into ``"policy_version"`` and ``("next",
            "policy_version")``, as int64 of the shape of the batch. A policy that writes that key itself is
            left alone. None means True, or False if ``replay_buffer`` already has frames without a version
            of int64.
        weight_sync_schemes: schemes by model id. A scheme that is not initialized gets its receiver in this
            process, whatever its transport. An initialized scheme belongs to its owner and is only connected;
            one of another collector is refused.
        weight_updater: legacy updater, instead of schemes. One of ``collectors`` sends by a
            :class:`~weight_update.MemoryWeightSyncScheme`.
        options: all other options of TorchRL's ``Collector``.
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        track_policy_version: Any = None,
        weight_sync_schemes: dict[str, WeightSyncScheme] | None = None,
        weight_updater: Any = None,
        **options: Any,
    ) -> None:
        self._updates = Updates()
        adapter, updater = make_updater(weight_updater, weight_sync_schemes, policy)
        if adapter is not None and (isinstance(policy, nn.Module) or options.get("policy_factory")):
            weight_sync_schemes = {"policy": MemoryWeightSyncScheme()}
        require_unowned(weight_sync_schemes or {})
        self._gate = Gate()
        self._versions = VersionSource()
        self._here = {
            model_id: scheme
            for model_id, scheme in (weight_sync_schemes or {}).items()
            if not scheme.initialized_on_sender
        }
        self._source: Any = None
        self._installed: dict[str, WeightSyncScheme] | None = None  # the receivers it knows of
        self.env: Any
        self._policy_output_keys: Any
        self.policy_version_tracker: Any
        super().__init__(
            create_env_fn,
            policy,
            track_policy_version=choose_tracking(track_policy_version, options.get("replay_buffer")),
            weight_sync_schemes=weight_sync_schemes,
            weight_updater=updater,
            **options,
        )
        if self._stamps:  # not before: TorchRL may have wrapped the environment
            stamp_outcomes(self.env)
        if adapter is not None:
            self.weight_updater = adapter

    # -- versions ----------------------------------------------------------------------------------

    @property
    def policy_version(self) -> Any:
        """The version in force (of the policy's receiver, or else the number of updates)."""
        if self._has_foreign_tracker:
            return self.policy_version_tracker.version
        return self._versions.now()

    def _newest_version(self) -> int | None:
        newest = super()._newest_version()
        return self.policy_version if newest is None else newest

    def increment_version(self) -> None:
        """Count an update; does nothing with a scheme, which counts its own versions."""
        if self._has_foreign_tracker:
            super().increment_version()
        self._versions.count += 1

    def state_dict(self) -> Any:
        """Return a copy of the state: environment, policy, and the version of just these weights."""
        with self._no_update():
            return _copied(super().state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Load a ``state_dict``: environment, policy and policy version.

        The policy keeps the loaded weights until the next update, which gets a number above the restored
        version.
        """
        version = state_dict.get(KEY) if self._stamps else None
        with self._no_update():
            super().load_state_dict(state_dict, **kwargs)
            if version is None:
                return
            self._versions.restore(int(version))
        self._updates.continue_from(int(version))

    @contextmanager
    def _no_update(self) -> Iterator[None]:
        """Keep all updates out; raise LifecycleError if this collector was shut down."""
        self._updates.require_open()
        with ExitStack() as stack:
            for scheme in self._connected().values():
                stack.enter_context(scheme.hold())
            stack.enter_context(self._gate.hold())
            yield

    def _set_received_policy_version(self, model_version: int | None) -> None:
        super()._set_received_policy_version(model_version)
        if model_version is not None:  # of a learner that has just connected
            self._versions.restore(model_version)

    @property
    def _stamps(self) -> bool:
        return isinstance(self.policy_version_tracker, FrameVersion)

    @property
    def _has_foreign_tracker(self) -> bool:
        """Whether the caller gave a version transform, as TorchRL allows."""
        return self.policy_version_tracker is not None and not self._stamps

    def _setup_policy_version_tracking(self, track_policy_version: Any) -> None:
        if track_policy_version is True:
            self.policy_version_tracker = None if writes_version(self._source) else FrameVersion()
        else:
            super()._setup_policy_version_tracking(track_policy_version)

    def _should_use_random_frames(self) -> bool:
        random = bool(super()._should_use_random_frames())
        if random and self._stamps:
            stamp(self._carrier, self._versions.now())  # TorchRL asks before each frame: no policy will run
        return random

    # -- the policy --------------------------------------------------------------------------------

    def get_model(self, model_id: str) -> Any:
        """Return a model, as in TorchRL."""
        return find_model(super().get_model, model_id)

    def _init_policy(self, policy: Any, *args: Any, **kwargs: Any) -> Any:
        policy = super()._init_policy(policy, *args, **kwargs)
        self._source = policy
        if any(map(self._copies_policy, real(self._here))) and isinstance(policy, nn.Module):
            return copy.deepcopy(policy)
        return policy

    def _copies_policy(self, model_id: str) -> bool:
        """Return whether the collector runs a copy of the policy if this model has a scheme."""
        return in_policy(model_id)

    def _compile_wrapped_policy(self, policy: Any) -> Any:
        return policy  # it is compiled when its receivers are known: see _install_policy_call

    def _maybe_make_final_rollout(self, make_rollout: bool) -> None:
        super()._maybe_make_final_rollout(make_rollout)
        if not self._stamps:
            return
        self._policy_output_keys = [*(key for key in self._policy_output_keys if key != KEY), KEY]
        if make_rollout:
            for frames in (self._final_rollout, self._final_rollout["next"]):
                stamp(frames, 0)

    def rollout(self) -> TensorDictBase | None:
        """Collect a batch, as in TorchRL."""
        self._install_policy_call()
        rollout: TensorDictBase | None = super().rollout()
        return rollout

    def _connected(self) -> dict[str, WeightSyncScheme]:
        """Return the receivers that get updates."""
        return {
            key: one for key, one in real(self._updates.receivers).items() if one.synchronized_on_receiver
        }

    def _install_policy_call(self) -> None:
        """Have the policy called with the receivers that are connected now, if these have changed."""
        schemes = self._connected()
        if schemes == self._installed:
            return
        policy, versions = self._wrapped_policy_uncompiled, self._versions
        parts = [scheme for model_id, scheme in schemes.items() if in_policy(model_id)]
        compiled = self.compiled_policy or self.cudagraphed_policy
        self._wrapped_policy_maybe_compiled = PolicyCall(
            policy,
            super()._compile_wrapped_policy(policy) if compiled else policy,
            gate=self._gate,
            schemes=schemes.values(),
            unhooked=parts if compiled else [],
            version=versions.now if self._stamps else None,
            updates=lambda: [versions.count, *(scheme.version for scheme in parts)],
        )
        self._installed = schemes

    # -- receiving ---------------------------------------------------------------------------------

    def register_scheme_receiver(
        self, weight_recv_schemes: dict[str, WeightSyncScheme], *, synchronize_weights: bool = True
    ) -> None:
        """Register receivers as in TorchRL; they must be schemes of ``weight_update``.

        Raises:
            LifecycleError: the policy is captured in a CUDA graph, but a connected scheme changes the memory
                of its parameters.
        """
        require_ours(weight_recv_schemes)
        if self.cudagraphed_policy or captures(self.compiled_policy_kwargs):
            self._keep_addresses(real(weight_recv_schemes))
        super().register_scheme_receiver(weight_recv_schemes, synchronize_weights=synchronize_weights)
        self._add_receivers(weight_recv_schemes)

    def _keep_addresses(self, schemes: Mapping[str, WeightSyncScheme]) -> None:
        """Have schemes keep the addresses of parameters; ``torch.compile`` itself notices that they moved."""
        for model_id, scheme in schemes.items():
            if not scheme.synchronized_on_receiver:
                scheme.stable_addresses = True
            elif self.cudagraphed_policy and not scheme.stable_addresses:
                raise LifecycleError(
                    f"the scheme of {model_id!r} moves parameters that a CUDA graph has captured; make it "
                    "with stable_addresses=True"
                )

    def _add_receivers(self, receivers: Mapping[str, WeightSyncScheme]) -> None:
        self._updates.receivers.update(receivers)
        self._versions.scheme = policy_scheme(self._updates.receivers)

    def receive_weights(self, policy_or_weights: Any = None, **named: Any) -> None:
        """Receive weights as in TorchRL; given weights are checked, and applied completely or not at all."""
        if self._updates.receivers or (policy_or_weights is None and not named):
            super().receive_weights(policy_or_weights, **named)
        else:
            self.update_policy_weights_(policy_or_weights, **named)

    def _setup_weight_sync(
        self, weight_updater: Any, weight_sync_schemes: dict[str, WeightSyncScheme] | None
    ) -> None:
        group_once(self._here.values())
        own(self._here.values())
        self._updates.schemes = dict(self._here)  # they end with this collector, also if it cannot be made
        for model_id, scheme in self._here.items():
            if self.cudagraphed_policy or captures(self.compiled_policy_kwargs):
                scheme.stable_addresses = True
            model = self.get_model(model_id)
            if model_id == "policy" and real({model_id: scheme}) and not isinstance(model, nn.Module):
                raise TypeError(
                    f"'policy' of {type(self).__name__} is of type {type(model).__name__}, not an nn.Module; "
                    "policies without parameters need no scheme"
                )
            source: Any = model
            if in_policy(model_id):
                given: Any = SimpleNamespace(policy=self._source)
                source = torchrl.collectors.Collector.get_model(given, model_id)
            self._add_receivers({model_id: receive_here(scheme, model_id, source, model)})
        self._updates.schemes = dict(weight_sync_schemes or {})
        super()._setup_weight_sync(weight_updater, weight_sync_schemes)

    def _update_by_legacy(self, request: Request) -> SyncReport | None:
        report = super()._update_by_legacy(request)
        if report is None and not self._updates.schemes:  # nothing else counts this update
            self.increment_version()
        return report

    def _update_without_scheme(self, request: Request) -> SyncReport | dict[str, SyncReport]:
        """Apply weights to the models of this collector itself."""
        if request.worker_ids not in (None, 0, [0]):
            raise UnknownWorkerError(
                f"this collector has one process, so worker_ids is None, 0 or [0], not {request.worker_ids!r}"
            )
        start, began = time.perf_counter(), time.time()
        models = {model_id: _module(model_id, self.get_model(model_id)) for model_id in request.weights}
        weights = {
            model_id: _known(model_id, self._source) if given is None else given
            for model_id, given in request.weights.items()
        }
        moving = {model_id: model for model_id, model in models.items() if weights[model_id] is not model}

        def count() -> None:
            if any(map(in_policy, models)):
                self.increment_version()

        def apply() -> None:
            apply_all(moving, weights)
            count()

        if moving:
            with ExitStack() as stack:
                for scheme in real(self._updates.receivers).values():
                    stack.enter_context(scheme.hold())
                self._gate.run(apply)
        else:  # the collector runs the given module itself, which its owner has changed
            count()
        seconds = {"apply": time.perf_counter() - start}
        report = SyncReport(self._versions.now(), "local", seconds=seconds, began=began)
        return dict.fromkeys(models, report) if request.several else report

    # -- end ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Collect in a thread, as in TorchRL.

        When the interpreter exits, it ends: PyTorch aborts a process whose threads run until then.
        """
        super().start()
        self._end_later()

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut down as in TorchRL, which waits for the thread of :meth:`start` again, without ``timeout``."""
        self.shutdown(timeout=timeout, close_env=close_env)

    def _end_at_exit(self) -> None:
        self.shutdown(timeout=_EXIT_SECONDS, raise_on_error=False)

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Shut down as in TorchRL, and end the schemes of this collector."""
        self._updates.begin_end()
        env = vars(self).get("env")  # TorchRL's deletes it, when the thread of start() has ended
        end = partial(super().shutdown, timeout=timeout, close_env=close_env, raise_on_error=raise_on_error)
        close_all(end, partial(unstamp_outcomes, env), self._end_schemes)


def _copied(state: Any) -> Any:
    """Return a state_dict with copies of its tensors."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if not isinstance(state, dict):
        return state
    copied = copy.copy(state)  # with the _metadata of a module's state_dict
    copied.update((key, _copied(value)) for key, value in state.items())
    return copied


def _module(model_id: str, model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UnsupportedSourceError(f"{model_id!r} is of type {type(model).__name__}, which has no weights")
    return model


def _known(model_id: str, policy: Any) -> Any:
    """Return the weights to apply where none were given."""
    if model_id != "policy":
        raise NothingToSendError(f"give the weights of {model_id!r}; only those of the policy are known")
    return policy


def captures(compile_policy: Any) -> bool:
    """Return whether these options of ``torch.compile`` record CUDA graphs, which fix the addresses."""
    return isinstance(compile_policy, Mapping) and (
        compile_policy.get("mode") in ("reduce-overhead", "max-autotune")
        or (compile_policy.get("options") or {}).get("triton.cudagraphs", False)
    )
