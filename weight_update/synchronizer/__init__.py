"""When trainer and explorers synchronize, and by which road."""

from weight_update.synchronizer.checkpoints import CheckpointStore
from weight_update.synchronizer.manifests import Manifest

__all__ = ["CheckpointStore", "Manifest"]
