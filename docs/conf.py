"""Sphinx settings. `make docs` builds with -W: a warning is an error."""

import importlib.metadata

project = "weight_update"
author = "the weight_update authors"
copyright = f"2026, {author}"
release = version = importlib.metadata.version("weight-update")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.intersphinx",
]
# Tables and results are included by other pages.
exclude_patterns = ["_build", "tables", "benchmark_*.rst"]

toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Links to other manuals. The inventories are checked in, because builds have no network; make_inventory.py
# writes them.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "inventories/python.inv"),
    "torch": ("https://docs.pytorch.org/docs/stable", "inventories/pytorch.inv"),
    "tensordict": ("https://docs.pytorch.org/tensordict/stable", "inventories/tensordict.inv"),
}

# A reference without a target is an error.
nitpicky = True
_INTERNAL = [  # classes and aliases that signatures show, but users do not name
    "Channel",
    "Convert",
    "DeviceMap",
    "ExtractAs",
    "Method",
    "RayObjectStore",
    "Select",
    "Service",
    "UpdateOwner",
    "Where",
    "collectors.remote.Remote",
    "weight_update.receiver.gate.Hold",
    "weight_update.schemes.sender_side.SenderListener",
    "weight_update.sender.observers.PendingUpdate",
    "weight_update.synchronizer.state.ExplorerState",
    "weight_update.synchronizer.state.TrainerState",
    "weight_update.wire.frames.Kind",
]
_OTHERS = [  # of TorchRL's signatures, not qualified there, and two that other manuals have no page for
    "DEVICE_TYPING",
    "ExporationType",  # misspelled in TorchRL
    "ExplorationType",
    "ReplayBuffer",
    "WeightUpdaterBase",
    "concurrent.futures._base.Future",
    "torch.distributed.distributed_c10d.ProcessGroup",
]
nitpick_ignore = [("py:class", name) for name in [*_INTERNAL, *_OTHERS]]
nitpick_ignore_regex = [("py:class", r"(.*\.)?_[A-Z]\w*")]  # type variables and private classes

html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_theme = "furo"
html_title = f"weight_update {release}"
