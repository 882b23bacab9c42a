"""The receiving side of a scheme: one worker's connection to the sender."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from weight_update.errors import FormatError, TransportError
from weight_update.receiver.receiver import Receiver
from weight_update.receiver.updates import ReceiverOptions
from weight_update.schemes.sources import whole_number
from weight_update.transports.base import TransportBackend


class ReceiverSide:
    """The receiver of one scheme, from its initialization on.

    Attributes:
        worker_idx: index of the worker; None until :meth:`WeightSyncScheme.connect` says it.
        receiver: the connected receiver; None before :meth:`connect` succeeded.
    """

    def __init__(self, worker_idx: int | None) -> None:
        self.worker_idx = None if worker_idx is None else whole_number(worker_idx, "worker_idx", least=0)
        self.receiver: Receiver | None = None
        self._instance = secrets.token_hex(8)
        self._link: TransportBackend | None = None  # of an attempt that failed, for the next one

    def connect(
        self,
        model: Any,
        make_link: Callable[[], TransportBackend],
        deadline: float,
        close_at_end: Callable[[Callable[[], None]], None],
        **options: Any,
    ) -> None:
        """Join the sender, apply the first weights, and apply updates in the background from then on.

        ``close_at_end`` registers the function that ends the connection; ``options`` are the other attributes
        of :class:`~weight_update.receiver.updates.ReceiverOptions`.

        Raises:
            SchemaMismatchError, SyncTimeoutError, TransportError: as :meth:`Receiver.connect`.
        """
        link, self._link = self._link or make_link(), None
        receiver = Receiver(ReceiverOptions(link=link, instance=self._instance, **options), model)
        try:
            receiver.connect(max(deadline - time.monotonic(), 0.0))
        except (TransportError, FormatError):
            receiver.close()
            raise
        except BaseException:
            receiver.staging.unguard()
            self._link = link  # it is usable
            close_at_end(link.close)
            raise
        receiver.start()
        self.receiver = receiver
        close_at_end(receiver.close)
