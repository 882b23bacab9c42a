"""Choose the parameters with which a test is not slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a parameter set that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def quick_for(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return ``values`` as parameters, of which all but ``quick`` are marked slow."""
    return [value if value in quick else slow(value) for value in values]
