"""New names for the same tensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from weight_update.convert.base import Converter, Item, compiled_pairs, stream
from weight_update.errors import ConversionError


def rename(names: Mapping[str, str] | Sequence[tuple[str | re.Pattern[str], str]]) -> Converter:
    """Rename weights; other weights keep their names.

    Args:
        names: a table ``{old: new}`` of whole names, or a list of ``(pattern, replacement)``: the first
            pattern that is found in a name is replaced as :func:`re.sub` does.

    Raises:
        re.error: a pattern is not valid.
        ValueError: ``names`` is neither a table nor a list of pairs.

    The converter raises :class:`~weight_update.ConversionError` when two weights get the same name, and
    at the end when a name of the table belongs to no weight.
    """
    if isinstance(names, Mapping):
        if all(isinstance(new, str) for new in names.values()):
            return functools.partial(_by_table, dict(names))
    elif (pairs := compiled_pairs(names, lambda new: isinstance(new, str) or callable(new))) is not None:
        return functools.partial(_by_patterns, pairs)
    raise ValueError(
        f"rename takes a dict {{old: new}} or a list of (pattern, replacement), not {names!r:.100}"
    )


def _by_table(table: Mapping[str, str], items: Iterator[Item]) -> Iterator[Item]:
    unused = dict(table)

    def new_name(name: str) -> str:
        unused.pop(name, None)
        return table.get(name, name)

    yield from _renamed(items, new_name)
    if unused:
        raise ConversionError(
            f"rename: no weight has the name {', '.join(map(repr, unused))}; if select= leaves it out of "
            "updates, give a list of patterns instead of a table"
        )


def _by_patterns(patterns: Sequence[tuple[re.Pattern[str], str]], items: Iterator[Item]) -> Iterator[Item]:
    def new_name(name: str) -> str:
        for pattern, replacement in patterns:
            new, found = pattern.subn(replacement, name)
            if found:
                return new
        return name

    return _renamed(items, new_name)


def _renamed(items: Iterator[Item], new_name: Callable[[str], str]) -> Iterator[Item]:
    origins: dict[str, str] = {}

    def rule(name: str, tensor: torch.Tensor) -> list[Item]:
        new = new_name(name)
        origin = origins.setdefault(new, name)
        if origin != name:
            raise ConversionError(f"rename: {origin!r} and {name!r} would both become {new!r}")
        return [(new, tensor)]

    return stream(items, rule)
