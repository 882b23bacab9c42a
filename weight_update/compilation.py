"""Functions that PyTorch leaves out of what it compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(function: _F) -> _F:
    """Return ``function``, changed so that PyTorch does not compile it as a part of a compiled caller."""
    plain: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return plain
