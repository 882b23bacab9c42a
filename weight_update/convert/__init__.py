"""Ready-made converters, for ``WeightStrategy(convert=...)``.

A converter takes an iterator of ``(name, tensor)`` and returns another. It works as a stream: it takes one
weight, yields every result that it can, and keeps no reference to a result. No converter writes into its
input; some yield views of it.
"""

from weight_update.convert.base import Converter, Item, Only, chain
from weight_update.convert.cast import cast
from weight_update.convert.fused import fuse_gate_up, fuse_qkv, split_gate_up, split_qkv
from weight_update.convert.lora import merge_lora
from weight_update.convert.megatron import hf_to_megatron, megatron_to_hf
from weight_update.convert.quantize import dequantize, quantize_fp8, quantize_fp8_blocks, quantize_int8
from weight_update.convert.rename import rename
from weight_update.convert.tensor_parallel import Sharded, gather_tensor_parallel

__all__ = [
    "Converter",
    "Item",
    "Only",
    "Sharded",
    "cast",
    "chain",
    "dequantize",
    "fuse_gate_up",
    "fuse_qkv",
    "gather_tensor_parallel",
    "hf_to_megatron",
    "megatron_to_hf",
    "merge_lora",
    "quantize_fp8",
    "quantize_fp8_blocks",
    "quantize_int8",
    "rename",
    "split_gate_up",
    "split_qkv",
]
