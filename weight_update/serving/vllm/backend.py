"""The backend ``weight_update`` of vLLM's workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.config import WeightTransferConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weight_update.errors import undo_on_error
from weight_update.schemes.base import WeightSyncScheme
from weight_update.serving.vllm.joining import PauseMode, receiving_scheme
from weight_update.serving.vllm.loader import ModelLoader
from weight_update.serving.vllm.receiving import LeadingCalls, VLLMReceiver
from weight_update.serving.vllm.turns import Turns

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Facts that workers need to join a sender; :func:`~weight_update.serving.vllm.init_info` makes it."""

    scheme: str
    address: str
    token: str
    port: int = 0
    timeout: float = 60.0
    connect_timeout: float = 120.0
    first_worker: int = 0
    in_chunks: bool = False
    control: str | None = None
    pause: PauseMode = "wait"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Update that workers are to load.

    Attributes:
        version: its number; None for the next one, if there is a single worker.
        timeout: seconds to wait for it; None takes that of the scheme.
    """

    version: int | None = None
    timeout: float | None = None


class VLLMBackend(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Makes a worker of vLLM a receiver: ``--weight-transfer-config '{"backend": "weight_update"}'``.

    vLLM's calls have these effects:

    - ``init_weight_transfer_engine``: the worker joins the sender and loads its weights. A worker that has
      joined already leaves its sender first.
    - ``update_weights``: the worker loads updates until it has the version that the call names.
    - ``start_weight_update``, ``finish_weight_update``: none.
    - ``shutdown_weight_transfer_engine``: the worker leaves the sender.

    Updates that arrive wait for ``update_weights``, because all workers of a model must change between the
    same two steps.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.loader = ModelLoader(model, vllm_config.model_config, device)
        self.scheme: WeightSyncScheme | None = None
        self._turns = Turns()

    @property
    def version(self) -> int | None:
        """Version in force; None before the first, and after an update that failed."""
        return self._turns.version

    @property
    def rank(self) -> int:
        """Rank of this worker among all workers of the server, over its replicas."""
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        self._turns = Turns()
        calls = None
        if init_info.control is not None and self.rank == 0:
            calls = LeadingCalls(init_info.control, init_info.pause, init_info.timeout)
        engine = VLLMReceiver(self.loader, self._turns, in_chunks=init_info.in_chunks, calls=calls)
        scheme = receiving_scheme(vars(init_info))
        scheme.init_on_receiver(model=engine, worker_idx=init_info.first_worker + self.rank)
        self.scheme = scheme
        with undo_on_error(self.shutdown), set_current_vllm_config(self.vllm_config), self._turns.inline():
            scheme.connect()

    def start_weight_update(self) -> None:
        """Do nothing: whether weights are loaded as a whole is known when an update has come."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        scheme = self.scheme
        if scheme is None:
            raise RuntimeError("this worker has no sender; call init_weight_transfer_engine() first")
        if update_info.version is None and self.parallel_config.world_size > 1:
            raise ValueError(
                'several workers must load the same version: name it, update_weights({"version": n})'
            )
        timeout = scheme.timeout if update_info.timeout is None else update_info.timeout
        # receive() raises if the sender is gone
        self._turns.serve(update_info.version, timeout, lambda: scheme.receive(0))

    def finish_weight_update(self) -> None:
        """Do nothing: a version is in force when it is loaded."""

    def shutdown(self) -> None:
        scheme, self.scheme = self.scheme, None
        self._turns.close()
        if scheme is not None:
            scheme.shutdown()
