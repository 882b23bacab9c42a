"""The public names of the packages."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import get_origin

import pytest

import weight_update
from weight_update import errors

PACKAGES = [
    "weight_update",
    "weight_update.compression",
    "weight_update.convert",
    "weight_update.encodings",
    "weight_update.observers",
    "weight_update.schemes",
    "weight_update.serving.vllm",
    "weight_update.synchronizer",
    "weight_update.testing",
    "weight_update.transports",
    "collectors",
]
NEED_VLLM = {"weight_update.serving.vllm.backend", "weight_update.serving.vllm.trainer"}


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_sorted_and_exists(name: str) -> None:
    package = importlib.import_module(name)
    assert list(package.__all__) == sorted(package.__all__)
    for member in package.__all__:
        assert hasattr(package, member), member


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_complete(name: str) -> None:
    package = importlib.import_module(name)
    public = {
        member
        for member, value in vars(package).items()
        if not member.startswith("_") and not inspect.ismodule(value)
    }
    assert public <= set(package.__all__)


def test_public_classes_and_functions_are_documented() -> None:
    for member in weight_update.__all__:
        value = getattr(weight_update, member)
        if get_origin(value) is not None:
            continue  # a Literal or a Callable[...] cannot be documented
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), member


def modules() -> Iterator[ModuleType]:
    for name in ("weight_update", "collectors"):
        package = importlib.import_module(name)
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            if found.name not in NEED_VLLM or importlib.util.find_spec("vllm"):
                yield importlib.import_module(found.name)


def _is_public_class(value: object, name: str, module: ModuleType) -> bool:
    ours = inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")
    return ours and not getattr(value, "_is_protocol", False)


def test_public_methods_are_documented_or_inherit_their_docstring() -> None:
    lacking = [
        f"{value.__module__}.{value.__qualname__}.{member}"
        for module in modules()
        for name, value in vars(module).items()
        if _is_public_class(value, name, module)
        for member, attribute in vars(value).items()
        if not member.startswith("_") and isinstance(attribute, (FunctionType, classmethod, property))
        if getattr(attribute, "__name__", "") != "<lambda>"
        if not inspect.getdoc(getattr(value, member) if isinstance(attribute, classmethod) else attribute)
    ]
    assert lacking == []


def test_docstrings_name_the_thing_first() -> None:
    root = Path(__file__).parent.parent
    folders = ("weight_update", "collectors", "benchmarks", "examples", "test")
    vague = re.compile(r'^\s*"""(What|Who|That|Those)\b', re.MULTILINE)
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    assert [str(path) for path in files if vague.search(path.read_text())] == []


def test_every_error_is_exported_and_drawn() -> None:
    classes = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert set(classes) <= set(weight_update.__all__)
    drawn = re.findall(r"([│├└─ ]*)(\w+Error)\b(?:\s+\((\w+)\))?", errors.__doc__ or "")
    assert {name for _, name, _ in drawn} >= set(classes)
    depths = {name: len(lead) for lead, name, _ in drawn if name in classes}
    for lead, name, builtin in drawn:
        if name not in classes:
            continue
        if builtin:
            assert issubclass(classes[name], getattr(__import__("builtins"), builtin)), name
        parent = classes[name].__mro__[1]
        if parent is not Exception:
            assert depths[parent.__name__] < len(lead), f"{name} is drawn beside its parent"


def test_import_needs_torch_and_tensordict_alone() -> None:
    program = (
        "import sys, weight_update, weight_update.compression; "
        "others = 'vllm torchrl ray gymnasium pytest hypothesis lz4 zstandard nvidia.nvcomp'.split(); "
        "print([m for m in others if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=110)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
