"""The versions of Python and of packages, beside those that the metadata of this package allows."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, metadata, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from weight_update.cli.checks.base import Finding, fail, ok, skipped, warn
from weight_update.compression import ans
from weight_update.encodings import dense
from weight_update.encodings.patch import kernels
from weight_update.transports.distributed import transfer
from weight_update.wire import unchanged

_OURS = "weight-update"
KERNELS_CURE = (
    f"install a C compiler, then: pip install --force-reinstall --no-deps --no-binary {_OURS} {_OURS} "
    "(and leave WEIGHT_UPDATE_KERNELS unset)"
)
_REINSTALL = f"install this library with pip (pip install {_OURS}), so that its requirements are known"


def look_at_python() -> Finding:
    """Compare the version of Python with the supported ones."""
    try:
        allowed = SpecifierSet(str(metadata(_OURS)["Requires-Python"]))
    except PackageNotFoundError:
        return warn(f"{platform.python_version()}; supported versions unknown", _REINSTALL)
    found = f"{platform.python_version()} (supported: {allowed})"
    if allowed.contains(platform.python_version(), prereleases=True):
        return ok(found)
    return fail(found, f"use Python {allowed}")


def look_at_package(name: str) -> Finding:
    """Compare the installed version of a package with the supported ones."""
    try:
        requirement, extra = _requirement_of(name)
    except PackageNotFoundError:
        return warn("supported versions unknown", _REINSTALL)
    supported = f"(supported: {requirement.specifier})"
    install = f'pip install "{name}{requirement.specifier}"'
    try:
        installed = version(name)
    except PackageNotFoundError:
        if extra:
            return skipped(f"not installed {supported}", f'if you need it: pip install "{_OURS}[{extra}]"')
        return fail(f"not installed {supported}", install)
    if requirement.specifier.contains(installed, prereleases=True):
        return ok(f"{installed} {supported}")
    return (warn if extra else fail)(f"{installed} {supported}", install)


def look_at_kernels() -> Finding:
    """Check whether the inner loops are compiled; a library that is out of date is not used."""
    loops = {
        "patches": kernels,
        "compression='ans'": ans,
        "copies": dense,
        "transfers": transfer,
        "comparisons of modules": unchanged,
    }
    slower = [name for name, module in loops.items() if module.library is None]
    if not slower:
        return ok("compiled")
    return warn(f"not compiled, so these take longer: {', '.join(slower)}", KERNELS_CURE)


def _requirement_of(name: str) -> tuple[Requirement, str]:
    """Return the requirement of this library for a package, and the extra that has it, or "".

    Raises:
        PackageNotFoundError: this library is not installed, or does not use the package.
    """
    ours = metadata(_OURS)
    for text in ours.get_all("Requires-Dist") or []:
        requirement = Requirement(text)
        if requirement.name == name:
            extras = ours.get_all("Provides-Extra") or []
            mark = requirement.marker
            return requirement, next((e for e in extras if mark and mark.evaluate({"extra": e})), "")
    raise PackageNotFoundError(f"{name} is no requirement of {_OURS}")
