"""Adapter for SGLang's ``Engine``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from weight_update.engines.exclusive import ExclusiveEngine, batches


class SGLangEngine(ExclusiveEngine):
    """Loads weights into an ``sglang.Engine`` of this process, under Hugging Face's names.

    Generate through :meth:`generate`, so that generation and updates take turns: several threads must not
    call the methods of an ``Engine`` at once::

        engine = SGLangEngine(sglang.Engine(model_path=...), device="cuda")
        scheme.init_on_receiver(model=engine, worker_idx=0)
        scheme.connect()
        answer = engine.generate(prompt, {"temperature": 0.6})

    Source: ``update_weights_from_tensor`` and ``flush_cache`` in ``python/sglang/srt/entrypoints/engine.py``
    of SGLang, and *SGLang for RL Systems* in its manual.

    Args:
        engine: the ``sglang.Engine``.
        device: device from which SGLang's processes open the tensors: the CPU, or a CUDA device that they
            can open.
        batch_bytes: number of bytes that are handed to SGLang at once, about.
        loads_in_chunks: as :attr:`~weight_update.InferenceEngine.loads_in_chunks`.
        timeout: as for :class:`ExclusiveEngine`.
    """

    def __init__(
        self,
        engine: Any,
        *,
        device: torch.device | str = "cpu",
        batch_bytes: int = 512 << 20,
        loads_in_chunks: bool = False,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(loads_in_chunks=loads_in_chunks, timeout=timeout)
        self._engine, self._device, self._batch_bytes = engine, torch.device(device), batch_bytes

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``Engine.generate``, not during an update; raise as :meth:`ExclusiveEngine.generating`."""
        with self.generating():
            return self._engine.generate(*args, **kwargs)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Hand all of ``weights`` to SGLang, a batch at a time.

        Raises:
            RuntimeError: SGLang did not load a batch; its message is included.
        """
        for batch in batches(weights, self._batch_bytes):
            # Copies: SGLang moves the whole storage of a tensor into shared memory, also that of a view.
            named = [(name, tensor.to(self._device, copy=True)) for name, tensor in batch]
            good, message = self._engine.update_weights_from_tensor(named, flush_cache=False)
            if not good:
                raise RuntimeError(f"SGLang did not load {batch[0][0]!r} to {batch[-1][0]!r}: {message}")

    def finish_update(self, version: int) -> None:
        """Drop cached prefixes, which were computed with other weights, and let generation continue.

        Raises:
            RuntimeError: SGLang did not drop them.
        """
        if not self._engine.flush_cache().success:
            raise RuntimeError("SGLang did not flush its cache; are requests running past generate()?")
        super().finish_update(version)
