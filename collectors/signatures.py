"""Signatures of collectors, which list the options that they pass on to TorchRL's."""

from __future__ import annotations

import inspect
from typing import Any


def signature_of(cls: Any) -> inspect.Signature:
    """Return the parameters of a class, with those of its ``_passes_options_to`` in place of ``**options``.

    Without that attribute, it passes them on to the ``__init__`` of TorchRL's class.
    """
    signature = inspect.signature(cls.__init__)
    _self, *ours = signature.parameters.values()
    own = {one.name: one for one in ours if one.kind is not one.VAR_KEYWORD}
    if len(own) < len(ours):
        other = inspect.signature(getattr(cls, "_passes_options_to", _torchrl_base(cls).__init__))
        options = [
            one for one in other.parameters.values() if one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD)
        ]
        own |= {one.name: one for one in options if one.name not in own}
    return signature.replace(parameters=[*own.values()])


def _torchrl_base(cls: type) -> Any:
    """Return TorchRL's class from which a collector derives, and which has named options."""
    return next(one for one in cls.__mro__ if one.__module__.startswith("torchrl.") and _has_options(one))


def _has_options(cls: Any) -> bool:
    return any(one.kind is one.KEYWORD_ONLY for one in inspect.signature(cls.__init__).parameters.values())
