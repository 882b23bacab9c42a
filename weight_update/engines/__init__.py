"""Adapters for inference engines, which are receivers; importing this imports no engine."""

from weight_update.engines.exclusive import ExclusiveEngine
from weight_update.engines.sglang import SGLangEngine, SGLangServer
from weight_update.engines.transformers import Answer, TransformersEngine

__all__ = ["Answer", "ExclusiveEngine", "SGLangEngine", "SGLangServer", "TransformersEngine"]
