"""Settings for the tests against real engines, on machines without a GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm"):
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not torch.accelerator.is_available():  # vLLM's CUDA build calls these without asking
        torch.accelerator.synchronize = lambda *args: None
        torch.accelerator.empty_cache = lambda: None


# Of the tests with vLLM; vllm_parts imports it.


@pytest.fixture(scope="module")
def vllm_config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a ``VllmConfig`` of the test module's MODEL, while vLLM's groups of one process exist."""
    from vllm_parts import config, parallel_state

    found = config(tmp_path_factory.mktemp("model"), **getattr(request.module, "MODEL", {}))
    state = parallel_state(found)
    next(state)
    yield found
    next(state, None)


@pytest.fixture
def worker(vllm_config: Any) -> Iterator[Any]:
    from vllm_parts import OneWorker, vllm_model

    made = OneWorker(vllm_config, vllm_model(vllm_config))
    yield made
    made.close()


@pytest.fixture
def policy() -> torch.nn.Module:
    from vllm_parts import trainer_model

    return trainer_model()
