"""The scheme for TorchRL's RayModuleTransform: a transform whose module is in an actor of its own."""

from __future__ import annotations

from typing import Any

from typing_extensions import Unpack

from weight_update.errors import LifecycleError, SyncFailedError, WorkerError
from weight_update.schemes.options import RayOptions, takes_options_of
from weight_update.schemes.ray import RayWeightSyncScheme
from weight_update.schemes.sender_side import SenderSide
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.ray.rendezvous import is_done, require_ray, result_of, running_ray


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Scheme that updates the module inside a TorchRL ``RayModuleTransform``; the sender drives both sides.

    ::

        scheme = RayModuleTransformScheme(model=reward_model)
        transform = RayModuleTransform(module_factory=make_module, weight_sync_scheme=scheme)
        ...
        scheme.send()              # or send(weights), where no model was given

    The transform calls :meth:`init_on_sender` and ``connect()`` itself.

    All other arguments are those of :class:`RayWeightSyncScheme`.

    Args:
        model: module that ``send()`` reads. Without one, the module in the actor keeps its own weights as
            version 0 (they are fetched once, to learn their schema), and ``send(weights)`` needs weights.
    """

    @takes_options_of(RayWeightSyncScheme.__init__)
    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        backend: str = "gloo",
        sync: bool = True,
        *,
        model: Any = None,
        **options: Unpack[RayOptions],
    ) -> None:
        super().__init__(strategy, backend, sync, **options)
        self._source: Any = model

    def _reset(self) -> None:
        super()._reset()
        self._source = None
        self._actor: Any = None
        self._borrowed = False

    def _set_transform(self, transform: Any) -> None:
        """Note the actor of the transform; TorchRL's transform calls this."""
        self._actor = transform._actor

    def init_on_sender(  # type: ignore[override]  # one worker and one model: there is nothing else to choose
        self,
        *,
        ray_transform: Any = None,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
    ) -> None:
        """Initialize the sender, which serves one worker: the actor of the transform.

        ``ray_transform`` is needed only if the scheme was not given to the transform. ``send()`` reads
        ``model`` instead of the scheme's, if it is given.

        Raises:
            LifecycleError: the scheme has no transform, or is initialized already.
        """
        if ray_transform is not None:
            self._set_transform(ray_transform)
        if self._actor is None:
            raise LifecycleError(
                "this scheme has no transform: give it to RayModuleTransform(weight_sync_scheme=...), or "
                "call init_on_sender(ray_transform=...)"
            )
        ray = require_ray()
        model = self._source if model is None else model
        self._borrowed = model is None
        if self._borrowed:
            model = ray.get(self._actor._getattr.remote("module"), timeout=self.connect_timeout)
        super().init_on_sender(
            model_id=model_id, context=context, model=model, remote_collectors=[self._actor]
        )

    @takes_options_of(RayWeightSyncScheme.init_on_receiver)
    def init_on_receiver(self, *, context: Any = None, model: Any = None, **options: Any) -> None:
        """Initialize the receiver in the actor; the transform is the context, and the only worker."""
        if model is None and context is not None:
            model = context.module
        options["worker_idx"] = options.get("worker_idx") or 0
        super().init_on_receiver(context=context, model=model, **options)

    def _connect_sender(self, side: SenderSide, weights: Any, limit: float) -> None:
        call = self._actor._init_weight_sync_scheme.remote(scheme=self, model_id=self.model_id)
        self.worker_alive = lambda _: _error_of(call) is None
        try:
            super()._connect_sender(side, weights, limit)
        except SyncFailedError:
            theirs = _error_of(call)
            if theirs is None:
                raise
            raise WorkerError(f"the transform's actor could not connect: {theirs}") from theirs
        require_ray().get(call, timeout=limit)
        if self._borrowed:
            side.sources.by_worker[0] = None  # the actor has these weights; they must not be sent to it again


def _error_of(call: Any) -> Exception | None:
    """Return the exception of a call of an actor; None if it has raised none so far.

    Raises:
        LinkClosedError: Ray was shut down in this process.
    """
    errors = running_ray().exceptions
    try:
        if is_done(call, 0.0):
            result_of(call)
    except errors.RayError as error:
        return error  # type: ignore[no-any-return]
    return None
