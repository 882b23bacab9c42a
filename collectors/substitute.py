"""Objects that stand in the place of others."""

from __future__ import annotations

from typing import Any


class Substitute:
    """A substitute for an object, from which it takes all attributes that it lacks."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # not initialized yet, as while being copied
            raise AttributeError(name)
        return getattr(self._original, name)

    def __repr__(self) -> str:
        return repr(self._original)
