"""Conversion of weights to another floating dtype."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from weight_update.convert.base import Choice, Converter, Item, Only, check_only, stream


def cast(dtype: torch.dtype, only: Only | None = None) -> Converter:
    """Convert floating-point weights to ``dtype`` as ``Tensor.to`` does; others pass unchanged.

    Quantized weights and their scales (``*_scale``, ``*_scale_inv``) also pass unchanged, unless ``only``
    selects them. Converted weights are no longer tied: use ``only`` to exclude weights that workers have
    tied.

    Workers get weights in their own dtypes without this converter. Use it to send weights in a narrower
    dtype, or before another converter.

    Args:
        dtype: a floating dtype.
        only: weights to convert: prefixes, a compiled pattern or a function of name and tensor; None for all.

    Raises:
        ValueError: ``dtype`` is not floating, or ``only`` has a wrong type.
    """
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"cast takes a dtype such as torch.bfloat16, not {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"cast takes a floating dtype, not {dtype}; quantize_int8() makes integers")
    check_only(only)
    return functools.partial(_cast, dtype, only)


def _cast(dtype: torch.dtype, only: Only | None, items: Iterator[Item]) -> Iterator[Item]:
    choice = Choice(only)

    def rule(name: str, tensor: torch.Tensor) -> list[Item]:
        chosen = choice.takes(name, tensor) and tensor.is_floating_point()
        if only is None and (tensor.dtype.itemsize == 1 or name.endswith(("_scale", "_scale_inv"))):
            chosen = False
        return [(name, tensor.to(dtype) if chosen else tensor)]

    return stream(items, rule, choice.finish)
