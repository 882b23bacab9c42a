"""Updates to measure patches on, and those made by chance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from weight_update.wire.schema import WeightSchema

__all__ = ["MOVES", "Move", "Update", "by_chance", "change", "layered"]

Move = Literal["1..4 ulp", "random bits"]
MOVES: tuple[Move, ...] = ("1..4 ulp", "random bits")

_LARGE_MEGABYTES = 50  # from here on matrices are as wide as those of a model of a billion parameters


@dataclass(frozen=True, eq=False)
class Update:
    """One step of a model from one version to the next.

    Attributes:
        name: what was done.
        old: what receivers have, by name, in their dtypes.
        new: the trainer's tensors afterwards, perhaps in wider dtypes.
    """

    name: str
    old: dict[str, torch.Tensor]
    new: dict[str, torch.Tensor]

    @property
    def schema(self) -> WeightSchema:
        """The layout in the receivers' dtypes."""
        return WeightSchema.of(self.old)


def layered(megabytes: float) -> dict[str, torch.Tensor]:
    """Weights in bfloat16 with the shapes of transformer layers, at least one; deviation 0.02."""
    width = 2048 if megabytes >= _LARGE_MEGABYTES else 256
    shapes = {
        "qkv": (3 * width, width),
        "out": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
        "norm": (width,),
    }
    layer = 2 * sum(math.prod(shape) for shape in shapes.values())
    random = torch.Generator().manual_seed(0)
    return {
        f"{index}.{name}": torch.randn(shape, generator=random).mul_(0.02).to(torch.bfloat16)
        for index in range(max(1, round(megabytes * 1e6 / layer)))
        for name, shape in shapes.items()
    }


def by_chance(old: dict[str, torch.Tensor], fraction: float, move: Move) -> Update:
    """An update in which each element changes with probability ``fraction``."""
    new = {name: value.clone() for name, value in old.items()}
    change(new, fraction, move, np.random.default_rng(0))
    return Update(f"{fraction:.2%}, {move}", old, new)


def change(
    weights: dict[str, torch.Tensor], fraction: float, move: Move, random: np.random.Generator
) -> None:
    """Change elements of bfloat16 ``weights``, each with probability ``fraction``, in place.

    They move by 1 to 4 steps between neighbouring numbers, up or down, or get other bits.
    """
    for value in weights.values():
        bits = value.view(torch.uint16).numpy().reshape(-1)
        places = _places(bits.size, fraction, random)
        if move == "random bits":
            bits[places] ^= random.integers(1, 1 << 16, places.size, np.uint16)
        else:
            steps = random.integers(1, 5, places.size) * random.choice([-1, 1], places.size)
            bits[places] += steps.astype(np.uint16)  # modulo 2**16


def _places(size: int, fraction: float, random: np.random.Generator) -> np.ndarray:
    """Ascending positions below ``size``, each there with probability ``fraction``."""
    expected = size * fraction
    gaps = random.geometric(fraction, int(expected + 6 * math.sqrt(expected)) + 10)
    places = np.cumsum(gaps) - 1
    return places[places < size]
