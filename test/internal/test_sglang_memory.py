"""White-box tests of the memory that SGLang's processes read from and answer into."""

from __future__ import annotations

import json
import os
from contextlib import closing

import torch

from weight_update.engines.sglang.memory import SharedBatch, answer, read


def test_it_leaves_no_open_file() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with closing(SharedBatch()) as memory:
        order = json.loads(memory.write("weights", {"w": torch.ones(3)}))
        read(order)
        answer(order, {"in_place": {}})
        memory.answers(1, 0.0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_answer_to_an_earlier_order_does_not_count() -> None:
    """Else the memory would be written again while a process still reads it."""
    with closing(SharedBatch()) as memory:
        earlier, last = (json.loads(memory.write("weights", {"w": torch.ones(3)})) for _ in range(2))
        answer(earlier, {"in_place": {}})
        assert memory.answers(1, 0.0) == []
        answer(last, {"in_place": {"w": True}})
        assert [one["in_place"] for one in memory.answers(1, 0.0)] == [{"w": True}]
