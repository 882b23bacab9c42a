"""Pauses, cached prefixes, prompts and errors of transformers' continuous batching."""

from __future__ import annotations

import operator
import secrets
import threading
from collections.abc import Iterable
from typing import Any

from weight_update.errors import LifecycleError, SyncTimeoutError


class Pause:
    """A pause of a manager's generation.

    A thread of its own holds it, because ``pause()`` of the manager waits without limit.
    """

    def __init__(self, manager: Any) -> None:
        self._begun, self._over = threading.Event(), threading.Event()
        self._error: RuntimeError | None = None
        self._manager = manager
        self._thread = threading.Thread(target=self._hold, name="weight_update-pause", daemon=True)

    def begin(self, timeout: float) -> None:
        """Pause generation. Whatever this raises, call :meth:`release`.

        Raises:
            SyncTimeoutError: the pause did not begin in ``timeout`` seconds.
            LifecycleError: generation has ended.
        """
        self._thread.start()
        if not self._begun.wait(timeout):
            raise SyncTimeoutError("a decoding step did not end in time (raise timeout= of the engine)")
        if self._error is not None:
            raise ended(self._manager) from self._error

    def release(self) -> None:
        """End the pause, also one that is still to begin."""
        self._over.set()
        if self._begun.is_set():
            self._thread.join()

    def _hold(self) -> None:
        try:
            with self._manager.pause():
                self._begun.set()
                self._over.wait()
        except RuntimeError as error:  # there is no generation to pause
            self._error = error
            self._begun.set()


def require_configs(generation: Any, batching: Any) -> None:
    """Raise TypeError unless these are None, or configurations of transformers."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    for given, kind in ((generation, GenerationConfig), (batching, ContinuousBatchingConfig)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"give a {kind.__name__} or None, not {given!r:.60}")


def require_no_manager(model: Any) -> None:
    """Raise ValueError if ``model`` keeps a manager, which transformers would use with its configurations."""
    if getattr(model, "_cached_continuous_batching_manager", None) is not None:
        raise ValueError(
            "generate_batch(persistent_manager=True) has left a manager with its own configurations in this "
            "model; call model.destroy_cached_continuous_batching_manager() first"
        )


def require_supported(manager: Any, pause: str) -> None:
    """Check a manager.

    Raises:
        ImportError: this version of transformers cannot pause generation.
        ValueError: the manager's configuration cannot be combined with ``pause``.
    """
    if not hasattr(manager, "pause"):
        raise ImportError(
            "this version of transformers cannot pause generation: "
            'pip install "weight-update[transformers]" installs one that can'
        )
    config = manager.continuous_batching_config
    problem = None
    if manager.num_return_sequences != 1:
        problem = "num_return_sequences is not 1; give generate() the prompt several times"
    elif pause == "keep" and config.allow_block_sharing and config.cpu_offload_space != 0:
        problem = "cpu_offload_space with pause='keep' needs allow_block_sharing=False"
    if problem:
        raise ValueError(problem)


def tokens_of(prompt: Iterable[int], vocabulary: int) -> list[int]:
    """Return the token ids of a prompt; with other prompts, transformers would end generation for all.

    Raises:
        TypeError: a prompt is not a sequence of integers.
        ValueError: it is empty, or has a token that is not in ``range(vocabulary)``.
    """
    try:
        tokens = [operator.index(token) for token in prompt]
    except TypeError:
        raise TypeError(
            f"a prompt is a list of token ids, and generate() takes a list of prompts; got {prompt!r:.60}"
        ) from None
    if not tokens or not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise ValueError(
            f"a prompt has token ids from 0 to {vocabulary - 1}, at least one; got {tokens!r:.60}"
        )
    return tokens


def forget_prefixes(manager: Any) -> None:
    """Have no later request share key-value blocks of former weights."""
    cache = manager.batch_processor.cache
    cache.evict_cached_blocks()
    for allocator in cache.cache_allocators.values():
        if allocator.use_block_sharing:
            ledger = allocator.ledger
            ledger.hash_to_block.clear()
            ledger.block_to_hash.clear()
            # Blocks of running requests get hashes that no prompt has. The hash of a later block of the
            # same request is computed from them. Without one, a block is hashed when it becomes full.
            for block in {block for blocks in allocator.block_table.values() for block in blocks}:
                ledger.block_to_hash[block] = fresh = secrets.randbits(64)
                ledger.hash_to_block[fresh] = block


def ended(manager: Any) -> LifecycleError:
    """Return the error for a call after the end of generation, with its cause."""
    cause = manager.background_thread_status.fatal_error
    return LifecycleError(f"generation has ended{f' ({cause})' if cause else ''}; make a new engine")
