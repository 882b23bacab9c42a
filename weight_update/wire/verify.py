"""Check of the weights to be sent against the schema that was agreed on."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch

from weight_update.errors import SchemaMismatchError, UnsupportedSourceError
from weight_update.wire.memory import memory_identity
from weight_update.wire.schema import WeightSchema, differences, untied, wrapper_hint

__all__ = ["require_agreed"]

# these run for thousands of tensors in each update, so without interpreted code for each tensor
_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")
_LAYOUT, _IS_META = operator.attrgetter("layout"), operator.attrgetter("is_meta")


def require_agreed(schema: WeightSchema, tensors: Mapping[str, torch.Tensor], *, more: bool) -> None:
    """Check that ``tensors`` fit a schema and have values.

    Args:
        schema: the schema that was agreed on.
        tensors: tensors by name.
        more: whether further names are allowed.

    Raises:
        UnsupportedSourceError: tensors are on the meta device, or cannot be sent at all.
        SchemaMismatchError: names do not fit; the error has one line for each.
    """
    if any(map(_IS_META, tensors.values())):
        hollow = [name for name, tensor in tensors.items() if tensor.is_meta]
        raise UnsupportedSourceError(f"on the meta device, without values to send: {', '.join(hollow[:10])}")
    if _exact(schema, tensors, more=more):
        return
    given = WeightSchema.of(tensors)
    problems = [*differences(schema, given, "the weights given", more=more), *untied(schema, given)]
    if problems:
        hint = wrapper_hint({"the weights given": given.names, "the weights agreed on": schema.names})
        raise SchemaMismatchError(
            f"the weights given are not those agreed on in connect() ({len(problems)} differences{hint}):",
            tuple(problems),
        )


def _exact(schema: WeightSchema, tensors: Mapping[str, torch.Tensor], *, more: bool) -> bool:
    """Whether nothing differs, not even a dtype; a fast check."""
    values = list(tensors.values())
    if tuple(tensors) != schema.names:
        values = [tensors[name] for name in schema.names if name in tensors]
    return (
        len(values) == len(schema.names)
        and (more or len(values) == len(tensors))
        and all(map(operator.eq, map(_SHAPE, values), schema.shapes))
        and all(map(operator.is_, map(_DTYPE, values), schema.dtypes))
        and set(map(_LAYOUT, values)) <= {torch.strided}
        and all(_same_memory(values[a], values[b]) for a, b in schema.ties)
    )


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or memory_identity(a) == memory_identity(b)
