"""What is to be measured, and how often."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

__all__ = ["Plan", "numbers", "sizes"]


@dataclass(frozen=True)
class Plan:
    """The options of one run.

    Attributes:
        sizes: model sizes in MB.
        tensors: numbers of tensors.
        workers: numbers of workers.
        schemes: which of our sides.
        repeats: turns of each side at the largest sizes; small updates get ten times as many.
        timeout: seconds for one answer of a side.
        start_timeout: seconds until all processes of a side are connected; each imports torch first.
        budget: seconds after which a slow side gets no further turns.
        tensors_megabytes: size of the model in the many-tensors case.
        tensors_workers: workers in the many-tensors case.
        rounds: how often the processes of a side are started, where sides do not live at the same time.
        many: beyond this number of tensors, TorchRL is also measured without a limit on open files.
    """

    sizes: tuple[float, ...] = (1.0, 100.0, 1000.0)
    tensors: tuple[int, ...] = (16, 1000, 5000)
    workers: tuple[int, ...] = (1, 2, 4, 8)
    schemes: tuple[str, ...] = ("shared", "process")
    repeats: int = 10
    timeout: float = 60.0
    start_timeout: float = 120.0
    budget: float = 30.0
    tensors_megabytes: float = 5.0
    tensors_workers: int = 2
    many: int = 200
    rounds: int = 1

    def for_one_round(self) -> Plan:
        """This plan with the part of the turns that falls to one of its rounds."""
        return replace(self, repeats=math.ceil(self.repeats / self.rounds), budget=self.budget / self.rounds)

    def repeats_for(self, megabytes: float) -> int:
        """Turns of each side at this size."""
        return self.repeats * 10 if megabytes <= 10 else self.repeats

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Our side and TorchRL's, for each scheme."""
        return tuple((scheme, f"torchrl-{scheme}") for scheme in self.schemes)

    @property
    def largest(self) -> float:
        """The largest size, where stall and memory are measured."""
        return max(self.sizes)

    @staticmethod
    def say(line: str) -> None:
        """Tell what is going on."""
        print(f"... {line}", file=sys.stderr, flush=True)


def numbers(text: str) -> tuple[int, ...]:
    """An option such as ``1,2,4``."""
    return tuple(int(part) for part in text.split(","))


def sizes(text: str) -> tuple[float, ...]:
    """An option such as ``0.5,100``."""
    return tuple(float(part) for part in text.split(","))
