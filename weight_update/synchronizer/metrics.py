"""The metrics of one ``sync_weight()``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PREFIX = "sync/"


class Metrics(dict[str, Any]):
    """The metrics of one ``sync_weight()``, ready for a logger.

    Its items are numbers whose names begin with ``sync/``, so that ``metrics.update(...)`` and a logger get
    names that collide with no others: ``sync/version`` (in force in an explorer, or newest published by a
    trainer; absent before the first), ``sync/step`` (of this side), ``sync/seconds`` (duration of the call),
    ``sync/bytes`` (trainer: bytes that it sent or wrote; explorer: size of its weights), ``sync/waited``
    (seconds of waiting for the other side) and ``sync/failed`` (1 if there is a reason, else 0).

    The short names work as well: ``metrics["version"]``, ``"reason" in metrics``, ``metrics.get("reason")``.
    The reason is a text, and no item. Copies such as ``dict(metrics)``, ``{**metrics}`` and
    ``metrics.copy()`` have the items only: they lose the short names and the reason.

    Args:
        fields: values by short name.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = {**fields, "failed": int("reason" in fields)}
        numbers = {name: value for name, value in self._fields.items() if isinstance(value, (int, float))}
        super().__init__({_PREFIX + name: value for name, value in numbers.items()})

    def __missing__(self, name: str) -> Any:
        return self._fields[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._fields

    def get(self, name: str, default: Any = None) -> Any:
        """Return an item, or a field by its short name."""
        try:
            return self[name]
        except KeyError:
            return default
