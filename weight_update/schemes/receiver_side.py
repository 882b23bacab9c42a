"""The receiving side of a scheme: joins the sender with a model, and keeps the model current."""

from __future__ import annotations

import secrets
import weakref
from typing import Any

from weight_update.errors import FormatError, TransportError
from weight_update.receiver.receiver import Receiver
from weight_update.receiver.staging import ReceiverOptions
from weight_update.receiver.targets import require_target
from weight_update.transports.base import TransportBackend


class ReceiverSide:
    """The receiver of one scheme, from its initialization on."""

    def __init__(self, model: Any) -> None:
        require_target(model)
        self.model = model
        self.instance = secrets.token_hex(8)  # tells this receiver from others with its index
        self.link: TransportBackend | None = None  # for connect(); it may be the one of a call that failed
        self.options: ReceiverOptions | None = None  # of a receiver that connects or is connected
        self.receiver: Receiver | None = None  # until it is connected

    def connect(self, options: ReceiverOptions, timeout: float) -> Receiver:
        """Join the sender as :meth:`Receiver.connect` does; after an error, keep the link if it is usable."""
        self.options = options
        receiver = Receiver(options, self.model)
        try:
            receiver.connect(timeout)
        except BaseException as error:
            if isinstance(error, TransportError | FormatError) and not receiver.refused:
                self.link = None
                receiver.close()
            else:
                receiver.staging.unguard()
            raise
        self.link = None  # the receiver closes it
        receiver.start()
        self.receiver = receiver
        return receiver

    def bind(self, model: Any) -> None:
        """Keep another model current from now on."""
        if self.receiver is not None:
            self.receiver.bind(model)
        self.model = model


def close_receiver(receiver: weakref.ref[Receiver]) -> None:
    """Close a receiver, unless it was freed, which has closed it."""
    if (found := receiver()) is not None:
        found.close()
