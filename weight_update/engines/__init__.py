"""Inference engines as receivers; none of them is imported here."""

from weight_update.engines.exclusive import ExclusiveEngine
from weight_update.engines.sglang import SGLangEngine
from weight_update.engines.vllm import VLLMEngine, WorkerExtension

__all__ = ["ExclusiveEngine", "SGLangEngine", "VLLMEngine", "WorkerExtension"]
