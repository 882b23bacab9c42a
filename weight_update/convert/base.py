"""The converter interface, and the parts that all converters share."""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from weight_update.arguments import enclosing_names
from weight_update.errors import ConversionError

Item = tuple[str, torch.Tensor]
"""Name and tensor of one weight."""

Converter = Callable[[Iterator[Item]], Iterable[Item]]
"""Takes the weights of one update and returns them in another format."""

Rule = Callable[[str, torch.Tensor], Iterable[Item]]

Only = Sequence[str] | re.Pattern[str] | Callable[[str, torch.Tensor], bool]
"""Prefixes (``"head"`` chooses ``head`` and ``head.*``), a pattern found in the name, or a function."""


def chain(*converters: Converter) -> Converter:
    """Return a converter that applies all of ``converters``, one after the other.

    Raises:
        ValueError: one of them is no function.
    """
    if wrong := [one for one in converters if not callable(one)]:
        raise ValueError(f"chain takes converters, each an argument of its own, not {wrong[0]!r:.60}")
    return functools.partial(_chain, converters)


def _chain(converters: Sequence[Converter], items: Iterator[Item]) -> Iterator[Item]:
    for converter in converters:
        items = iter(converter(items))
    return items


def stream(items: Iterable[Item], rule: Rule, finish: Callable[[], Iterable[Item]] = tuple) -> Iterator[Item]:
    """Yield the results of ``rule`` for each item, and of ``finish`` at the end.

    Rules get tensors without their autograd history. No reference to a yielded tensor is kept, so its memory
    is free as soon as the consumer drops it.
    """
    for name, tensor in items:
        made = deque(rule(name, tensor.detach()))
        del tensor
        while made:
            yield made.popleft()
    made = deque(finish())
    while made:
        yield made.popleft()


def compiled_pairs(pairs: Any, fits: Callable[[Any], bool]) -> list[tuple[re.Pattern[str], Any]] | None:
    """Compile the patterns in pairs of pattern and value; None if these are no pairs or a value is unfit."""
    try:
        pairs = list(pairs)
        compiled = [(re.compile(pattern), value) for pattern, value in pairs]
    except (TypeError, ValueError):
        return None
    texts = any(isinstance(pair, str) for pair in pairs)  # two letters look like a pair
    return compiled if not texts and all(fits(value) for _, value in compiled) else None


def check_only(only: Only | None) -> None:
    """Raise ValueError if ``only`` is a string, or has another wrong type."""
    sequence = (
        isinstance(only, Sequence)
        and not isinstance(only, str)
        and all(isinstance(prefix, str) for prefix in only)
    )
    if not (only is None or sequence or isinstance(only, re.Pattern) or callable(only)):
        raise ValueError(f"only= takes a list of prefixes, a compiled pattern or a function, not {only!r}")


class Choice:
    """The selection of weights of one stream by ``only`` (see :data:`Only`); None selects all."""

    def __init__(self, only: Only | None) -> None:
        self._only = only
        self._prefixes = {p.rstrip("."): p for p in only} if isinstance(only, Sequence) else {}
        self._unused = dict(self._prefixes)

    def takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether a weight is selected."""
        if self._only is None:
            return True
        if isinstance(self._only, Sequence):
            found = [p for p in enclosing_names(name) if p in self._prefixes]
            for prefix in found:
                self._unused.pop(prefix, None)
            return bool(found)
        if isinstance(self._only, re.Pattern):
            return self._only.search(name) is not None
        return self._only(name, tensor)

    def finish(self) -> tuple[()]:
        """Raise ConversionError if a prefix selected no weight; call it after the last weight."""
        if self._unused:
            shown = ", ".join(map(repr, self._unused.values()))
            raise ConversionError(
                f"only= chooses no weight by {shown}; give whole names, or the part of a name before a dot; "
                "if select= leaves the weight out of updates, give a pattern or a function"
            )
        return ()
