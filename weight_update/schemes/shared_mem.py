"""The scheme for workers on the sender's machine: shared memory, one copy an update for all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import Unpack

from weight_update.arguments import require_token
from weight_update.errors import LifecycleError
from weight_update.schemes.base import End, WeightSyncScheme
from weight_update.schemes.options import SchemeOptions, takes_options_of
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend
from weight_update.transports.shared_memory.cuda_slots import cuda_device
from weight_update.transports.shared_memory.transport import SharedMemListener, SharedMemTransport


class SharedMemWeightSyncScheme(WeightSyncScheme, backend="shared"):
    """Scheme that points the parameters of workers on one machine at shared memory that the sender fills.

    Two slots alternate. The sender copies the weights into the slot that no worker reads, then names it to
    the workers over a Unix socket. Each worker switches to it between two forward passes. The trainer's own
    parameters are never shared, and a worker that writes into its weights changes them for itself only.

    All other arguments are those of :class:`WeightSyncScheme`.

    Args:
        per_worker_weights: accepted for programs written for TorchRL. Workers may always have weights
            of their own here.
        directory: None keeps the slots in anonymous memory, which no mount limits; a path such as
            ``"/dev/shm"`` keeps them in a nameless file there, within the limit of that mount.
        slot_device: None keeps the slots in host memory; ``"cuda"`` or ``"cuda:1"`` keeps them on that GPU of
            the sender, for workers on the same GPU, which open them by CUDA IPC; see :doc:`colocated`. It
            needs an encoding that is :attr:`~Encoding.on_gpu`: dense or bucket.
        address: value of ``address`` on the sender, for a worker that makes a scheme of its own. It may lack
            the null character, or have ``@`` instead, as in messages. A sender ignores it, and chooses its
            own.
        token: secret that both sides share, with ``address``; None makes one.

    Attributes:
        address: abstract Unix address that the sender listens on, which begins with a null character; None
            before ``init_on_sender``, unless it was given.

    Raises:
        ValueError: ``slot_device`` is not a CUDA device, or does not go with the other options. If the
            sender has no such device, ``init_on_sender`` raises this error.
    """

    @takes_options_of(WeightSyncScheme.__init__)
    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        *,
        directory: str | None = None,
        slot_device: str | torch.device | None = None,
        address: str | None = None,
        token: str | None = None,
        **options: Unpack[SchemeOptions],
    ) -> None:
        super().__init__(strategy, sync, **options)
        self.token = require_token(token) or self.token
        self.per_worker_weights = per_worker_weights
        self.directory = directory
        self.slot_device = None if slot_device is None else str(slot_device)
        self.address: str | None = None if address is None else "\0" + address.lstrip("\0@")
        if self.slot_device is None:
            return
        if self.slot_device.partition(":")[0] != "cuda":
            raise ValueError(f"unknown slot_device {self.slot_device!r} (known: None, cuda, cuda:<index>)")
        if self.directory is not None:
            raise ValueError("directory= is for slots in host memory; give it or slot_device=, not both")
        if not self.strategy.encoding.on_gpu:
            label = self.strategy.encoding.label
            raise ValueError(
                f"encoding {label!r} needs slots in host memory; with slot_device= give 'dense' or 'bucket'"
            )

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        if self.slot_device is not None:
            self.slot_device = str(cuda_device(self.slot_device))  # other threads have other current devices
        links: dict[int, Any] = super().open_sender(workers, ctx)
        listener = SharedMemListener(self.token, links, self.late_joiner_links())
        self.listener, self.address = listener, listener.address
        return links

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        if end == "sender":
            device = None if self.slot_device is None else torch.device(self.slot_device)
            return SharedMemTransport(directory=self.directory, device=device)
        if self.address is None:
            raise LifecycleError(
                "this scheme does not know where its sender is: pass it to the worker after "
                "init_on_sender(), or give address= (scheme.address of the sender) and the same token="
            )
        return SharedMemTransport(self.address, token=self.token)
