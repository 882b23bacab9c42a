"""When trainer and explorers synchronize, and by which road."""

from weight_update.synchronizer.machine import Machine
from weight_update.synchronizer.plan import RunningStatus, SyncMethod, SyncPlan, SyncStyle

__all__ = ["Machine", "RunningStatus", "SyncMethod", "SyncPlan", "SyncStyle"]
