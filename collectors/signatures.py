"""Signatures of collectors, which list the options that they pass on to TorchRL's."""

from __future__ import annotations

import inspect
from typing import Any


def with_options(ours: inspect.Signature, theirs: inspect.Signature) -> inspect.Signature:
    """Return ``ours``, with the options of ``theirs`` in the place of ``**options``."""
    own = {name: one for name, one in ours.parameters.items() if one.kind is not one.VAR_KEYWORD}
    if len(own) == len(ours.parameters):
        return ours
    options = [one for one in theirs.parameters.values() if one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD)]
    more = [one for one in options if one.name not in own]
    return ours.replace(parameters=[*own.values(), *more])


def signature_of(cls: Any) -> inspect.Signature:
    """Return the parameters of a class, which passes ``**options`` on to its ``_passes_options_to``.

    Without that attribute, it passes them on to the ``__init__`` of TorchRL's class.
    """
    other = getattr(cls, "_passes_options_to", torchrl_base(cls).__init__)
    signature = with_options(inspect.signature(cls.__init__), inspect.signature(other))
    return signature.replace(parameters=[*signature.parameters.values()][1:])  # without self


def torchrl_base(cls: type) -> Any:
    """Return TorchRL's class from which a collector derives, and which names its options."""
    return next(one for one in cls.__mro__ if one.__module__.startswith("torchrl.") and _names_options(one))


def _names_options(cls: Any) -> bool:
    """Return whether ``__init__`` of a class has named options, not only ``*args`` and ``**kwargs``."""
    return any(one.kind is one.KEYWORD_ONLY for one in inspect.signature(cls.__init__).parameters.values())
