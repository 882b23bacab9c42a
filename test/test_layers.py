"""Imports run one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Imported by nobody here: what users may not have installed.
OTHERS = {"torchrl", "ray", "collectors", "gymnasium", "vllm", "sglang"}

# From the bottom up. A module imports from its own row or from rows before it.
LAYERS: list[set[str]] = [
    {"errors", "forked", "ratelimit", "report", "chunks", "kernels"},
    {"convert"},
    {"agreed", "extra_state", "gate"},
    {"compression"},
    {"encodings", "named"},
    {"engine"},
    {"engines"},
    {"binding"},
    {"arena", "own_weights"},
    {"shards"},
    {"strategy"},
    {"frames"},
    {"engine_binding"},
    {"transports"},
    {"buffers"},
    {"joint"},
    {"lane"},
    {"change_lane"},
    {"peer"},
    {"pipeline"},
    {"roll"},
    {"delivery", "lanes"},
    {"streams"},
    {"destination"},
    {"receiver", "sender"},
    {"sharded"},
    {"handle"},
    {"schemes"},
    {"synchronizer"},
    {"__init__"},
    {"testing"},
]


def layer_of(part: str) -> int:
    return next(height for height, row in enumerate(LAYERS) if part in row)


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def parts(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", parts("weight_update"), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    mine = path.relative_to(ROOT / "weight_update").parts[0].removesuffix(".py")
    for name in imports_of(path):
        if name == "weight_update":
            assert mine == "testing", "only what stands above the library imports its public names"
        elif name.startswith("weight_update."):
            theirs = name.split(".")[1]
            assert layer_of(theirs) <= layer_of(mine), f"{mine} imports {name}"
        elif path.name != "ray_board.py" or name != "ray":  # it alone imports ray, when Ray is used
            assert name.split(".")[0] not in OTHERS, name


@pytest.mark.parametrize("path", parts("collectors"), ids=lambda p: str(p.relative_to(ROOT)))
def test_collectors_use_public_names(path: Path) -> None:
    for name in imports_of(path):
        assert not name.startswith("weight_update."), f"{path.name} reaches into {name}"


def test_the_check_can_fail() -> None:
    assert layer_of("schemes") > layer_of("transports") > layer_of("chunks")
    with pytest.raises(StopIteration):
        layer_of("no such module")
