"""Shards of tensor-parallel ranks; the ranks are processes that talk over gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from convert_parts import (
    GROUPS,
    HEADS,
    HIDDEN,
    HuggingFace,
    convert,
    fused_by_loops,
    megatron_of,
    numbers,
    same,
    state,
)
from fuzz import examples
from hypothesis import given
from hypothesis import strategies as st

from weight_update import ConversionError
from weight_update.convert import Item, Sharded, chain, gather_tensor_parallel, megatron_to_hf, split_qkv
from weight_update.testing import random_bits
from weight_update.testing.workers import dumps, loads

sizes = st.integers(1, 3)


@examples(80)
@given(
    ranks=st.integers(1, 4),
    dim=st.integers(0, 1),
    parts=st.lists(sizes, min_size=1, max_size=3),
    unit=sizes,
    other=sizes,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]),
)
def test_joining_is_the_inverse_of_splitting(
    ranks: int, dim: int, parts: list[int], unit: int, other: int, dtype: torch.dtype
) -> None:
    how = Sharded(dim, tuple(parts))
    each = [random_bits((other, part * unit * ranks), dtype, seed) for seed, part in enumerate(parts)]
    whole = torch.cat(each, 1)
    shards = [
        torch.cat([part[:, rank * part.shape[1] // ranks :][:, : part.shape[1] // ranks] for part in each], 1)
        for rank in range(ranks)
    ]
    if dim == 0:
        whole, shards = whole.T, [shard.T for shard in shards]
    same({"whole": how.join(shards)}, {"whole": whole})
    same(by_number(how.split(whole, ranks)), by_number(shards))


def by_number(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(number): tensor for number, tensor in enumerate(tensors)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_has_whole_groups_of_the_fused_qkv(ranks: int) -> None:
    q, k, v = numbers(8 * 3, 5), numbers(4 * 3, 5, seed=1), numbers(4 * 3, 5, seed=2)
    shards = Sharded(0).split(fused_by_loops(q, k, v, 8, 4), ranks)
    parts = [split_qkv(shard, 8 // ranks, 4 // ranks) for shard in shards]
    for whole, of_ranks in zip((q, k, v), zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(of_ranks), whole)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_layers_compute_what_the_whole_does(ranks: int) -> None:
    x, gate, up, down = (numbers(*shape).double() for shape in ((3, 6), (8, 6), (8, 6), (6, 8)))
    fc1 = Sharded(0, (1, 1)).split(torch.cat([gate, up]), ranks)
    fc2 = Sharded(1).split(down, ranks)
    total = torch.zeros(3, 6).double()
    for first, second in zip(fc1, fc2, strict=True):
        left, right = (x @ first.T).chunk(2, 1)
        total += (torch.nn.functional.silu(left) * right) @ second.T
    expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(total, expected)


def test_shapes_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"parts=\(1, 1\).* \[3, 2\]"):
        Sharded(0, (1, 1)).join([torch.zeros(3, 2)])
    with pytest.raises(ValueError, match="does not divide"):
        Sharded(1).join([torch.zeros(3)])
    with pytest.raises(ValueError, match=r"3 ranks do not divide dimension 0 of \[8, 2\]"):
        Sharded(0).split(torch.zeros(8, 2), 3)
    with pytest.raises(ValueError, match="does not divide"):
        Sharded(-3).join([torch.zeros(4, 2)])


@pytest.mark.parametrize("given", [(0, 2), (0, ()), (0, (1, 0)), (0, (1, -1)), ("0",)])
def test_a_division_that_makes_no_sense_is_refused_at_once(given: Any) -> None:
    with pytest.raises(
        ValueError, match=r"takes a dimension and positive sizes, such as Sharded\(0, \(1, 1\)"
    ):
        Sharded(*given)


def test_every_rank_gets_a_shard_of_a_weight_without_rows() -> None:
    assert [list(shard.shape) for shard in Sharded(0).split(torch.zeros(0, 4), 3)] == [[0, 4]] * 3


Task = Callable[[int, int], Any]


def in_ranks(world: int, where: Path, task: Task) -> list[Any]:
    """Return the results of ``task(rank, world)`` in each process of a gloo group."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=_rank, args=(task, rank, world, where / "meeting", pipes[rank][1]))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        answers = []
        for process, (mine, theirs) in zip(processes, pipes, strict=True):
            theirs.close()
            assert mine.poll(60), f"{process} gave no answer"
            answers.append(loads(mine.recv_bytes()))
        return answers
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join(10)


def _rank(task: Task, rank: int, world: int, meeting: Path, answer: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=meeting.as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=20),
    )
    answer.send_bytes(dumps(task(rank, world)))
    dist.barrier()
    dist.destroy_process_group()


def shard_of(whole: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, torch.Tensor]:
    """Return the tensors of one rank of Megatron-Core: the reference for the default table."""
    shards = {}
    for name, value in whole.items():
        rows = value.shape[0] // world
        if "fc1.weight" in name:
            gate, up = value.chunk(2)
            shards[name] = torch.cat([gate.chunk(world)[rank], up.chunk(world)[rank]])
        elif "linear_proj" in name or "linear_fc2" in name:
            shards[name] = value.chunk(world, 1)[rank].contiguous()
        elif "norm" in name:
            shards[name] = value
        else:
            shards[name] = value[rank * rows : (rank + 1) * rows]
    return shards


