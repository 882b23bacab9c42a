"""TorchRL's weight updaters, for programs that still pass ``weight_updater=`` to a collector."""

from torchrl.collectors import MultiProcessedWeightUpdater, VanillaWeightUpdater, WeightUpdaterBase

__all__ = ["MultiProcessedWeightUpdater", "VanillaWeightUpdater", "WeightUpdaterBase"]
