"""SGLang's ``Engine`` as a receiver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from weight_update.engines.exclusive import ExclusiveEngine, batches

__all__ = ["SGLangEngine"]


class Engine(Protocol):
    """What is used of ``sglang.Engine``.

    Source: ``python/sglang/srt/entrypoints/engine.py`` in SGLang, and *SGLang for RL Systems* in its manual.
    """

    def update_weights_from_tensor(
        self,
        named_tensors: list[tuple[str, torch.Tensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> tuple[bool, str]:
        """Load some weights on all ranks; whether that went well, and a message."""

    def flush_cache(self) -> Any:
        """Forget cached prefixes; the answer has ``success``."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate."""


class SGLangEngine(ExclusiveEngine):
    """Loads weights into an ``sglang.Engine`` of this process, under Hugging Face's names.

    Generate through :meth:`generate`, so that generation and updates take turns: the methods of an ``Engine``
    are not for several threads at once.

    Args:
        engine: the ``sglang.Engine``.
        device: where tensors are put before SGLang's processes open them: the CPU, or a CUDA device that they
            can open.
        batch_bytes: about so many bytes are handed to SGLang at once.
        loads_in_chunks: see :attr:`InferenceEngine.loads_in_chunks`.
        timeout: see :class:`ExclusiveEngine`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        device: torch.device | str = "cpu",
        batch_bytes: int = 512 << 20,
        loads_in_chunks: bool = False,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(loads_in_chunks=loads_in_chunks, timeout=timeout)
        self._engine, self._device, self._batch_bytes = engine, torch.device(device), batch_bytes

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``Engine.generate``, not during an update; raises as :meth:`generating`."""
        with self.generating():
            return self._engine.generate(*args, **kwargs)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """See :meth:`InferenceEngine.load_weights`.

        Raises:
            RuntimeError: SGLang did not load them; with its message.
        """
        for batch in batches(weights, self._batch_bytes):
            # Copies: SGLang moves the whole storage of a tensor into shared memory, also that of a view.
            named = [(name, tensor.to(self._device, copy=True)) for name, tensor in batch]
            good, message = self._engine.update_weights_from_tensor(named, flush_cache=False)
            if not good:
                raise RuntimeError(f"SGLang did not load {batch[0][0]!r} to {batch[-1][0]!r}: {message}")

    def finish_update(self, version: int) -> None:
        """Forget cached prefixes, which were computed with other weights, and let generation go on.

        Raises:
            RuntimeError: SGLang did not forget them.
        """
        if not self._engine.flush_cache().success:
            raise RuntimeError("SGLang did not flush its cache; are requests running past generate()?")
        super().finish_update(version)
