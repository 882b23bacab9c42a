"""The trainer's side of the backend, for programs written for vLLM's API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.distributed.weight_transfer import base

from weight_update.errors import SyncFailedError, undo_on_error
from weight_update.report import SyncReport
from weight_update.schemes.base import WeightSyncScheme
from weight_update.schemes.distributed import DistributedWeightSyncScheme
from weight_update.serving.vllm.control import update_in_session
from weight_update.serving.vllm.joining import connect_with, init_info
from weight_update.serving.vllm.plugin import BACKEND, register
from weight_update.strategy.strategy import WeightStrategy

_ANSWER_SECONDS = 5.0
"""Seconds that workers have to state why they did not load an update, after vLLM's answer."""

register()  # a trainer loads no plugins of vLLM


@dataclass
class TrainerInitInfo(base.TrainerInitInfo):
    """Takes the place of ``NCCLTrainerInitInfo``; nothing else of a program changes.

    Attributes:
        master_address: address of the trainer's interface, on which it listens.
        master_port: port on which it listens; 0 takes a free one.
        world_size: number of vLLM's workers, plus one.
        strategy: strategy of the scheme, such as one with ``encoding="patch"``.
        token: secret that workers must know; None makes one.
        timeout: seconds that an update may take.
        connect_timeout: seconds that workers may take to join.
        in_chunks: whether weights are loaded while their version arrives; not with ``max_in_flight``.
        scheme: another scheme, not initialized; address, port, strategy, token and timeouts are then its own.
        rank: rank of this process among the trainer's; rank 0 sends.
    """

    backend: ClassVar[str] = BACKEND

    master_address: str = "127.0.0.1"
    master_port: int = 0
    world_size: int = 2
    strategy: str | WeightStrategy = "state_dict"
    token: str | None = None
    timeout: float = 300.0
    connect_timeout: float = 300.0
    in_chunks: bool = False
    scheme: WeightSyncScheme | None = None

    def make_scheme(self) -> WeightSyncScheme:
        """Return the scheme, not initialized.

        Raises:
            ValueError: ``world_size`` is not a positive integer; or the strategy has ``max_in_flight``, with
                ``in_chunks``.
            TypeError: ``scheme`` is not a scheme.
        """
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ValueError(f"world_size is the number of vLLM's workers, plus one, not {self.world_size!r}")
        scheme = self.scheme
        if scheme is None:
            scheme = DistributedWeightSyncScheme(
                strategy=self.strategy,
                address=self.master_address,
                port=self.master_port,
                token=self.token,
                timeout=self.timeout,
                connect_timeout=self.connect_timeout,
            )
        elif not isinstance(scheme, WeightSyncScheme):
            raise TypeError(f"scheme is a scheme such as SharedMemWeightSyncScheme(...), not {scheme!r}")
        if self.in_chunks and scheme.strategy.max_in_flight is not None:
            raise ValueError(
                "in_chunks=True cannot be combined with max_in_flight here: sending would wait for workers, "
                "and they for update_weights(); give only one of the two, or use connect_servers()"
            )
        return scheme


class Trainer(base.TrainerWeightTransferEngine[TrainerInitInfo]):
    """Sends the weights of a ``WeightSource`` by a scheme, and calls vLLM for each update.

    All ranks of a trainer make one and call :meth:`send_weights`. Rank 0 holds all weights while it sends
    them; the other ranks only gather.

    Attributes:
        scheme: the scheme; None on ranks above 0.
        last_report: report of the last update; None before.
    """

    init_info_cls = TrainerInitInfo

    def __init__(
        self, *, client: base.VLLMWeightSyncClient, source: base.WeightSource, info: TrainerInitInfo
    ) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender, rank=info.rank)
        self.last_report: SyncReport | None = None
        self.scheme: WeightSyncScheme | None = info.make_scheme() if info.is_sender else None
        self._weights: dict[str, torch.Tensor] = {}

    @classmethod
    def trainer_init(
        cls,
        init_info: TrainerInitInfo,
        *,
        client: base.VLLMWeightSyncClient,
        source: base.WeightSource | None = None,
    ) -> Trainer:
        """Have vLLM's workers join, and send them the first weights.

        Raises:
            ValueError: there is no source, or its rank 0 does not own all weights.
            TypeError: the source does not yield full tensors.
            Exception: errors of the client, and those of :meth:`~weight_update.WeightSyncScheme.connect`.
        """
        if source is None:
            raise ValueError(
                "the backend weight_update needs a WeightSource; give source=ModuleSource(model)"
            )
        if not source.implements_iter_full():
            raise TypeError(f"{type(source).__name__} must implement iter_full(): full tensors are sent")
        elsewhere = [meta.name for meta in source.metadata if meta.owners and 0 not in meta.owners]
        if elsewhere:  # the metadata of all ranks are equal, so all ranks raise
            raise ValueError(
                f"rank 0 sends all weights, but {type(source).__name__} does not give it these: "
                f"{', '.join(elsewhere[:10])}; gather them on rank 0"
            )
        trainer = cls(client=client, source=source, info=init_info)
        trainer._connect(init_info)
        return trainer

    def _connect(self, info: TrainerInitInfo) -> None:
        self._read()
        if self.scheme is None:
            return
        try:
            with undo_on_error(self.shutdown):
                self.scheme.init_on_sender(weights=lambda: self._weights, num_workers=info.world_size - 1)
                joining = init_info(self.scheme, in_chunks=info.in_chunks)
                connect_with(self.scheme, [lambda: self.client.init_weight_transfer_engine(joining)])
        finally:
            self._weights = {}

    def send_weights(self) -> None:
        """Send the source's weights and have vLLM load them; vLLM then states their version.

        Raises:
            SyncFailedError: workers did not load them; it has their errors.
            Exception: an error of the client.
        """
        self._read()
        scheme = self.scheme
        if scheme is None:
            return
        try:
            handle = scheme.send_async(self._weights)
            try:
                update_in_session(self.client, handle.version)
            except Exception as error:
                try:
                    handle.wait(_ANSWER_SECONDS)
                except SyncFailedError as failed:  # it names the workers, and has their errors
                    raise failed from error
                raise
            self.last_report = handle.wait()
        finally:
            self._weights = {}

    def _read(self) -> None:
        """Iterate the source, which may gather; only the sender keeps the weights."""
        assert self.source is not None
        weights = {}  # of this call: nothing stays of an iteration that raises
        for name, weight in self.source.iter_full():
            if self.is_sender:
                weights[name] = weight.detach()
        self._weights = weights

    def shutdown(self) -> None:
        if self.scheme is not None:
            self.scheme.shutdown()
