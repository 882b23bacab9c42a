"""Memory that is pinned for copies from and to a GPU, with a CUDA runtime that only takes notes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from weight_update import MPTransport, SharedMemWeightSyncScheme
from weight_update.receiver import staging as receiver_staging
from weight_update.receiver.staging import Staging
from weight_update.sender.buffers import BufferPool
from weight_update.transports.shared_memory.slots import HostSlotMapping, SharedBuffer, SlotTable
from weight_update.wire.memory import pin

LARGE = 16 << 20
USED = 1  # the GPU that this process uses; the current one is 0


class Runtime:
    """CUDA's functions that pin memory; ``pinned`` has the number of bytes and the flags by address."""

    def __init__(self) -> None:
        self.pinned: dict[int, tuple[int, int]] = {}
        self.refuses = False
        self.asked = 0
        self.device = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address not in self.pinned
        assert self.device == USED
        self.asked += 1
        if self.refuses:
            return 2
        self.pinned[address] = nbytes, flags
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert self.device == USED
        del self.pinned[address]
        return 0

    @contextmanager
    def current(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", runtime.current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: runtime.device)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index == USED, raising=False)
    monkeypatch.setattr(
        torch.Tensor, "is_pinned", lambda self: self.untyped_storage().data_ptr() in runtime.pinned
    )
    return runtime


def test_memory_is_pinned_until_it_is_freed(runtime: Runtime) -> None:
    memory = torch.empty(LARGE + 10, dtype=torch.uint8)
    view = memory[10:]
    pin(view)
    pin(memory)
    assert runtime.pinned == {memory.data_ptr(): (LARGE + 10, 0)}
    del memory
    assert runtime.pinned
    del view
    assert not runtime.pinned


def test_small_memory_is_not_pinned(runtime: Runtime) -> None:
    pin(torch.empty(LARGE - 1, dtype=torch.uint8))
    assert not runtime.pinned


def test_nothing_is_pinned_in_a_process_without_a_gpu(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    memory = torch.empty(LARGE, dtype=torch.uint8)
    pin(memory)
    assert not runtime.pinned


def test_a_refusal_changes_nothing(runtime: Runtime) -> None:
    runtime.refuses = True
    memory = torch.empty(LARGE, dtype=torch.uint8)
    for _ in range(3):
        pin(memory)
    assert runtime.asked == 1
    assert not runtime.pinned
    memory.fill_(1)
    runtime.refuses = False
    address = memory.data_ptr()
    del memory
    again = torch.empty(LARGE, dtype=torch.uint8)
    pin(again)
    assert again.data_ptr() in runtime.pinned, (address, again.data_ptr())


def test_a_forked_process_leaves_the_memory_of_its_parent_pinned(runtime: Runtime) -> None:
    memory = torch.empty(LARGE, dtype=torch.uint8)
    pin(memory)
    child = os.fork()
    if child == 0:
        del memory
        os._exit(len(runtime.pinned))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_sender_pins_its_buffers(runtime: Runtime) -> None:
    pool: BufferPool
    with SharedMemWeightSyncScheme() as sender:
        sender.init_on_sender(model=torch.nn.Linear(4096, 1024), num_workers=1)
        pool = sender._sender._pool
        tensors = [slot.buffer.tensor for slot in pool._slots]
        assert tensors
        assert {one.data_ptr() for one in tensors} == runtime.pinned.keys()
        del tensors
    assert not runtime.pinned


def test_a_worker_pins_a_second_mapping_that_shows_the_writes_of_the_sender(runtime: Runtime) -> None:
    slot = SharedBuffer(LARGE)
    table = SlotTable()
    payload = table.payload(slot.key, LARGE, lambda: HostSlotMapping(slot.key, slot.fd))
    assert table.pinned(payload) is payload  # many slots are used only once
    assert not runtime.pinned
    pinned = table.pinned(payload)
    assert runtime.pinned[pinned.data_ptr()] == (pinned.untyped_storage().nbytes(), 8)
    assert pinned.data_ptr() != payload.data_ptr()
    assert len(pinned) == len(payload)
    payload[5] = 3  # stays in this process, and in this mapping
    slot.tensor[:7] = 2
    assert pinned[:8].tolist() == [2] * 7 + [0]
    assert table.pinned(payload).data_ptr() == pinned.data_ptr()
    slot.close()
    del pinned, payload
    table.clear()
    assert not runtime.pinned


def test_a_worker_without_a_gpu_maps_a_slot_once() -> None:
    slot = SharedBuffer(LARGE)
    table = SlotTable()
    payload = table.payload(slot.key, LARGE, lambda: HostSlotMapping(slot.key, slot.fd))
    assert table.pinned(payload) is payload
    slot.close()


def test_a_worker_with_queues_reads_slots_through_the_second_mapping(runtime: Runtime) -> None:
    link = MPTransport(SimpleNamespace(cancel_join_thread=lambda: None), end="receiver")
    slot = SharedBuffer(LARGE)
    payload = link._slots.payload(slot.key, LARGE, lambda: HostSlotMapping(slot.key, slot.fd))
    link.pinned(payload)
    assert link.pinned(payload).data_ptr() in runtime.pinned


def test_memory_that_a_worker_receives_into_is_pinned_when_it_is_used_again(runtime: Runtime) -> None:
    options = SimpleNamespace(strategy=None, gate=None, stable_addresses=False, link=None)
    staging = Staging(options)  # type: ignore[arg-type]
    for more in range(3):  # patches of ever new sizes
        staging.allocate(LARGE + more)
    assert not runtime.asked
    memory = staging.allocate(LARGE + 2)
    assert memory.data_ptr() in runtime.pinned


def test_idle_memory_makes_room_for_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    options = SimpleNamespace(strategy=None, gate=None, stable_addresses=False, link=None)
    staging = Staging(options)  # type: ignore[arg-type]
    idle = weakref.ref(staging.allocate(100))
    new_buffer = receiver_staging.new_buffer

    def with_limit(nbytes: int, device: torch.device) -> torch.Tensor:
        if idle() is not None:
            raise RuntimeError("can't allocate memory")
        return new_buffer(nbytes, device)

    monkeypatch.setattr(receiver_staging, "new_buffer", with_limit)
    assert staging.allocate(200).numel() == 200
