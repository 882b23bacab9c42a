"""Write the tables of the manual that repeat facts of other files: ``python docs/make_tables.py``.

A test compares the files with what this writes. The speeds come from the tables of the benchmarks, and the
versions from ``setup.py`` and ``constraints.txt``.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
MEGABYTES, WORKERS = "1000", "4"
_RATES = re.compile(
    r"^\d+ MB to one host over links of several rates\n~+\n\n(.*?\n\n=.*?)(?:\n\n|\Z)",
    re.MULTILINE | re.DOTALL,
)

_HEAD = ".. Written by docs/make_tables.py; do not edit.\n\n"
# Scheme, location, speed ({row} is the median of that row of the benchmarks), elasticity, use.
_SCHEMES = [
    (
        "SharedMemWeightSyncScheme",
        "processes of one machine",
        "{SharedMem}",
        "workers restart, and join late",
        "trainer and workers on one machine",
    ),
    (
        "MultiProcessWeightSyncScheme",
        "processes of one machine, started with ``multiprocessing``",
        "{MultiProcess}",
        "a worker restarts once its old process has ended; none joins late",
        "programs whose workers get queues when they start",
    ),
    (
        "DistributedWeightSyncScheme",
        "processes on any machines",
        "{Distributed}; with a host for each worker, {Distributed, a host each}",
        "workers restart, and join late",
        "several machines",
    ),
    (
        "RPCWeightSyncScheme",
        "workers of ``torch.distributed.rpc``",
        "{RPC}",
        "as above; a killed worker returns outside the RPC world",
        "programs that use RPC already",
    ),
    (
        "RayWeightSyncScheme",
        "Ray actors on any nodes",
        "{Ray}; through the object store to a host for each worker, {Ray, object store, a host each}",
        "workers join late; actors that Ray restarts join again",
        "Ray clusters",
    ),
    (
        "RayModuleTransformScheme",
        "the actor of TorchRL's ``RayModuleTransform``",
        "not measured",
        "one worker",
        "models inside an environment's transform",
    ),
    (
        "MemoryWeightSyncScheme",
        "threads of one process",
        "not measured",
        "workers join late",
        "threads, tests, notebooks",
    ),
    (
        "NoWeightSyncScheme",
        "anywhere",
        "sends nothing",
        "not needed",
        "models without weights",
    ),
]
# Distribution, and what needs it.
_PACKAGES = {
    "torch": "the library",
    "tensordict": "the library",
    "torchrl": "``collectors``",
    "gymnasium": "``collectors``",
    "ray": "``RayWeightSyncScheme``, ``RayCollector``",
    "lz4": '``compression="lz4"``',
    "zstandard": '``compression="zstd"``',
    "transformers": "``TransformersEngine``, ``examples/llm_rollout.py``",
    "nvidia-nvcomp-cu12": '``compression="nvcomp_lz4"``, on a GPU',
}


def measured(row: re.Match[str]) -> str:
    """Return the median of an update of 1 GB to four workers, from that row of the benchmarks' tables."""
    wanted = rf"^{re.escape(row[1])}\s+{MEGABYTES}\s+(?:16\s+)?{WORKERS}\s+([\d.]+) \("
    for page in ("benchmark_results.rst", "benchmark_cluster.rst"):
        if found := re.search(wanted, (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE):
            return f"{float(found[1]):,.0f} ms"
    raise LookupError(f"the tables of the benchmarks have no row of {row[1]}")


def list_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table whose cells wrap."""
    lines = [".. list-table::", "   :header-rows: 1", "   :widths: auto", ""]
    for row in [header, *rows]:
        lines += [f"   {'-' if column else '* -'} {cell}" for column, cell in enumerate(row)]
    return "\n".join(lines).replace("\n   - ", "\n     - ") + "\n"


def _link(scheme: str) -> str:
    """Return a link to a scheme, with a short text unless that says nothing."""
    short = scheme.removesuffix("WeightSyncScheme").removesuffix("Scheme")
    return f":class:`{scheme if short == 'No' else short} <weight_update.{scheme}>`"


def schemes() -> str:
    """Return the table of schemes on the landing page."""
    rows = [
        [_link(name), where, re.sub(r"{(.+?)}", measured, speed), elasticity, use]
        for name, where, speed, elasticity, use in _SCHEMES
    ]
    header = ["scheme", "where workers run", "1 GB to 4 workers", "elasticity", "when to use it"]
    return _HEAD + list_table(header, rows)


def rates() -> str:
    """Return the table of links of several rates, as the benchmark wrote it; a text if it has not yet."""
    text = (DOCS / "benchmark_links.rst").read_text(encoding="utf-8")
    found = _RATES.search(text)
    return _HEAD + (found[1] if found else "*Not measured yet.*").rstrip() + "\n"


def constants(text: str) -> dict[str, list[str]]:
    """Return the lists of requirements in the text of ``setup.py``, by name."""
    tree = ast.parse(text)
    found = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.List)
    }
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    call = next(node for node in calls if ast.unparse(node.func) == "setup")
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    found["install"] = ast.literal_eval(values["install_requires"])
    found["python"] = ["python" + ast.literal_eval(values["python_requires"])]
    return found


def versions() -> str:
    """Return the table of supported versions."""
    groups = constants((ROOT / "setup.py").read_text(encoding="utf-8"))
    requirements = "\n".join(
        requirement.partition(";")[0] for group in groups.values() for requirement in group
    )
    bounds = dict(re.findall(r"^([\w-]+)(.*)$", requirements, re.MULTILINE))
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    tested = dict(re.findall(r"^([\w-]+)==(\S+)", constraints, re.MULTILINE))
    [tested["python"]] = re.findall(r"on Python ([\d.]+)", constraints)
    packages = {"python": "everything", **_PACKAGES}
    rows = [
        [name, f"``{bounds[name]}``".replace(",", ", "), tested.get(name, "not pinned"), use]
        for name, use in packages.items()
    ]
    return _HEAD + list_table(["package", "supported", "tested", "needed for"], rows)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "tables"
    for make in (schemes, versions, rates):
        (folder / f"{make.__name__}.rst").write_text(make(), encoding="utf-8")
