"""Quantization of weights to eight bits, with separate scales."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from weight_update.convert.base import Choice, Converter, Item, Only, check_only, stream
from weight_update.errors import ConversionError

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_TINY = torch.finfo(torch.float32).tiny
_KEPT = re.compile(r"embed|norm|lm_head|output_layer|router|^output\.|(^|[._])gate\.|(^|\.)w[tp]e\.")
_Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def quantize_int8(only: Only | None = None) -> Converter:
    """Quantize to symmetric int8 with one scale for each output channel.

    ``X.weight`` becomes ``X.weight``, with values from -127 to 127, and ``X.weight_scale``, float32 of shape
    ``(rows, 1)``. Names and shapes are those of vLLM's ``compressed_tensors_w8a8_int8.py``.

    Args:
        only: weights to quantize: prefixes, a compiled pattern or a function of name and tensor. None for all
            matrices named ``weight`` except embeddings, norms, routers and output layers, which engines keep
            in 16 bits.

    Raises:
        ValueError: ``only`` has a wrong type.

    Rows of zeros get the scale 1. The converter raises :class:`~weight_update.ConversionError` if a weight
    has a NaN or an infinity, is not a matrix, has no elements, or has eight bits already. Values are computed
    in float32.
    """
    return _converter(_int8, "_scale", only)


def quantize_fp8(only: Only | None = None) -> Converter:
    """Quantize to fp8 (e4m3) with one scale for the whole weight.

    ``X.weight`` becomes ``X.weight`` and ``X.weight_scale``, float32 of shape ``(1,)``. Names and shapes are
    those of vLLM's ``compressed_tensors_w8a8_fp8.py``. Arguments and errors are those of
    :func:`quantize_int8`.
    """
    return _converter(_fp8, "_scale", only)


def quantize_fp8_blocks(block: tuple[int, int] = (128, 128), only: Only | None = None) -> Converter:
    """Quantize to fp8 (e4m3) with one scale for each block.

    ``X.weight`` becomes ``X.weight`` and ``X.weight_scale_inv``, float32 of shape
    ``(ceil(rows / block[0]), ceil(columns / block[1]))``; blocks at the edges may be smaller. As in
    DeepSeek-V3's checkpoints, weight times ``scale_inv`` is the value.
    Source: ``README_WEIGHTS.md`` of DeepSeek-V3. Otherwise arguments and errors are those of
    :func:`quantize_int8`; blocks of zeros get the scale 1.

    Args:
        block: rows and columns of a block.
        only: weights to quantize; see :func:`quantize_int8`.

    Raises:
        ValueError: ``block`` is not two positive numbers.
    """
    _check_block(block)
    return _converter(functools.partial(_fp8_blocks, block), "_scale_inv", only)


def dequantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    block: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the weight times its scale.

    Args:
        weight: quantized weight, ``(rows, columns)``.
        scale: its scale.
        block: rows and columns of a block if there is a scale for each block; None otherwise.
        dtype: dtype of the result; the product is computed in float32.

    Raises:
        ConversionError: there are not as many scales as blocks, or the weight is not a matrix; or, without
            ``block``, there is neither one scale nor one for each row, of shape ``(rows, 1)``.
        ValueError: ``block`` is not two positive numbers.
    """
    if block is None:
        expected = [*weight.shape[:-1], 1]
        if scale.numel() != 1 and list(scale.shape) != expected:
            raise ConversionError(
                f"a weight of {list(weight.shape)} has one scale, or scales of the shape {expected}, not "
                f"{list(scale.shape)}; reshape them, or give the block= that it was quantized with"
            )
        return (weight.float() * scale).to(dtype)
    _check_block(block)
    if weight.dim() != 2:
        raise ConversionError(f"a weight of {list(weight.shape)} is not a matrix, so it has no blocks")
    expected = [-(-size // step) for size, step in zip(weight.shape, block, strict=True)]
    if list(scale.shape) != expected:
        raise ConversionError(
            f"a weight of {list(weight.shape)} in blocks of {block} has {expected} scales, not "
            f"{list(scale.shape)}; give the block= that it was quantized with"
        )
    for dim, size in enumerate(weight.shape):
        scale = scale.repeat_interleave(min(block[dim], size), dim).narrow(dim, 0, size)
    return (weight.float() * scale).to(dtype)


def _check_block(block: tuple[int, int]) -> None:
    sizes = isinstance(block, list | tuple) and all(isinstance(size, int) and size > 0 for size in block)
    if not sizes or len(block) != 2:
        raise ValueError(f"block= is rows and columns, each at least 1, such as (128, 128), not {block!r}")


def _converter(quantize: _Quantize, suffix: str, only: Only | None) -> Converter:
    check_only(only)
    return functools.partial(_quantized, quantize, suffix, _by_default if only is None else only)


def _by_default(name: str, tensor: torch.Tensor) -> bool:
    matrix = tensor.dim() == 2 and tensor.numel() > 0 and tensor.is_floating_point()
    return matrix and name.rpartition(".")[2] == "weight" and not _KEPT.search(name)


def _quantized(quantize: _Quantize, suffix: str, only: Only, items: Iterator[Item]) -> Iterator[Item]:
    choice = Choice(only)

    def rule(name: str, tensor: torch.Tensor) -> list[Item]:
        if not choice.takes(name, tensor):
            return [(name, tensor)]
        wide = tensor.is_floating_point() and tensor.dtype.itemsize > 1
        if not wide or tensor.dim() != 2 or not tensor.numel():
            raise ConversionError(
                f"{name}: {tensor.dtype} of the shape {list(tensor.shape)} cannot be quantized, which "
                "takes floating matrices of 16 or more bits that are not empty; leave it out with only="
            )
        weight, scale = quantize(tensor.float())
        if not (scale.is_meta or bool(scale.isfinite().all())):
            raise ConversionError(f"{name}: has a NaN or an infinity in float32, for which there is no scale")
        return [(name, weight), (name + suffix, scale)]

    return stream(items, rule, choice.finish)


def _scale(largest: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the divisor that turns ``largest``, the largest magnitude (float32), into ``limit``."""
    limits = torch.full_like(largest, limit)  # CUDA would multiply by the reciprocal of a number
    scale = (largest / limits).clamp_min(_TINY)  # clamp_ keeps NaN
    return torch.where(largest == 0, torch.ones_like(scale), scale)


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _scale(weight.abs().amax(1, keepdim=True), 127)
    return (weight / scale).round_().clamp_(-127, 127).to(torch.int8), scale


def _fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _scale(weight.abs().amax().view(1), _FP8_MAX)
    return (weight / scale).clamp_(-_FP8_MAX, _FP8_MAX).to(_FP8), scale


def _fp8_blocks(block: tuple[int, int], weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    high, wide = min(block[0], rows), min(block[1], columns)  # without padding that only costs memory
    if columns % wide or rows % high:  # otherwise it would copy the weight
        weight = functional.pad(weight, (0, -columns % wide, 0, -rows % high))
    # (down, high, across, wide)
    tiles = torch.unflatten(torch.unflatten(weight, 1, (-1, wide)), 0, (-1, high))
    scale = _scale(tiles.abs().amax((1, 3)), _FP8_MAX)
    quantized = (tiles / scale[:, None, :, None]).clamp_(-_FP8_MAX, _FP8_MAX).to(_FP8)
    return quantized.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scale
