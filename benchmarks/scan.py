"""The time to find the elements that changed: ``python -m benchmarks scan``.

It is compared with one plain copy of the same weights, which no program that reads them all can beat by
much, and with the obvious way: compare each tensor with its old value, then ``nonzero``, then gather.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.report import Figure, Table, machine, parser, publish, ratio
from weight_update.encodings.patch.diff_cpu import Scanner
from weight_update.wire.schema import WeightSchema

_PERIOD = 4_000_037  # elements after which the pattern of changes repeats; a prime

Side = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """The weights of one measurement.

    Attributes:
        name: as shown.
        megabytes: size in the receivers' dtype.
        tensors: number of tensors.
        live: dtype of the trainer.
        kept: dtype of the receivers.
    """

    name: str
    megabytes: float
    tensors: int
    live: torch.dtype
    kept: torch.dtype = torch.bfloat16


class Model:
    """Live weights, an equal snapshot, and memory to copy to."""

    def __init__(self, case: Case) -> None:
        each = int(case.megabytes * 1e6 / case.kept.itemsize / case.tensors)
        block = torch.randn(min(each, 1 << 20), generator=torch.Generator().manual_seed(0))
        block = block.to(case.kept).to(case.live).repeat(-(-each // len(block)))[:each]
        self.live = [block.clone() for _ in range(case.tensors)]
        self.schema = WeightSchema.of({str(i): x.to(case.kept) for i, x in enumerate(self.live)})
        self.snapshot, self._other = (torch.zeros(self.schema.nbytes, dtype=torch.uint8) for _ in range(2))
        self.kept, self._target = self.schema.views(self.snapshot), self.schema.views(self._other)
        torch._foreach_copy_(self.kept, self.live)

    def flip(self, changed: torch.Tensor) -> None:
        """Flip the sign of the elements that ``changed`` marks; a second call undoes it."""
        bits = torch.int16 if self.live[0].element_size() == 2 else torch.int32
        signs = changed.to(bits) << (8 * bits.itemsize - 1)
        at = 0
        for tensor in self.live:
            flat, done = tensor.view(bits), 0
            while done < len(flat):
                count = min(len(flat) - done, len(signs) - at)
                flat[done : done + count] ^= signs[at : at + count]
                done, at = done + count, (at + count) % len(signs)

    def sides(self) -> dict[str, Side]:
        """Return the actions that are measured, by name."""
        scanner = Scanner(self.schema)
        return {
            "copy": lambda: torch._foreach_copy_(self._target, self.live),
            "scan": lambda: scanner.scan(self.live, self.snapshot),
            "obvious": lambda: [_obvious(*pair) for pair in zip(self.live, self.kept, strict=True)],
        }


def _obvious(live: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    new = live.to(kept.dtype)
    where = (new != kept).nonzero().view(-1)
    return where, new[where]


def measure(sides: dict[str, Side], repeats: int) -> dict[str, Figure]:
    """Measure the seconds of each side, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: Figure(tuple(values)) for name, values in seconds.items()}


def rows(case: Case, fractions: Sequence[float], repeats: int) -> Iterator[list[str]]:
    """Yield a row for each fraction of changed elements."""
    model = Model(case)
    for fraction in fractions:
        changed = torch.rand(_PERIOD, generator=torch.Generator().manual_seed(1)) < fraction
        model.flip(changed)
        found = measure(model.sides(), repeats)
        model.flip(changed)
        yield [
            case.name,
            f"{100 * fraction:g} %",
            *(found[name].show(1e3, 1) for name in ("copy", "scan", "obvious")),
            f"{ratio(found['scan'], found['copy']):.2f}",
            f"{ratio(found['obvious'], found['scan']):.2f}",
        ]


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print; return the exit status."""
    known = parser("scan", __doc__, "10 MB, 1 %% changed, 2 repeats")
    known.add_argument("--sizes", type=float, nargs="+", help="MB; default: 10 100 1000")
    known.add_argument("--changed", type=float, nargs="+", help="per cent; default: 0.01 1 5 20")
    known.add_argument("--repeats", type=int, help="turns of each side; default: 7")
    options = known.parse_args(arguments)
    sizes = options.sizes or ([10] if options.quick else [10, 100, 1000])
    changed = options.changed or ([1] if options.quick else [0.01, 1, 5, 20])
    repeats = options.repeats or (2 if options.quick else 7)
    table = _table(sizes, [percent / 100 for percent in changed], repeats)
    return publish("scan", machine(("torch",)), [table], options.rst)


def _table(sizes: Sequence[float], fractions: Sequence[float], repeats: int) -> Table:
    cases = []
    for size in sizes:
        cases.append(Case(f"{size:g} MB bf16", size, 16, torch.bfloat16))
        cases.append(Case(f"{size:g} MB fp32 to bf16", size, 16, torch.float32))
    cases.append(Case("5 MB bf16, 5000 tensors", 5, 5000, torch.bfloat16))
    cases.append(Case("5 MB fp32 to bf16, 5000 tensors", 5, 5000, torch.float32))
    found = [row for case in cases for row in rows(case, fractions, repeats)]
    head = ["weights", "changed", "copy", "scan", "obvious", "scan/copy", "obvious/scan"]
    note = "Milliseconds, median (min .. max); MB are those of the snapshot."
    return Table("Finding the elements that changed", note, head, found)
