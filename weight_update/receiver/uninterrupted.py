"""Running an action where no signal handler can interrupt it."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch

_FINISH_SECONDS = 5.0
"""How long an interrupted caller waits for an action that has begun."""


def run_uninterrupted(action: Callable[[], float], leave: Callable[[], None]) -> float:
    """Run ``action`` in a thread of its own, where no signal handler can interrupt it.

    The thread has the caller's context variables, modes and CUDA stream. If the wait for it is interrupted,
    ``leave`` is called.
    """
    results: list[float] = []
    errors: list[BaseException] = []
    ended = threading.Lock()  # not Thread.join, which does not survive an interrupt
    ended.acquire()
    context = contextvars.copy_context()
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    on_stream: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        on_stream = torch.cuda.stream(torch.cuda.current_stream())

    def run() -> None:
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad), on_stream:
                results.append(context.run(action))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(error)
        ended.release()

    thread = threading.Thread(target=run, name="weight_update-switch", daemon=True)
    try:
        with contextlib.suppress(RuntimeError):  # the process ends, or has as many threads as it may have
            thread.start()
        if thread.ident is not None:
            ended.acquire()
    except BaseException:
        leave()
        ended.acquire(timeout=_FINISH_SECONDS)
        raise
    if thread.ident is None:
        return action()
    if errors:
        raise errors.pop()  # so that its frames do not refer to it
    return results[0]
