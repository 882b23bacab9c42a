"""Names of weights: the keys of dicts as names, and the selection of a part of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weight_update.errors import UnsupportedSourceError


def key_name(key: Any, source: Mapping[Any, Any]) -> str:
    """Return a key of ``source`` as a dotted name; UnsupportedSourceError if it is no name."""
    if isinstance(key, tuple) and all(isinstance(part, str) for part in key):
        return ".".join(key)
    if not isinstance(key, str):
        raise UnsupportedSourceError(
            f"{type(source).__name__} with the key {key!r}: weights have string keys"
        )
    return key


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
