"""Imports run one way: twelve floors, and no circle."""

from __future__ import annotations

import ast
import functools
import graphlib
from pathlib import Path

import pytest

import weight_update

ROOT = Path(__file__).parent.parent
LIBRARY = "weight_update"
PACKAGES = (LIBRARY, "collectors", "benchmarks")

# Not imported at the top of any module, because users may not have them.
OPTIONAL = {"torchrl", "ray", "gymnasium", "vllm", "sglang", "transformers"}

# They import such a package when it is used, or are imported when it is.
USE_OPTIONAL = {
    "weight_update.engines.continuous_batching",
    "weight_update.engines.sglang.engine",
    "weight_update.transports.ray.rendezvous",
    "weight_update.serving.vllm.backend",
    "weight_update.serving.vllm.loader",
    "weight_update.serving.vllm.placement",
    "weight_update.serving.vllm.plugin",
    "weight_update.serving.vllm.trainer",
}

# [floors] From the top down. A package imports from itself and from floors below its own.
FLOORS: list[set[str]] = [
    # TorchRL's collectors; measurements; contract tests; commands
    {"collectors", "benchmarks", "testing", "cli"},
    {"__init__"},  # the public names, nothing else
    {"synchronizer", "serving"},  # who synchronizes when; plugins of inference servers
    {"schemes"},  # the lifecycle, then one small file a scheme
    {"sharded", "checkpoints"},  # a trainer of several ranks; versions in a directory
    {"sender", "receiver"},  # encode once and serve every worker; stage, switch, acknowledge
    {"transports", "engines"},  # move chunks and know no models; inference engines as receivers
    {"strategy"},  # how weights leave and enter a model
    {"encodings"},  # tensors to payloads and back
    {"compression"},  # bytes to fewer bytes and back
    {"convert", "wire", "observers"},  # tensors in another format; schemas, frames, checks; logs and traces
    {"arguments", "errors", "report", "progress", "text", "threads"},  # checks; errors; reports; bars; texts
]
# [end of floors]


def floor_of(room: str) -> int:
    return next(len(FLOORS) - height for height, row in enumerate(FLOORS) if room in row)


def room_of(module: str) -> str:
    package, *rest = module.split(".")
    if package == LIBRARY and rest == ["__main__"]:
        return "cli"
    return package if package != LIBRARY else rest[0] if rest else "__init__"


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@functools.cache
def imports_of(path: Path) -> list[str]:
    """Return the modules that a file imports; ``from a import b`` is ``a.b`` if that is a module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append(inner if inner in MODULES else str(node.module))
    return found


def imports() -> list[tuple[str, str]]:
    """Return each module with each module that it imports."""
    return [(name, imported) for name, path in MODULES.items() for imported in imports_of(path)]


def test_imports_point_down() -> None:
    assert [one for one in imports() if one[1].split(".")[0] in PACKAGES and not points_down(*one)] == []


def points_down(name: str, imported: str) -> bool:
    mine, theirs = room_of(name), room_of(imported)
    same = (
        theirs == mine or floor_of(theirs) == floor_of(mine) == 1
    )  # errors imports report, that imports text
    return same or floor_of(theirs) < floor_of(mine)


def test_no_circle() -> None:
    graph = {name: set(imports_of(path)) & MODULES.keys() for name, path in MODULES.items()}
    graph["collectors.backends"].remove("collectors")  # when a collector is made, it looks up a class by name
    require_no_circle(graph)


def require_no_circle(graph: dict[str, set[str]]) -> None:
    """Raise CycleError, which names the circle; the file of a package is a module like others."""
    graphlib.TopologicalSorter({name: found - {name} for name, found in graph.items()}).prepare()


def test_optional_packages_are_not_imported() -> None:
    ours = [one for one in imports() if one[0].startswith(LIBRARY) and one[0] not in USE_OPTIONAL]
    assert [one for one in ours if one[1].split(".")[0] in OPTIONAL | {"collectors"}] == []


def test_collectors_use_public_names() -> None:
    theirs = [one for one in imports() if one[0].startswith("collectors")]
    assert theirs
    assert [one for one in theirs if one[1].startswith(f"{LIBRARY}.")] == []
    paths = [path for name, path in MODULES.items() if name.startswith("collectors")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    ours = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == LIBRARY]
    names = {alias.name for node in ours for alias in node.names}
    assert "SyncReport" in names
    assert names <= set(weight_update.__all__)


def test_there_are_at_most_twelve_floors() -> None:
    assert len(FLOORS) <= 12
    rooms = {room_of(name) for name in MODULES}
    assert rooms == set().union(*FLOORS), "a room stands on no floor, or a floor names a room that is gone"


def test_the_checks_can_fail() -> None:
    assert floor_of("schemes") > floor_of("transports") > floor_of("wire")
    assert points_down("weight_update.sender", "weight_update.wire")
    assert not points_down("weight_update.wire", "weight_update.sender")
    with pytest.raises(StopIteration):
        floor_of("no such room")
    for graph in (
        {"a": {"b"}, "b": {"a"}},
        {"a": {"a.b", "a.c"}, "a.b": {"a.c"}, "a.c": {"a.b"}},
        {"a": {"a.b"}, "a.b": {"a"}},
    ):
        with pytest.raises(graphlib.CycleError):
            require_no_circle(graph)
