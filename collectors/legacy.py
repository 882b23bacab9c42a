"""TorchRL's weight updaters, for programs that still pass ``weight_updater=`` to a collector."""

from torchrl.collectors import (
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

__all__ = [
    "MultiProcessedWeightUpdater",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
