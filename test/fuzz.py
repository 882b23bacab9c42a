"""How many examples Hypothesis makes, and that it sets no limits of time: a busy machine is slow."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

thorough = False
"""Whether the slow tests run, too; set by conftest.py."""


def examples(count: int, **options: Any) -> settings:
    """Return settings for ``count`` examples in ``make test-all``, and a fifth of them in ``make test``."""
    return settings(max_examples=count if thorough else max(10, count // 5), deadline=None, **options)
