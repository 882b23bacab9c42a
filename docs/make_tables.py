"""Write the tables of manual and README that repeat facts of other files: ``python docs/make_tables.py``.

Tests compare the files with what this writes. The speeds come from the tables of the benchmarks, and the
versions from ``setup.py`` and ``constraints.txt``.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
_HEAD = ".. Written by docs/make_tables.py; do not edit.\n\n"
# Scheme, how weights travel, workers, how workers come and go.
_SCHEMES = [
    (
        "SharedMemWeightSyncScheme",
        "in shared memory that workers map",
        "processes of one user on one machine",
        "restart, and join late",
    ),
    (
        "MultiProcessWeightSyncScheme",
        "in shared memory; queues announce updates",
        "processes of one machine, started with ``multiprocessing``",
        "restart once the old process has ended; none joins late",
    ),
    (
        "DistributedWeightSyncScheme",
        "over TCP; in shared memory on the trainer's machine",
        "processes on any machines",
        "restart, and join late",
    ),
    (
        "RPCWeightSyncScheme",
        "as with Distributed; RPC finds the sender, and calls each worker after an update",
        "workers of ``torch.distributed.rpc``",
        "restart, and join late; a killed worker returns outside the RPC world",
    ),
    (
        "RayWeightSyncScheme",
        "as with Distributed, or through Ray's object store",
        "Ray actors on any nodes",
        "join late, and join again when Ray restarts them",
    ),
    (
        "RayModuleTransformScheme",
        "as with Ray",
        "the actor of TorchRL's ``RayModuleTransform``",
        "one worker",
    ),
    (
        "ObjectStoreWeightSyncScheme",
        "through S3 or another object store",
        "anywhere, with access to the store",
        "come and go; the trainer knows none of them",
    ),
    (
        "MemoryWeightSyncScheme",
        "copied inside the process",
        "threads of one process, as in tests and notebooks",
        "join late",
    ),
    (
        "NoWeightSyncScheme",
        "not at all",
        "models without weights",
        "any",
    ),
]
# Row of the benchmarks, and its name in the table of speeds.
_SPEEDS = {
    "SharedMem": "``SharedMemWeightSyncScheme``",
    "MultiProcess": "``MultiProcessWeightSyncScheme``",
    "Distributed": "``DistributedWeightSyncScheme``",
    "Distributed, a host each": "the same, a host for each worker",
    "RPC": "``RPCWeightSyncScheme``",
    "Ray": "``RayWeightSyncScheme``",
}
# Titles of tables of the benchmarks.
_SAME_MACHINE = "Synchronous update, 16 tensors"
_CLUSTER = "Across processes: synchronous update, 16 tensors"
_LINKS = ("1 Gbit/s", "10 Gbit/s", "25 Gbit/s", "100 Gbit/s")
_COMPRESSIONS = ("none", "lz4", "zstd", "ans")
_RATIO = {"ours": "ours", "torchrl": "TorchRL", "ours/torchrl": "ratio"}
# Quoted table: page and title of the benchmark's table, columns and their names here, first cells of rows.
_QUOTES: dict[str, tuple[str, str, dict[str, str], list[tuple[str, ...]]]] = {
    "gains_same_machine": (
        "results",
        _SAME_MACHINE,
        {"scheme": "scheme", "MB": "MB", "workers": "workers", **_RATIO},
        [
            ("SharedMem", "1", "1"),
            ("SharedMem", "1", "4"),
            ("MultiProcess", "1", "4"),
            ("SharedMem", "100", "1"),
            ("SharedMem", "100", "8"),
            ("SharedMem", "1000", "1"),
            ("SharedMem", "1000", "4"),
            ("MultiProcess", "1000", "4"),
        ],
    ),
    "gains_many_tensors": (
        "results",
        "Many tensors: 5 MB to 2 workers",
        {
            "scheme": "scheme",
            "tensors": "tensors",
            "ours": "ours",
            "torchrl, more files": "TorchRL, more files",
            "ours/torchrl": "ratio",
        },
        [("SharedMem", "1000"), ("SharedMem", "5000"), ("MultiProcess", "5000")],
    ),
    "gains_cluster": (
        "cluster",
        _CLUSTER,
        {"scheme": "scheme", "MB": "MB", "workers": "workers", **_RATIO},
        [
            ("Distributed", "1", "1"),
            ("Distributed, a host each", "1", "1"),
            ("Ray, object store, a host each", "1", "1"),
            ("Distributed", "1000", "4"),
            ("Distributed, a host each", "100", "4"),
            ("Distributed, a host each", "1000", "4"),
            ("RPC", "1000", "4"),
            ("Ray", "1000", "4"),
            ("Ray, object store", "1000", "4"),
            ("Ray, object store, a host each", "1000", "4"),
        ],
    ),
    "gains_memory": (
        "results",
        "Memory of all processes, 1000 MB in 16 tensors",
        {column: column for column in ("scheme", "processes", "total", "models beyond base")},
        [("SharedMem, ours",), ("SharedMem, torchrl",)],
    ),
    "gains_updaters": (
        "results",
        _SAME_MACHINE,
        {column: column for column in ("scheme", "MB", "workers", "ours", "plain copy", "ours/copy")},
        [
            ("SharedMem", "1", "2"),
            ("SharedMem", "100", "2"),
            ("SharedMem", "1000", "2"),
            ("SharedMem", "1000", "8"),
        ],
    ),
    "gains_rlinf": (
        "patch",
        "Bytes: policies in training",
        {
            "update": "update",
            "layout": "layout",
            "changed": "changed",
            "MB, none": "MB",
            "none": "none",
            "lz4": "lz4",
            "zstd": "zstd",
        },
        [
            ("transformer, 1e-06, 1 step", "dense"),
            ("transformer, 1e-06, 1 step", "RLinf"),
            ("transformer, 1e-06, 1 step", "flat"),
            ("transformer, 1e-06, 1 step", "flat, relative"),
            ("transformer, 3e-06, 8 steps", "RLinf"),
            ("transformer, 3e-06, 8 steps", "flat"),
            ("transformer, 3e-06, 8 steps", "flat, relative"),
        ],
    ),
    "tuning_links": (
        "patch",
        "Over a link, 500 MB",
        {column: column for column in ("update", "sent as", "MB", *_LINKS)},
        [
            (f"{changed}%, 1..4 ulp", sent_as)
            for changed in ("1.00", "5.00", "20.00")
            for sent_as in ("dense", "flat, none", "flat, relative, none", "flat, relative, zstd")
        ],
    ),
    "tuning_shared": (
        "patch",
        "send() until applied, 200 MB",
        {column: column for column in ("scheme", "encoding", "send()", "stall")},
        [
            (scheme, encoding)
            for scheme in ("SharedMem", "MultiProcess")
            for encoding in ("dense", "patch, raw", "patch, relative")
        ],
    ),
    "tuning_bytes": (
        "patch",
        "Bytes: policies in training",
        {"update": "update", "layout": "layout, values", **{name: name for name in _COMPRESSIONS}},
        [
            (f"transformer, {update}", layout)
            for update in ("1e-06, 1 step", "3e-06, 8 steps")
            for layout in ("flat", "flat, relative", "coo", "coo, relative")
        ],
    ),
    "gains_trinity": (
        "synchronizer",
        "Styles: who waits, and how old weights are",
        {column: column for column in ("style", "method", "steps/s", "mean age", "oldest")},
        [
            (style, method)
            for style in (
                "FIXED, interval 4",
                "EXPLORER_DRIVEN, interval 4",
                "TRAINER_DRIVEN, interval 4",
                "FULLY_ASYNC, interval 1, staleness 8",
            )
            for method in ("NCCL", "MEMORY")
        ],
    ),
}
_README = re.compile(
    r"(\.\. Speeds, written by docs/make_tables\.py\n\n).*(\n\.\. End of speeds\n)", re.DOTALL
)
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
    "nvidia-nvcomp-cu12": '``compression="nvcomp_ans"`` and ``"nvcomp_lz4"``, on a GPU',
}


def rows_of(page: str, title: str) -> list[dict[str, str]]:
    """Return the rows of the table under ``title`` in a benchmark's page, by column, without their spread."""
    lines = (
        (DOCS / f"benchmark_{page}.rst")
        .read_text(encoding="utf-8")
        .partition(f"\n{title}\n~")[2]
        .splitlines()
    )
    rules = [number for number, line in enumerate(lines) if re.fullmatch(r"=[= ]*", line)]
    starts = [found.start() for found in re.finditer("=+", lines[rules[0]])]
    cells = [
        [
            re.sub(r" \(\S+ \.\. \S+\)", "", line[start:end].strip())
            for start, end in zip(starts, [*starts[1:], None], strict=True)
        ]
        for line in lines[rules[0] + 1 : rules[2]]
    ]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def simple_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table whose cells are one line each."""
    rows = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    rule = "  ".join("=" * width for width in widths)
    return "\n".join([rule, lines[0], rule, *lines[1:], rule, ""])


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
    """Return the table of schemes."""
    rows = [[_link(name), *cells] for name, *cells in _SCHEMES]
    return _HEAD + list_table(["scheme", "how weights travel", "workers", "how workers come and go"], rows)


def speeds() -> str:
    """Return the table of speeds on the landing page and in the README: 1 GB to four workers."""
    rows = [*rows_of("results", _SAME_MACHINE), *rows_of("cluster", _CLUSTER)]
    found = {row["scheme"]: row for row in rows if (row["MB"], row["workers"]) == ("1000", "4")}
    times = [
        [name, *(f"{float(found[row][column]):,.0f} ms" for column in ("ours", "torchrl"))]
        for row, name in _SPEEDS.items()
    ]
    return simple_table(["scheme", "weight_update", "TorchRL"], times)


def quote(name: str) -> str:
    """Return a table that quotes rows and columns of a benchmark's table."""
    page, title, columns, wanted = _QUOTES[name]
    rows = [[row[column] for column in columns] for row in rows_of(page, title)]
    found = {key: row for row in rows for key in wanted if key == tuple(row[: len(key)])}
    return _HEAD + simple_table(list(columns.values()), [found[key] for key in wanted])


def readme() -> str:
    """Return the text of the README with the present table of speeds."""
    text = (ROOT / "README.rst").read_text(encoding="utf-8")
    return _README.sub(lambda found: found[1] + speeds() + found[2], text)


def rates() -> str:
    """Return the table of links of several rates."""
    return _of_links("links of several rates")


def connections() -> str:
    """Return the table of connections whose rate is limited."""
    return _of_links("connections of 1gbit/s each")


def _of_links(title: str) -> str:
    """Return the table whose title ends so, as the benchmark wrote it; a text if it has not yet."""
    text = (DOCS / "benchmark_links.rst").read_text(encoding="utf-8")
    table = rf"^\d+ MB to one host over {title}\n~+\n\n(.*?\n\n=.*?)(?:\n\n|\Z)"
    found = re.search(table, text, re.MULTILINE | re.DOTALL)
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
    for make in (schemes, speeds, versions, rates, connections):
        (folder / f"{make.__name__}.rst").write_text(make(), encoding="utf-8")
    for name in _QUOTES:
        (folder / f"{name}.rst").write_text(quote(name), encoding="utf-8")
    if len(sys.argv) == 1:
        (ROOT / "README.rst").write_text(readme(), encoding="utf-8")
