"""Adapters for inference engines, which are receivers; importing this imports no engine."""

from weight_update.engines.exclusive import ExclusiveEngine
from weight_update.engines.sglang import SGLangEngine
from weight_update.engines.transformers import Answer, TransformersEngine
from weight_update.engines.vllm import VLLMEngine, WorkerExtension

__all__ = ["Answer", "ExclusiveEngine", "SGLangEngine", "TransformersEngine", "VLLMEngine", "WorkerExtension"]
