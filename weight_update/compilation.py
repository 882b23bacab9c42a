"""Functions that PyTorch leaves out of what it compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(function: _F) -> _F:
    """Return ``function``, changed so that PyTorch does not compile it as a part of a compiled caller.

    Calls of others cost less than with ``torch.compiler.disable`` alone.
    """
    apart = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (apart if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return cast(_F, call)
