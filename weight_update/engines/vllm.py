"""Adapter for vLLM's ``LLM``."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any

import torch

from weight_update.engines.exclusive import ExclusiveEngine, batches
from weight_update.wire.schema import WeightSchema


class VLLMEngine(ExclusiveEngine):
    """Loads weights into a ``vllm.LLM`` of this process, under Hugging Face's names.

    vLLM's workers load the weights by ``model.load_weights``, which picks each worker's share of split
    weights::

        llm = LLM(..., worker_extension_cls="weight_update.engines.vllm.WorkerExtension")
        engine = VLLMEngine(llm)
        scheme.init_on_receiver(model=engine, worker_idx=0)
        scheme.connect()
        outputs = engine.generate(prompts, sampling_params)

    The workers must be processes of this machine and user: weights reach them in shared memory, and only the
    address of that memory goes through ``collective_rpc``. Generate through :meth:`generate`, so that
    generation and updates take turns: several threads must not call the methods of an ``LLM`` at once.
    Source: ``collective_rpc`` and ``reset_prefix_cache`` in ``vllm/entrypoints/llm.py``.

    Args:
        llm: the ``vllm.LLM``.
        batch_bytes: size of the shared memory, unless a single weight is larger.
        loads_in_chunks: as :attr:`~weight_update.InferenceEngine.loads_in_chunks`.
        timeout: as for :class:`ExclusiveEngine`; also the limit of each call of the workers.
    """

    def __init__(
        self, llm: Any, *, batch_bytes: int = 256 << 20, loads_in_chunks: bool = False, timeout: float = 60.0
    ) -> None:
        super().__init__(loads_in_chunks=loads_in_chunks, timeout=timeout)
        self._llm, self._batch_bytes = llm, batch_bytes

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``LLM.generate``, not during an update; raise as :meth:`ExclusiveEngine.generating`."""
        with self.generating():
            return self._llm.generate(*args, **kwargs)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Hand all of ``weights`` to vLLM's workers; an exception of ``collective_rpc`` is raised."""
        fd = os.memfd_create("weight_update")
        os.fchmod(fd, 0o600)
        try:
            for batch in batches(weights, self._batch_bytes):
                named = dict(batch)
                schema = WeightSchema.of(named)
                os.ftruncate(fd, max(os.fstat(fd).st_size, schema.nbytes, 1))
                views = schema.views(_mapped(fd, schema.nbytes))
                for view, tensor in zip(views, named.values(), strict=True):
                    view.copy_(tensor)
                where = f"/proc/{os.getpid()}/fd/{fd}"
                self._llm.collective_rpc(
                    "load_shared_weights", timeout=self.timeout, args=(where, schema.to_header())
                )
        finally:
            os.close(fd)

    def finish_update(self, version: int) -> None:
        """Drop cached prefixes, which were computed with other weights, and let generation continue.

        Raises:
            RuntimeError: vLLM did not drop them.
        """
        if self._llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM did not reset its prefix cache; are requests running past generate()?")
        super().finish_update(version)


class WorkerExtension:
    """Extension of vLLM's workers for :class:`VLLMEngine`; give its full name as ``worker_extension_cls``."""

    model_runner: Any
    device: torch.device

    def load_shared_weights(self, where: str, header: dict[str, Any]) -> None:
        """Load weights that :class:`VLLMEngine` put into shared memory.

        Args:
            where: path of the memory.
            header: layout of the weights, as :meth:`~weight_update.WeightSchema.to_header` returns it.
        """
        schema = WeightSchema.from_header(header)
        fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
        try:
            views = schema.views(_mapped(fd, schema.nbytes, access=mmap.ACCESS_COPY))
        finally:
            os.close(fd)
        # Copies: a loader may keep a tensor, and the memory is used again.
        weights = (
            (name, view.to(self.device, copy=True)) for name, view in zip(schema.names, views, strict=True)
        )
        self.model_runner.model.load_weights(weights=weights)


def _mapped(fd: int, nbytes: int, access: int = mmap.ACCESS_DEFAULT) -> torch.Tensor:
    """Return the first bytes of a file, mapped for as long as the tensor is used."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(fd, nbytes, access=access), dtype=torch.uint8)
