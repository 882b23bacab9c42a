"""Models keep their receivers alive, so that a worker may drop a scheme and keep only its model."""

from __future__ import annotations

from typing import Any

_ATTRIBUTE = "_weight_update_receivers"


class _Kept(set[Any]):
    """The connected receivers of one model, as an attribute of it; a copy of the model has none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kept, ()


def keep_alive(model: Any, receiver: Any) -> None:
    """Have ``model`` refer to ``receiver``, if it is an object that can (a plain dict cannot)."""
    while hasattr(model, "__dict__") and receiver not in vars(model).get(_ATTRIBUTE, ()):
        # Again if let_go() removes the set just now. There is no lock: a forked child could find it held.
        vars(model).setdefault(_ATTRIBUTE, _Kept()).add(receiver)


def let_go(model: Any, receiver: Any) -> None:
    """End :func:`keep_alive`."""
    if hasattr(model, "__dict__") and (kept := vars(model).get(_ATTRIBUTE)) is not None:
        kept.discard(receiver)
        if not kept:
            for late in list(vars(model).pop(_ATTRIBUTE, ())):  # another thread has just added it
                keep_alive(model, late)
