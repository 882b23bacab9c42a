"""A plugin of vLLM with slow stand-ins for the compiled operations of its CPU backend.

PyPI has vLLM's compiled operations for CUDA only. With these, vLLM computes a dense transformer on the CPU:
its own engine, scheduler, worker, paged cache and server, with attention and slots by PyTorch. vLLM loads the
plugin in each of its processes, if this folder is in PYTHONPATH.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def register() -> None:
    """Define the operations, unless this process has them."""
    from vllm.utils import cpu_resource_utils

    torch.accelerator.synchronize = lambda *args: None  # vLLM's CUDA build calls these without asking
    torch.accelerator.empty_cache = lambda: None
    visible = cpu_resource_utils.get_visible_memory_node
    cpu_resource_utils.get_visible_memory_node = lambda nodes=None: visible()  # else one for each replica
    if hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        return
    for schema, function in _OPERATIONS.items():
        _LIBRARY.define(schema)
        _LIBRARY.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


def _cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
) -> None:
    """Write keys and values (tokens, heads, size) into caches (blocks, heads, tokens of a block, size)."""
    each = key_cache.shape[2]
    key_cache[slots // each, :, slots % each] = key[: len(slots)]
    value_cache[slots // each, :, slots % each] = value[: len(slots)]


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    causal: bool,
    alibi: torch.Tensor | None,
    window: int,
    blocks: torch.Tensor,
    *_: Any,
) -> None:
    """Compute causal attention of each request's last tokens to all of its tokens."""
    assert causal
    assert alibi is None
    assert window == -1
    each = key_cache.shape[2]
    for i, length in enumerate(lengths.tolist()):
        new = slice(int(starts[i]), int(starts[i + 1]))
        of = blocks[i, : -(-length // each)].long()
        key, value = (
            cache[of].transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1)
            for cache in (key_cache, value_cache)
        )
        rows = torch.arange(length - (new.stop - new.start), length)
        mask = rows[:, None] >= torch.arange(length)
        found = scaled_dot_product_attention(
            query[new].transpose(0, 1), key, value, mask, scale=scale, enable_gqa=True
        )
        output.view(query.shape)[new] = found.transpose(0, 1)


def _slots(
    starts: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor, each: int
) -> None:
    """Write the slot of each token: its place in the cache, by its request's blocks."""
    for i in range(len(starts) - 1):
        new = slice(int(starts[i]), int(starts[i + 1]))
        at = positions[new]
        slots[new] = blocks[i, at // each] * each + at % each


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    time.sleep(_STEP_SECONDS)
    return logits.argmax(dim=-1)


_STEP_SECONDS = 0.005
"""Pause in each step; the engine waits actively, so without it two cores have no time for the server."""
_LIBRARY = torch.library.Library("_C", "FRAGMENT")
_OPERATIONS = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "greedy_argmax(Tensor logits) -> Tensor": _argmax,
    "get_scheduler_metadata(int requests, int heads, int kv_heads, int size, Tensor lengths, "
    "ScalarType dtype, Tensor starts, bool causal, int window, str isa, bool split, Tensor? dynamic, "
    "str cache) -> Tensor": (lambda *_: torch.zeros(1)),
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slots, str isa, float k_scale, float v_scale, str cache) -> ()": _cache,
    "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a!) output, "
    "Tensor starts, Tensor lengths, float scale, bool causal, Tensor? alibi, int window, Tensor blocks, "
    "float softcap, Tensor metadata, Tensor? sinks, Tensor? dynamic, float k_scale, float v_scale, "
    "str cache) -> ()": _attend,
    "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor blocks, Tensor(a!) slots, "
    "int each) -> ()": _slots,
}
