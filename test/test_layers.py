"""Imports run one way: twelve floors, and no circle."""

from __future__ import annotations

import ast
import functools
import graphlib
from pathlib import Path

import pytest

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
    {
        "collectors",
        "benchmarks",
        "testing",
        "cli",
    },  # TorchRL's collectors; measurements; contract tests; commands
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


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name: str) -> None:
    mine = room_of(name)
    for imported in imports_of(MODULES[name]):
        if imported.split(".")[0] not in PACKAGES:
            continue
        theirs = room_of(imported)
        same = (
            theirs == mine or floor_of(theirs) == floor_of(mine) == 1
        )  # errors imports report, that imports text
        assert same or floor_of(theirs) < floor_of(mine), f"{name} imports {imported}"


def test_no_circle() -> None:
    graph = {name: set(imports_of(path)) & MODULES.keys() for name, path in MODULES.items()}
    graph["collectors.backends"].remove("collectors")  # when a collector is made, it looks up a class by name
    require_no_circle(graph)


def require_no_circle(graph: dict[str, set[str]]) -> None:
    """Raise CycleError, which names the circle; the file of a package is a module like others."""
    graphlib.TopologicalSorter({name: found - {name} for name, found in graph.items()}).prepare()


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.startswith(LIBRARY)))
def test_optional_packages_are_not_imported(name: str) -> None:
    if name in USE_OPTIONAL:
        return
    for imported in imports_of(MODULES[name]):
        assert imported.split(".")[0] not in OPTIONAL | {"collectors"}, f"{name} imports {imported}"


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.startswith("collectors")))
def test_collectors_use_public_names(name: str) -> None:
    for imported in imports_of(MODULES[name]):
        assert not imported.startswith(f"{LIBRARY}."), f"{name} reaches into {imported}"


def test_there_are_at_most_twelve_floors() -> None:
    assert len(FLOORS) <= 12
    rooms = {room_of(name) for name in MODULES}
    assert rooms == set().union(*FLOORS), "a room stands on no floor, or a floor names a room that is gone"


def test_the_checks_can_fail() -> None:
    assert floor_of("schemes") > floor_of("transports") > floor_of("wire")
    with pytest.raises(StopIteration):
        floor_of("no such room")
    for graph in (
        {"a": {"b"}, "b": {"a"}},
        {"a": {"a.b", "a.c"}, "a.b": {"a.c"}, "a.c": {"a.b"}},
        {"a": {"a.b"}, "a.b": {"a"}},
    ):
        with pytest.raises(graphlib.CycleError):
            require_no_circle(graph)