def model_for(world: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model that ``world`` ranks divide: padded to 12 tokens, MLPs of 8, as many groups as ranks."""
    hf = state(HuggingFace(layers=2))
    for name, value in hf.items():
        if "gate_proj" in name or "up_proj" in name:
            hf[name] = numbers(8, HIDDEN)
        if "down_proj" in name:
            hf[name] = numbers(HIDDEN, 8)
        if "embed" in name or "lm_head" in name:
            hf[name] = torch.cat([value, torch.zeros(2, HIDDEN)])
    if world == 2:
        return hf, megatron_of(hf, layers=2)
    return hf, {name: value for name, value in megatron_of(hf, layers=2).items() if "qkv" not in name}


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_gather_the_whole_model(world: int, tmp_path: Path) -> None:
    hf, whole = model_for(world)

    def task(rank: int, world: int) -> Any:
        mine = shard_of(whole, rank, world)
        before = {name: value.clone() for name, value in mine.items()}
        gathered = convert(gather_tensor_parallel(), mine.items())
        again = convert(chain(gather_tensor_parallel(), megatron_to_hf(HEADS, GROUPS)), mine.items())
        same(mine, before)
        return gathered, again

    for gathered, again in in_ranks(world, tmp_path, task):
        same(gathered, whole)
        same(again, {name: value for name, value in hf.items() if name in again})
        assert len(again) == len(hf) - (0 if world == 2 else 2 * 7)


def test_any_dtype_in_a_group_of_some_ranks(tmp_path: Path) -> None:
    dtypes = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool]
    whole = {f"{dtype}.rows": random_bits((4, 3), dtype, 1) for dtype in dtypes}

    def task(rank: int, world: int) -> Any:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = {name: value.chunk(2)[rank // 2].T.contiguous().T for name, value in whole.items()}
        return convert(gather_tensor_parallel(groups[rank % 2], [("rows$", Sharded(0))]), mine.items())

    for gathered in in_ranks(4, tmp_path, task):
        same(gathered, whole)


def failing(weights: dict[str, torch.Tensor], after: int) -> Iterator[Item]:
    for place, item in enumerate(weights.items()):
        if place == after:
            raise OSError("the disk is gone")
        yield item


def test_ranks_that_differ_all_fail(tmp_path: Path) -> None:
    def attempt(items: Iterator[Item]) -> str:
        try:
            convert(gather_tensor_parallel(None, [("", Sharded(0))]), items)
        except (ConversionError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    def task(rank: int, world: int) -> Any:
        good = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
        other = {"a": torch.ones(2), "x": torch.ones(2), "c": torch.ones(2)}
        shape = {"a": torch.ones(2), "b": torch.ones(2, 1), "c": torch.ones(2)}
        short = {"a": torch.ones(2), "b": torch.ones(2)}
        told = [attempt(iter((good if rank else wrong).items())) for wrong in (other, shape, short)]
        told.append(attempt(iter(good.items()) if rank else failing(good, 1)))
        told.append(attempt(iter(good.items())))  # the group is still of use
        return told

    first, second = in_ranks(2, tmp_path, task)
    assert first[:3] == second[:3]
    for told, (zero, one) in zip(
        first,
        [
            ("x: torch.float32[2]", "b: torch.float32[2]"),
            ("b: torch.float32[2, 1]", "b: torch.float32[2]"),
            ("the end of its weights", "c: torch.float32[2]"),
        ],
        strict=False,
    ):
        assert told.startswith("ConversionError: the ranks of the group do not convert the same weights")
        assert f"rank 0 of the group has {zero}" in told
        assert f"rank 1 of the group has {one}" in told
    assert first[3] == "OSError: the disk is gone"
    assert "rank 0 of the group has an error: OSError('the disk is gone')" in second[3]
    assert first[4] == second[4] == "no error"


@pytest.mark.parametrize("step", ["empty_like", "empty"], ids=["for the shards", "for the whole"])
def test_a_rank_without_memory_tells_the_others(step: str, tmp_path: Path) -> None:
    weights, allocate = {"a": torch.ones(500), "b": torch.ones(2)}, getattr(torch, step)

    def without_memory(like: Any, **options: Any) -> torch.Tensor:
        if (len(like) if isinstance(like, torch.Tensor) else like) >= 500:
            raise MemoryError("no room")
        found: torch.Tensor = allocate(like, **options)
        return found

    def task(rank: int, world: int) -> Any:
        if rank == 0:
            setattr(torch, step, without_memory)
        try:
            convert(gather_tensor_parallel(None, [("", Sharded(0))]), iter(weights.items()))
        except (ConversionError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    first, second = in_ranks(2, tmp_path, task)
    assert first == "MemoryError: no room"
    assert second.startswith("ConversionError: the ranks of the group do not convert the same weights")
    assert "rank 0 of the group has an error: MemoryError('no room')" in second
