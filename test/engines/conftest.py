"""Settings for the tests against real engines, on machines without a GPU."""

from __future__ import annotations

import importlib.util
import os

import torch

if importlib.util.find_spec("vllm"):
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not torch.accelerator.is_available():  # vLLM's CUDA build calls these without asking
        torch.accelerator.synchronize = lambda *args: None
        torch.accelerator.empty_cache = lambda: None
