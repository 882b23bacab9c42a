"""Slots of shared memory, where the contract suites of the transports do not look."""

import os
import sys
import threading

import torch

from weight_update.transports.slots import SharedBuffer, SlotTable


def test_clearing_while_another_thread_releases():
    """A receiver's thread may let go of a payload at the moment another thread closes the link."""
    slots = [SharedBuffer(64) for _ in range(4)]
    table, errors, stop = SlotTable(), [], threading.Event()

    def release() -> None:
        try:
            while not stop.is_set():
                table.release(torch.empty(0))
        except RuntimeError as error:
            errors.append(error)

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=release)
    thread.start()
    try:
        for _ in range(300):
            for slot in slots:
                table.payload(slot.key, 64, lambda slot=slot: os.dup(slot.fd))
            table.clear()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(switching)
        for slot in slots:
            slot.close()
    assert not errors
