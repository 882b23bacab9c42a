"""vLLM's workers as receivers; importing this imports no vLLM."""

import importlib

from weight_update.serving.vllm.control import LocalLLM, VLLMServer, connect_servers
from weight_update.serving.vllm.joining import PauseMode, init_info
from weight_update.serving.vllm.plugin import register

__all__ = ["LocalLLM", "PauseMode", "VLLMServer", "connect_servers", "init_info", "register"]

_NEED_VLLM = {
    "InitInfo": "backend",
    "Trainer": "trainer",
    "TrainerInitInfo": "trainer",
    "VLLMBackend": "backend",
}


def __getattr__(name: str) -> object:
    if name not in _NEED_VLLM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEED_VLLM[name]}"), name)
