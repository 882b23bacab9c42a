"""The private names of TorchRL in use, and the range of versions that have them."""

import ast
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import collectors
from collectors import torchrl_names

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "any_torchrl.py"
RANGE = SpecifierSet(torchrl_names.SUPPORTED)
(OLDEST,) = [one.version for one in RANGE if one.operator == ">="]


def of_torchrl(cls):
    """Return the classes that ``cls`` has from TorchRL, its metaclasses too."""
    return [one for one in (*cls.__mro__, *type(cls).__mro__) if one.__module__.startswith("torchrl.")]


def subclasses():
    """Return our classes that derive from classes of TorchRL."""
    modules = [
        importlib.import_module(f"collectors.{one.name}") for one in pkgutil.iter_modules(collectors.__path__)
    ]
    classes = {one for module in modules for one in vars(module).values() if inspect.isclass(one)}
    return {one for one in classes if one.__module__.startswith("collectors") and of_torchrl(one)}


def names_of(cls):
    """Return the names of our code in ``cls``: members, and all names that its methods use."""
    ours = [one for one in (*cls.__mro__, *type(cls).__mro__) if one.__module__.startswith("collectors")]
    members = [item for one in ours for item in vars(one).items()]
    codes = [code for _, member in members for code in torchrl_names._codes_of(member)]
    return {name for name, _ in members} | {name for code in codes for name in code.co_names}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def install(requirement, folder):
    """Install the newest TorchRL that fits into ``folder``; return its version."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if "(from versions: none)" in done.stderr or "No module named pip" in done.stderr:
        pytest.skip("the versions of torchrl cannot be installed: there is no pip, or no package index")
    assert done.returncode == 0, done.stderr
    return re.search(r"Successfully installed torchrl-(\S+)", done.stdout)[1]


def python(folder, *words):
    """Run Python with the TorchRL of ``folder``."""
    path = os.pathsep.join(map(str, [folder, ROOT, *Path(__file__).parents[:2]]))
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_the_list_has_every_private_name_in_use_and_no_other():
    listed = {name for names in torchrl_names.HOOKS.values() for name in names}
    found = subclasses()
    assert collectors.RayCollector in found
    for cls in found:
        shared = names_of(cls) & torchrl_names._names_used_by(cls)
        assert set(filter(is_private, shared)) <= listed, cls
    assert listed <= set().union(*map(names_of, found))


def test_private_names_of_torchrl_are_imported_in_one_place():
    for path in Path(collectors.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchrl"):
                words = [*node.module.split("."), *(one.name for one in node.names)]
                assert path.stem == "torchrl_names" or not any(map(is_private, words)), (path, words)


@pytest.mark.slow  # installs TorchRL
@pytest.mark.timeout(500)
@pytest.mark.parametrize("requirement", [f"=={OLDEST}", str(RANGE)], ids=["oldest", "newest"])
def test_the_oldest_and_the_newest_version_work(requirement, tmp_path):
    installed = install(f"torchrl{requirement}", tmp_path)
    done = python(tmp_path, PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"torchrl {installed} works"  # TorchRL prints, too


@pytest.mark.slow  # installs TorchRL
@pytest.mark.timeout(500)
def test_the_version_before_the_oldest_is_refused(tmp_path):
    installed = install(f"torchrl<{OLDEST}", tmp_path)
    done = python(tmp_path, "-c", "import collectors")
    wanted = f"collectors needs torchrl{torchrl_names.SUPPORTED}, and torchrl {installed} does not fit: "
    assert f"ImportError: {wanted}" in done.stderr


def test_setup_and_constraints_fit_the_range():
    assert f'"torchrl{torchrl_names.SUPPORTED}"' in (ROOT / "setup.py").read_text()
    pinned = re.search(r"^torchrl==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert pinned in RANGE
