"""SGLang as a receiver: an engine of this process, or a server; importing this does not import sglang."""

from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.engines.sglang.loader import load
from weight_update.engines.sglang.server import SGLangServer

__all__ = ["SGLangEngine", "SGLangServer", "load"]
