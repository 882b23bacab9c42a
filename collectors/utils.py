"""The functions that TorchRL has in a module of this name."""

from torchrl.collectors.utils import split_trajectories

__all__ = ["split_trajectories"]
