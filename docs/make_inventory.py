"""Write the inventories by which the manual links to other manuals, as builds have no network.

Run ``python docs/make_inventory.py`` after a change; a test compares the files with what it writes. Each
inventory has the names that our pages and signatures use, in Sphinx's format (``objects.inv``, version 2).

The addresses of pages are those of the published manuals. The anchor of an object is its full name, as Sphinx
makes it.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "inventories"

# Each entry: kind, name in our signatures, page below the address of the manual, anchor.
# Python's library reference has a page for each module, and the anchor is the full name.
_PYTHON = {
    "class": """
        collections.abc.Callable collections.abc.Collection collections.abc.Iterable collections.abc.Iterator
        collections.abc.Mapping collections.abc.Sequence contextlib.AbstractContextManager logging.Logger
        os.PathLike pathlib.Path queue.SimpleQueue re.Pattern threading.Event types.FrameType
    """,
    "function": "re.search re.sub",
    "method": "logging.Logger.warning socket.socket.getsockname",
}
# Names on a page that is not called as the module is, or with another name as the anchor.
_PYTHON_ELSEWHERE = [
    ("asyncio.to_thread", "py:function", "library/asyncio-task.html#asyncio.to_thread"),
    ("re.error", "py:exception", "library/re.html#re.PatternError"),
]
# Built-in functions, types, constants and exceptions have pages of their own.
_BUILTIN = {
    "library/stdtypes.html": (
        "class",
        "bool bytes bytearray dict float frozenset int list memoryview set str tuple",
    ),
    "library/functions.html": ("class", "object type"),
    "library/exceptions.html": (
        "exception",
        "BaseException BufferError ConnectionError Exception FileNotFoundError ImportError IndexError "
        "KeyError MemoryError NotImplementedError OSError RuntimeError TimeoutError TypeError ValueError",
    ),
    "library/constants.html": ("data", "None NotImplemented"),
}
# PyTorch has a page below "generated/" for what its tables list, such as torch.nn.Module; tensors and their
# attributes have pages of their own ("tensors", "tensor_attributes"). The anchor is the full name. The second
# name is the one that signatures show, by the module that defines the class.
_TORCH = [
    ("torch.Tensor", "torch.Tensor", "tensors.html"),
    ("torch.dtype", "torch.dtype", "tensor_attributes.html"),
    ("torch.device", "torch.device", "tensor_attributes.html"),
    ("torch.nn.Module", "torch.nn.modules.module.Module", "generated/torch.nn.Module.html"),
    ("torch.nn.Sequential", "torch.nn.modules.container.Sequential", "generated/torch.nn.Sequential.html"),
]
# tensordict has a page below "reference/generated/" for each class, with the full name as the anchor.
_TENSORDICT = {
    "TensorDict": ["tensordict.TensorDict"],
    "TensorDictBase": ["tensordict.TensorDictBase", "tensordict.base.TensorDictBase", "TensorDictBase"],
}

Entry = tuple[str, str, str]
"""Name, domain and role, and location."""


def python() -> list[Entry]:
    """Return the entries of Python's library reference."""
    found = list(_PYTHON_ELSEWHERE)
    for kind, names in _PYTHON.items():
        for name in names.split():
            owner = name.rpartition(".")[0]
            module = owner.rpartition(".")[0] if kind == "method" else owner
            found.append((name, f"py:{kind}", f"library/{module}.html#{name}"))
    for page, (kind, names) in _BUILTIN.items():
        found += [(name, f"py:{kind}", f"{page}#{name}") for name in names.split()]
    return found


def torch() -> list[Entry]:
    """Return the entries of PyTorch's manual."""
    return [
        (name, "py:class", f"{page}#{documented}")
        for documented, shown, page in _TORCH
        for name in dict.fromkeys([documented, shown])
    ]


def tensordict() -> list[Entry]:
    """Return the entries of tensordict's manual."""
    page = "reference/generated/tensordict.{0}.html#tensordict.{0}"
    return [
        (name, "py:class", page.format(documented))
        for documented, names in _TENSORDICT.items()
        for name in names
    ]


def encode(project: str, entries: list[Entry]) -> bytes:
    """Return an inventory as Sphinx reads it."""
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
    head += "# The remainder of this file is compressed using zlib.\n"
    lines = "".join(f"{name} {role} 1 {location} -\n" for name, role, location in sorted(entries))
    return head.encode() + zlib.compress(lines.encode(), 9)


def inventories() -> dict[str, bytes]:
    """Return the content of each file by its name."""
    return {
        "python.inv": encode("Python", python()),
        "pytorch.inv": encode("PyTorch", torch()),
        "tensordict.inv": encode("tensordict", tensordict()),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for file, content in inventories().items():
        (folder / file).write_bytes(content)
