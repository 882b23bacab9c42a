"""Selecting a part of a model's weights, and finding models that have no end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from weight_update.errors import UnsupportedSourceError


@contextlib.contextmanager
def refusing_endless() -> Iterator[None]:
    """Return a context that raises UnsupportedSourceError in place of a RecursionError."""
    try:
        yield
    except RecursionError as error:
        raise UnsupportedSourceError(
            "the model is nested without an end: it contains itself, directly or in one of its parts; keep a "
            "reference to an outer module in a list, as in self.outer = [outer]"
        ) from error


def extra_with(chosen: Iterable[str], names: Iterable[str], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra state of the modules that have ``chosen`` weights.

    A module without weights counts as a part of the nearest module around it that has some.

    Args:
        chosen: names of the chosen weights, at least one.
        names: names of all weights.
        extra: extra state of all modules.
    """
    if not extra:
        return {}
    with_weights, with_chosen = _modules_of(names), _modules_of(chosen)
    found = {}
    for name, value in extra.items():
        module = name.rpartition(".")[0]
        while module not in with_weights:
            module = module.rpartition(".")[0]
        if module in with_chosen:
            found[name] = value
    return found


def _modules_of(names: Iterable[str]) -> set[str]:
    """Return the names of the modules that contain weights, with "" for the outermost."""
    found = {""}
    for name in names:
        while (name := name.rpartition(".")[0]) not in found:
            found.add(name)
    return found
