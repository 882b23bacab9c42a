"""The UPDATE frames of one version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weight_update.wire.extra_state import decode_extra, encode_extra
from weight_update.wire.frames import Kind, WeightChunk
from weight_update.wire.schema import WeightSchema

__all__ = ["Step", "extra_of", "frame_of", "frames_of", "payloads_of"]


@dataclass(frozen=True)
class Step:
    """The data of an update beside its tensors.

    Attributes:
        version: number of the version.
        extra: extra state of modules, encoded by :func:`~weight_update.wire.extra_state.encode_extra`.
        commit: whether workers apply the update at once; if False it is staged until COMMIT or ABORT.
        group_commit: name of several models that switch together; see :func:`~weight_update.send_together`.
    """

    version: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    commit: bool = True
    group_commit: str | None = None

    @classmethod
    def of(cls, version: int, extra: Mapping[str, Any], **how: Any) -> Step:
        """Return a step that carries the extra state ``extra``."""
        return cls(version, {name: encode_extra(value) for name, value in extra.items()}, **how)

    def committed(self) -> Step:
        """Return this step for a worker that joins after the commit and applies it at once, on its own."""
        return replace(self, commit=True, group_commit=None)


def frames_of(
    step: Step,
    schema: WeightSchema,
    encoding: str,
    payloads: Sequence[torch.Tensor],
    base: int | None = None,
) -> list[WeightChunk]:
    """Return one frame for each payload; the first carries the extra state.

    Args:
        step: the update.
        schema: schema of the weights.
        encoding: wire name of the encoding.
        payloads: one payload or more.
        base: version that the payloads change; None if they are whole.
    """
    count = len(payloads)
    return [
        frame_of(step, schema, encoding, index, count, payload, base)
        for index, payload in enumerate(payloads)
    ]


def frame_of(
    step: Step,
    schema: WeightSchema,
    encoding: str,
    index: int,
    count: int,
    payload: torch.Tensor,
    base: int | None = None,
) -> WeightChunk:
    """Return one of the ``count`` frames of :func:`frames_of`."""
    header = {
        "version": step.version,
        "base": base,
        "schema": schema.digest,
        "encoding": encoding,
        "index": index,
        "count": count,
        "commit": step.commit,
        "group": step.group_commit,
        "extra": step.extra if index == 0 else {},
    }
    return WeightChunk(Kind.UPDATE, header, payload)


def payloads_of(chunks: Sequence[WeightChunk]) -> list[torch.Tensor]:
    """Return the payloads of the frames of one update, an empty one where a frame has none."""
    empty = torch.empty(0, dtype=torch.uint8)
    return [empty if chunk.payload is None else chunk.payload for chunk in chunks]


def extra_of(chunks: Sequence[WeightChunk]) -> dict[str, Any]:
    """Return the extra state that the frames of one update carry."""
    return {name: decode_extra(value) for name, value in chunks[0].header["extra"].items()}
