"""Says what to install if TorchRL is missing; imported before anything that needs it."""

from __future__ import annotations

from importlib.util import find_spec

__all__: list[str] = []

try:
    _found = find_spec("torchrl") is not None
except ValueError:  # a module without a spec was put in its place
    _found = False
if not _found:
    raise ImportError("collectors needs torchrl: pip install weight-update[collectors]", name="torchrl")
