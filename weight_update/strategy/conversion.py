"""Running ``convert=`` or ``gather=``, the user's function from weights to weights in another format."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch

from weight_update.errors import ConversionError, UnsupportedSourceError, WeightSyncError
from weight_update.wire.memory import has_memory

Convert = Callable[[Iterator[tuple[str, torch.Tensor]]], Iterable[tuple[str, torch.Tensor]]]
"""Function from weights to weights in another format, one after the other as they are asked for."""


def convert_checked(
    convert: Convert, source: Iterator[tuple[str, torch.Tensor]], option: str = "convert"
) -> Generator[tuple[str, torch.Tensor]]:
    """Yield the results of ``convert``, each only when it is asked for; errors name ``option``.

    Raises:
        UnsupportedSourceError: ``convert`` gave a name twice, or no pairs of a name and a tensor.
    """
    taken: str | None = None
    name: str | None = None
    made: Any = None
    seen: set[str] = set()

    def take(item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
        nonlocal taken
        taken = item[0]
        return item

    try:
        made = call_converter(convert, map(take, source), option)
        for item in made:
            if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
                hint = "; of a dict, return the items()" if isinstance(made, Mapping) else ""
                raise UnsupportedSourceError(
                    f"{option} gives {item!r:.60} ({type(item).__name__}), where pairs of a name and a "
                    f"tensor are wanted{hint}"
                )
            name, value = item
            if name in seen:
                raise UnsupportedSourceError(f"{option} gives {name!r} twice")
            if not isinstance(value, torch.Tensor):
                raise UnsupportedSourceError(
                    f"{option} gives {type(value).__name__} as {name!r}, not a tensor"
                )
            seen.add(name)
            del item
            yield name, value
            del value
    except Exception as error:
        if not isinstance(error, WeightSyncError) and sys.version_info >= (3, 11):  # others name the weight
            call = "" if made is not None else ", which takes one iterator of (name, tensor) pairs"
            last = f"the last weight that it took is {taken!r}, the last that it gave {name!r}"
            error.add_note(f"raised while {option}= ran{call}; {last}")
        raise


def call_converter(
    convert: Convert, source: Iterator[tuple[str, torch.Tensor]], option: str
) -> Iterable[Any]:
    """Return ``convert(source)``; raise UnsupportedSourceError if it is no iterable."""
    made = convert(source)
    if not isinstance(made, Iterable):
        raise UnsupportedSourceError(
            f"{option} gave an object of type {type(made).__name__}, not an iterable of names and "
            "tensors; is it a function that makes a converter, and has to be called first?"
        )
    return made


class Results:
    """The memory of a conversion's results, which the converter must not use again while they are in use."""

    def __init__(self) -> None:
        # By address: the last result there, as a weak reference, its name, and how often it was written to.
        self._given: dict[tuple[torch.device, int], tuple[weakref.ref[torch.Tensor], str, int]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Note a result.

        Raises:
            ConversionError: its memory was refilled, by writes that PyTorch counts, before this one.
        """
        if tensor.is_inference() or not tensor.numel() or not has_memory(tensor):
            return
        place = tensor.device, tensor.data_ptr()
        former, first, writes = self._given.get(place, (lambda: None, "", 0))
        if (used := former()) is not None and used._version != writes:
            raise ConversionError(
                f"convert gave the memory of {first!r} again as {name!r}, with other values: it must make a "
                "new tensor for each weight"
            )
        self._given[place] = weakref.ref(tensor), name, tensor._version


def collect(items: Generator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return converted weights by name; close ``items`` also after an error.

    Raises:
        ConversionError: a buffer was refilled for another weight, by writes that PyTorch counts.
    """
    tensors: dict[str, torch.Tensor] = {}
    results = Results()
    with contextlib.closing(items):
        for name, tensor in items:
            tensors[name] = tensor
            results.add(name, tensor)
    return tensors
