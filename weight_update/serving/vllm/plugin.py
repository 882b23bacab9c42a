"""Registration of the backend ``weight_update`` with vLLM."""

from __future__ import annotations

BACKEND = "weight_update"
"""Name for ``WeightTransferConfig.backend``."""


def register() -> None:
    """Register the backend for vLLM's workers and for trainers; calling it again is fine.

    vLLM calls it in each of its processes, through the entry point ``vllm.general_plugins``. A trainer, in
    which vLLM loads no plugins, calls it by importing ``TrainerInitInfo``. Source: ``register_engine`` in
    ``vllm/distributed/weight_transfer/factory.py`` of vLLM 0.33.
    """
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    package = __name__.rpartition(".")[0]
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, f"{package}.backend", "VLLMBackend")
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, f"{package}.trainer", "Trainer")
