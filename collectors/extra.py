"""A check that TorchRL is installed; imported before the modules that need it."""

from __future__ import annotations

from importlib.util import find_spec

__all__: list[str] = []

try:
    _found = find_spec("torchrl") is not None
except ValueError:  # a module without a spec takes its place
    _found = False
if not _found:
    raise ImportError("collectors needs torchrl: pip install weight-update[collectors]", name="torchrl")
