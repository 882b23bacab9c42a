"""Every private name of TorchRL that these collectors use, checked on import.

Without the check, a hook that TorchRL renamed would never be called. Import private names of TorchRL from
here, and add each hook or attribute that a subclass relies on to :data:`HOOKS`.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, FunctionType
from typing import Any

SUPPORTED = ">=0.14.1,<0.15"
"""The versions of TorchRL that work, as in ``setup.py``."""

_PROCESS_GROUP_HOOKS = (
    "_frames_per_batch_corrected",
    "_init_master_dist",
    "_init_workers",
    "_make_container",
)

HOOKS: dict[tuple[str, str], tuple[str, ...]] = {
    ("torchrl.collectors", "Collector"): (
        "_RESERVED_OPTIONS",
        "_carrier",
        "_compile_wrapped_policy",
        "_drop_inapplicable_defaults",
        "_final_rollout",
        "_init_policy",
        "_legacy_weight_updater",
        "_maybe_make_final_rollout",
        "_normalize_direct_env_fn",
        "_normalize_env_fns",
        "_policy_output_keys",
        "_setup_policy_version_tracking",
        "_setup_weight_sync",
        "_should_use_random_frames",
        "_wrapped_policy_maybe_compiled",
        "_wrapped_policy_uncompiled",
        "register_scheme_receiver",
        "rollout",
    ),
    ("torchrl.collectors", "BaseCollector"): (
        "_iter_by_trajectories",
        "_iteration_started",
        "_receiver_schemes",
        "_set_received_policy_version",
        "register_collector",
        "weight_updater",
    ),
    ("torchrl.collectors", "MultiAsyncCollector"): (
        "_get_from_queue",
        "_queue_len",
        "_should_use_random_frames",
    ),
    ("torchrl.collectors", "MultiCollector"): (
        "_add_collector_outputs_to_fake_td",
        "_closed",
        "_main_async_collector",
        "_run_processes",
        "_running_free",
        "_setup_multi_policy_version_tracking",
        "_traj_pool",
        "pipes",
        "policy_version_tracker",
        "procs",
        "queue_out",
        "register_scheme_receiver",
    ),
    ("torchrl.collectors", "WeightUpdaterBase"): (
        "_call_post_hooks",
        "_get_server_weights",
        "_maybe_map_weights",
        "_push_weights",
        "_skip_update",
        "_sync_weights_with_worker",
        "all_worker_ids",
        "push_weights",
    ),
    ("torchrl.collectors.distributed", "DistributedCollector"): (
        *_PROCESS_GROUP_HOOKS,
        "_VERBOSE",
        "_init_worker_dist_submitit_delayed",
        "_store",
        "_sync",
        "_weight_sync_schemes",
    ),
    ("torchrl.collectors.distributed", "DistributedSyncCollector"): (
        *_PROCESS_GROUP_HOOKS,
        "total_frames_per_collector",
    ),
    ("torchrl.collectors.distributed", "RPCCollector"): (
        "_frames_per_batch_corrected",
        "_init",
        "_init_master_rpc",
        "_sync",
        "_weight_sync_schemes",
        "tensorpipe_options",
    ),
    ("torchrl.collectors.distributed", "RayCollector"): (
        "_async_iterator",
        "_collection_thread",
        "_external_weight_sender",
        "_lazy_initialize_weight_sync",
        "_make_collector",
        "_policy_service",
        "_remote_collectors",
        "_run_collection_loop",
        "_runtime_lease",
        "_stop_event",
        "_sync_iterator",
        "_weight_sync_initialized",
        "_weight_sync_schemes",
        "_weight_update_impl",
        "add_collectors",
        "stop_remote_collectors",
    ),
    ("torchrl.collectors.llm", "LLMCollector"): ("env", "policy", "policy_version_tracker"),
}
"""Methods that subclasses override and attributes that they read or set, by TorchRL's class."""


def require_hooks(hooks: Mapping[tuple[str, str], Iterable[str]]) -> None:
    """Raise an ImportError if TorchRL's classes, given by module and name, lack one of these names."""
    lost = []
    for (module, cls), names in hooks.items():
        used = _names_used_by(getattr(importlib.import_module(module), cls))
        lost += [f"{module}.{cls}.{name}" for name in names if name not in used]
    if lost:
        raise ImportError(_refusal(f"it does not use {', '.join(lost)}"), name="torchrl")


def _names_used_by(cls: type) -> set[str]:
    """Return all names in the code of the methods of ``cls``, its bases and its metaclass."""
    return {
        name
        for base in (*inspect.getmro(cls), *inspect.getmro(type(cls)))
        if base.__module__.startswith("torchrl.")
        for member in vars(base).values()
        for code in _codes_of(member)
        for name in code.co_names
    }


def _codes_of(member: Any) -> list[CodeType]:
    """Return the code of a method and of all functions inside it."""
    parts = [member, *(getattr(member, part, None) for part in ("fget", "fset", "__func__"))]
    functions = [inspect.unwrap(part) for part in parts if callable(part)]
    waiting = [one.__code__ for one in functions if isinstance(one, FunctionType)]
    found = []
    while waiting:
        found.append(waiting.pop())
        waiting += [const for const in found[-1].co_consts if isinstance(const, CodeType)]
    return found


def _refusal(reason: str) -> str:
    try:
        installed = version("torchrl")
    except PackageNotFoundError:
        installed = "of an unknown version"
    return (
        f"collectors needs torchrl{SUPPORTED}, and torchrl {installed} does not fit: {reason}. "
        f'Run: pip install "torchrl{SUPPORTED}"'
    )


try:
    import torchrl  # noqa: F401  # first, because its error has the name "torchrl"
    from torchrl._comm import backends
    from torchrl.collectors import Collector, MultiCollector, _multi_base
    from torchrl.collectors.distributed import default_configs, generic

    contextual_backend_error = backends._contextual_backend_error
    get_service_backend = backends._get_service_backend
    normalize_service_backend = backends.normalize_service_backend
    tensorpipe_options = default_configs.DEFAULT_TENSORPIPE_OPTIONS
    connect_timeout = generic.MAX_TIME_TO_CONNECT
    join_group = generic._node_init_dist
    multi_base: Any = _multi_base
    main_of_worker = multi_base._main_async_collector
except (ImportError, AttributeError) as error:
    missing = isinstance(error, ModuleNotFoundError) and error.name == "torchrl"
    cure = 'collectors needs torchrl: pip install "weight-update[collectors]"'
    raise ImportError(cure if missing else _refusal(str(error)), name="torchrl") from error

CollectorMeta: Any = type(Collector)
MultiCollectorMeta: Any = type(MultiCollector)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchRL's, about updaters for language models
    require_hooks(HOOKS)
