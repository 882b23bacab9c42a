"""Marks of tests: parameters with which a test is slow, and versions of Python that fail it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pytest

random_interrupts = pytest.mark.skipif(
    sys.version_info[:2] == (3, 14),
    reason="in CPython 3.14 a signal handler that raises may leave a lock held (CPython issue 148874)",
)
"""Mark of tests in which signal handlers raise at random moments."""


def slow(*values: Any) -> Any:
    """Return a parameter set that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def quick_for(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return ``values`` as parameters, of which all but ``quick`` are marked slow."""
    return [value if value in quick else slow(value) for value in values]
