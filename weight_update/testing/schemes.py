"""The contract of every scheme: three groups of tests with real workers."""

from __future__ import annotations

from weight_update.testing.joining import JoiningTests
from weight_update.testing.lifecycle import LifecycleTests
from weight_update.testing.updating import UpdatingTests


class SchemeContract(JoiningTests, UpdatingTests, LifecycleTests):
    """Tests of one scheme; subclass it and implement ``make_scheme``.

    Set ``method`` to ``"thread"`` for a scheme whose receivers live in the sender's process.
    """
