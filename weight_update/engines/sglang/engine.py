"""Adapter for SGLang's ``Engine``."""

from __future__ import annotations

from typing import Any

import torch

from weight_update.engines.exclusive import ExclusiveEngine
from weight_update.engines.sglang.session import LOADER, SGLangCalls, SGLangEngineBase
from weight_update.errors import undo_on_error


class SGLangEngine(SGLangEngineBase, ExclusiveEngine):
    """Engine that loads weights into an ``sglang.Engine`` of this process, under Hugging Face's names.

    Generate through :meth:`generate`, so that generation and updates take turns: several threads must not
    call the methods of an ``Engine`` at once::

        engine = SGLangEngine(
            sglang.Engine(model_path=..., custom_weight_loader=["weight_update.engines.sglang.load"])
        )
        scheme.init_on_receiver(model=engine, worker_idx=0)
        scheme.connect()
        answer = engine.generate(prompt, {"temperature": 0.6})

    After each update, cached prefixes are dropped, and ``meta_info["weight_version"]`` of answers is the
    scheme's version. Weights reach SGLang's processes through shared memory, and
    :func:`weight_update.engines.sglang.load` loads them there.
    Source: ``begin_weight_update``, ``update_weights_from_tensor``, ``end_weight_update`` and ``flush_cache``
    in ``sglang/srt/entrypoints/engine.py``.

    Args:
        engine: the ``sglang.Engine``.
        batch_bytes: bytes of shared memory, unless the weights of one module are larger.
        loads_changes: as :attr:`~weight_update.InferenceEngine.loads_changes`.
        loads_in_chunks: as :attr:`~weight_update.InferenceEngine.loads_in_chunks`.
        timeout: as for :class:`~weight_update.engines.ExclusiveEngine`.

    Attributes:
        last_patch: for each weight that the last patch wrote, whether the elements were written in place.
            False: SGLang stores the weight in another form, or transforms its module after loading, so it was
            loaded as a whole.

    Raises:
        RuntimeError: the engine was not started with our loader.
    """

    def __init__(
        self,
        engine: Any,
        *,
        batch_bytes: int = 256 << 20,
        loads_changes: bool = True,
        loads_in_chunks: bool = False,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(loads_in_chunks=loads_in_chunks, timeout=timeout)
        self._engine = engine
        self._prepare(_EngineCalls(engine), batch_bytes=batch_bytes, loads_changes=loads_changes)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``Engine.generate``, not during an update; raise as :meth:`ExclusiveEngine.generating`."""
        with self.generating():
            return self._engine.generate(*args, **kwargs)

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        with undo_on_error(self._end_turn):  # the version before stays in force
            self._open_session()

    def finish_update(self, version: int) -> None:
        self._close_session(version)
        super().finish_update(version)

    def abort_update(self, version: int) -> None:
        try:
            self._abort_session()
        finally:
            super().abort_update(version)


class _EngineCalls(SGLangCalls):
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def info(self) -> dict[str, Any]:
        return dict(self._engine.get_server_info())

    def begin(self) -> None:
        _require("begin_weight_update", self._engine.begin_weight_update())

    def load(self, order: str) -> None:
        named = [(order, torch.empty(0, device="cpu"))]
        result = self._engine.update_weights_from_tensor(named, load_format=LOADER, flush_cache=False)
        _require("update_weights_from_tensor", result)

    def end(self) -> None:
        _require("end_weight_update", self._engine.end_weight_update())

    def flush(self) -> None:
        result = self._engine.flush_cache()
        _require("flush_cache", (result.success, result.message or "are requests running past generate()?"))

    def set_version(self, version: int) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        # Engine has no method for it; the server's route makes this call.
        request = UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        self._engine.loop.run_until_complete(self._engine.tokenizer_manager.update_weight_version(request))


def _require(call: str, result: tuple[bool, str]) -> None:
    good, message = result
    if not good:
        raise RuntimeError(f"SGLang's {call} failed: {message}")
