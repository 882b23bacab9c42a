"""Engine for a ``transformers`` model and its continuous batching."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

import torch

from weight_update.arguments import require_seconds, whole_number
from weight_update.engines.base import InferenceEngine, WeightChange
from weight_update.engines.continuous_batching import (
    Pause,
    ended,
    forget_prefixes,
    require_configs,
    require_no_manager,
    require_supported,
    tokens_of,
)
from weight_update.engines.placement import bits_of, tensors_of
from weight_update.errors import LifecycleError, SyncTimeoutError, UnsupportedSourceError, undo_on_error
from weight_update.text import plural
from weight_update.threads import exiting, start

_log = logging.getLogger(__name__)
_SECONDS_TO_NOTICE_THE_END = 0.1
_UPDATES_REMEMBERED = 1024


class Answer(NamedTuple):
    """An answer of a :class:`TransformersEngine` to one prompt.

    Attributes:
        tokens: the generated tokens, without the prompt; with the token that ended the answer, if any.
        logprobs: log probability of each token; empty without ``return_logprobs=True`` in the
            ``ContinuousBatchingConfig``.
        versions: version of the weights that computed each token.
        finished: whether the answer is complete. It is not if an update with ``pause="abort"`` ended it.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finished: bool


class _Request(NamedTuple):
    """A request that has no answer yet; it was made while ``version`` was in force."""

    future: Future[Answer]
    version: int


class TransformersEngine(InferenceEngine):
    """Engine that generates with a ``transformers`` model, and updates it between two decoding steps.

    Example::

        engine = TransformersEngine(model, GenerationConfig(max_new_tokens=64), pause="keep")
        scheme.init_on_receiver(model=engine, worker_idx=0)
        scheme.connect()
        with engine:
            for answer in engine.generate([[1, 2, 3], [4, 5]]):
                print(answer.tokens, answer.versions)

    Weights have the names of ``model.state_dict()``. Tied weights are sent once and written once. The calling
    threads share one continuous-batching manager, which this engine owns: use neither
    ``model.generate_batch`` nor another manager of the same model meanwhile.

    Each update drops the key-value cache of prefixes, which later requests would reuse. A running request
    keeps its own key-value cache, with the values of previous weights.

    Source: ``ContinuousBatchingManager`` in ``generation/continuous_batching/continuous_api.py`` of
    transformers, whose ``pause()`` stops generation between two steps; the names of the pause modes are those
    of ``pause_generation`` in vLLM.

    Args:
        model: a ``PreTrainedModel`` with weights, not on the meta device.
        generation_config: ``GenerationConfig`` of all requests; None for that of the model.
        continuous_batching_config: ``ContinuousBatchingConfig``; None for the defaults of transformers, which
            take most of the free memory for the cache.
        pause: treatment of running requests during an update. ``"wait"`` finishes them first. ``"keep"``
            continues them afterwards, with the new weights. ``"abort"`` ends them; their answers have the
            tokens so far, and ``finished=False``. Requests that arrive during an update begin after it.
        loads_in_chunks: as :attr:`~weight_update.InferenceEngine.loads_in_chunks`.
        stable_addresses: whether weights are copied into the model's tensors. False makes the model's tensors
            refer to the received memory, without a copy; the model must be on the CPU.
            None is False on the CPU, unless weights are loaded in chunks, and True elsewhere.
        timeout: seconds that an update waits for generation to pause, and a request for an update to end.

    Attributes:
        version: version of the loaded weights; None before the first, and after an update that failed.

    Raises:
        TypeError: ``model`` is not a ``PreTrainedModel``, or a configuration is of another type.
        UnsupportedSourceError: weights of the model are on the meta device.
        ValueError: ``pause`` is none of the three, or the configurations cannot be combined with it; or
            ``timeout`` is not a time to wait; or the model keeps a manager of ``generate_batch``.
    """

    loads_changes = True

    def __init__(
        self,
        model: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        *,
        pause: Literal["wait", "keep", "abort"] = "wait",
        loads_in_chunks: bool = False,
        stable_addresses: bool | None = None,
        timeout: float = 60.0,
    ) -> None:
        if pause not in ("wait", "keep", "abort"):
            raise ValueError(f"pause is 'wait', 'keep' or 'abort', not {pause!r}")
        if isinstance(model, type) or not hasattr(model, "init_continuous_batching"):
            raise TypeError(f"give a PreTrainedModel, not {model!r}")
        require_configs(generation_config, continuous_batching_config)
        self.loads_in_chunks: bool = loads_in_chunks
        self.pause: str = pause
        self.timeout: float = require_seconds("timeout", timeout)
        self.version: int | None = None
        self._model = model
        may_keep = model.device.type == "cpu" and not loads_in_chunks
        if stable_addresses is False and not may_keep:
            raise ValueError(
                "stable_addresses=False needs a model on the CPU, and cannot be combined with loads_in_chunks"
            )
        self.keeps_tensors: bool = may_keep and not stable_addresses
        hollow = [name for name, tensor in self.expected_weights().items() if tensor.is_meta]
        if hollow:
            raise UnsupportedSourceError(
                f"on the meta device: {', '.join(hollow[:10])}; load the model, or call to_empty()"
            )
        require_no_manager(model)
        self._manager = model.init_continuous_batching(generation_config, continuous_batching_config)
        require_supported(self._manager, pause)
        self._requests: dict[str, _Request] = {}
        self._switches: deque[tuple[float, int]] = deque(maxlen=_UPDATES_REMEMBERED)
        self._changed = threading.Condition()
        self._updating = self._closed = False
        self._held: Pause | None = None
        self._weights: Mapping[str, torch.Tensor] = {}
        self._written: set[tuple[int, int]] = set()
        # Not a daemon, so that the interpreter waits for it at exit; it may be freeing tensors then.
        self._deliverer = threading.Thread(target=self._deliver, name="weight_update-answers")
        # Another thread: callbacks of futures may submit requests, which wait for the end of an update.
        self._results: SimpleQueue[tuple[Future[Answer], Answer | Exception] | None] = SimpleQueue()
        self._setter = threading.Thread(target=self._set_results, name="weight_update-results")
        with undo_on_error(self._abandon):
            self._manager.start()
            start(self._setter)
            start(self._deliverer)  # last: it ends the two others

    # -- generation --------------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], **options: Any) -> Future[Answer]:
        """Begin to answer a prompt; if an update is under way, begin after it.

        Callbacks of the future may call this method. They must not wait for answers.

        Args:
            prompt: token ids.
            options: arguments of ``ContinuousBatchingManager.add_request``, such as ``max_new_tokens``, but
                neither ``request_id`` nor ``record_timestamps``.

        Raises:
            TypeError: the prompt is not a sequence of integers; it may be a text. Or ``options`` has an
                argument that the engine sets itself.
            ValueError: the prompt is empty, or has a token that the model does not have; or
                ``max_new_tokens`` is no integer of at least 0.
            SyncTimeoutError: an update took longer than ``timeout`` seconds.
            LifecycleError: there is no complete version of the weights, or generation has ended.
        """
        return self._submit([prompt], options)[0]

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
        """Answer several prompts; with ``pause="wait"``, by the same version of the weights.

        Args:
            prompts: token ids of each prompt.
            options: as for :meth:`submit`.

        Raises:
            TypeError, ValueError: as :meth:`submit`, for one of the prompts; none is answered.
            SyncTimeoutError: an update took longer than ``timeout`` seconds.
            LifecycleError: there is no complete version of the weights, an update failed meanwhile, or
                generation has ended.
            RuntimeError: transformers failed to answer a prompt; its message is included.
        """
        return [future.result() for future in self._submit(prompts, options)]

    def close(self) -> None:
        """End generation; requests without an answer raise LifecycleError. May be called twice."""
        self._end_requests()  # the deliverer then ends generation
        for thread in (self._deliverer, self._setter):
            if thread is not threading.current_thread():  # else a callback of a future closes the engine
                thread.join(self.timeout)

    def __enter__(self) -> TransformersEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- updates -----------------------------------------------------------------------------------

    def expected_weights(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors of ``model.state_dict()``, under all their names."""
        state = self._model.state_dict()
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}

    def begin_update(self, version: int) -> None:
        """Pause generation between two decoding steps, as ``pause`` states; new requests wait.

        Raises:
            SyncTimeoutError: generation did not pause within ``timeout`` seconds.
            LifecycleError: generation has ended.
        """
        deadline = time.monotonic() + self.timeout
        with self._changed:
            self._updating = True
        with undo_on_error(self._resume):
            if self.pause == "wait":
                self._wait_for_answers(deadline)
            held = self._held = Pause(self._manager)
            held.begin(max(deadline - time.monotonic(), 0.0))
            self._weights = tensors_of(self._model) if self.keeps_tensors else self.expected_weights()
            self._written.clear()
            if self.pause == "abort":
                self._answer_with_tokens_so_far()

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Give ``weights`` to the model; RuntimeError or KeyError if they are not those of the model."""
        for name, value in weights:
            mine = self._weights[name]
            if self.keeps_tensors:
                mine.data = value
                continue
            memory = mine.data_ptr(), mine.nbytes
            if memory not in self._written:  # else tied to a weight that is written already
                mine.copy_(value)
                self._written.add(memory)

    def load_changes(self, changes: Iterator[WeightChange], base: int) -> None:
        """Write the elements that changed into the model's tensors."""
        for change in changes:
            mine = self._weights[change.name]
            if change.positions is None or not mine.is_contiguous():
                mine.copy_(change.weight)
            else:
                device = mine.device
                # As bits: PyTorch cannot write elements of every dtype.
                bits_of(mine).view(-1)[change.positions.to(device)] = bits_of(change.values).to(device)

    def finish_update(self, version: int) -> None:
        """Drop cached prefixes, and continue generation with ``version``."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)  # generation has a stream of its own
        forget_prefixes(self._manager)
        self._switches.append((time.perf_counter(), version))
        self.version = version
        self._resume()

    def abort_update(self, version: int) -> None:
        """Fail running requests, and let new ones fail until an update succeeds."""
        self.version = None
        self._fail(LifecycleError(f"version {version} of the weights failed midway; wait for another update"))
        self._resume()

    # -- requests ----------------------------------------------------------------------------------

    def _submit(self, prompts: Sequence[Sequence[int]], options: dict[str, Any]) -> list[Future[Answer]]:
        vocabulary = self._model.get_input_embeddings().num_embeddings
        tokens = [tokens_of(prompt, vocabulary) for prompt in prompts]
        if options.get("max_new_tokens") is not None:  # transformers would end generation for all
            whole_number(options["max_new_tokens"], "max_new_tokens", least=0)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._updating, self.timeout):
                raise SyncTimeoutError(f"an update took longer than {self.timeout:g} s (raise timeout=)")
            return [self._add(prompt, options) for prompt in tokens]

    def _add(self, prompt: list[int], options: dict[str, Any]) -> Future[Answer]:
        if self._closed or not self._manager.is_running():
            raise ended(self._manager)
        if self.version is None:
            raise LifecycleError("this engine has no complete version of the weights; wait for an update")
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()  # cancel() has no effect
        request_id = self._manager.add_request(prompt, request_id=None, record_timestamps=True, **options)
        if request_id is None:
            raise ended(self._manager)
        self._requests[request_id] = _Request(future, self.version)
        return future

    def _wait_for_answers(self, deadline: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._requests, max(deadline - time.monotonic(), 0.0)):
                running = plural(len(self._requests), "request")
                raise SyncTimeoutError(
                    f"{running} ran longer than {self.timeout:g} s (raise timeout=, or update with "
                    "pause='keep')"
                )

    def _settle(self, output: Any) -> bool:
        """Answer a request; return False if it has an answer."""
        with self._changed:
            request = self._requests.get(output.request_id)
            if request is None:
                return False
            result: Answer | Exception
            if output.error is None:
                result = self._answer(output, request)
            else:
                result = RuntimeError(f"transformers did not answer: {output.error}")
            del self._requests[output.request_id]
            self._results.put((request.future, result))
            self._changed.notify_all()
        return True

    def _deliver(self) -> None:
        """Hand out answers until generation ends; requests without an answer get the error that ended it."""
        try:
            self._hand_out_answers()
        except Exception as error:  # noqa: BLE001 - the callers that wait get it
            self._fail(error)
            self._stop()
        finally:
            self._fail(ended(self._manager))
            self._results.put(None)

    def _set_results(self) -> None:
        """Set the results of futures until generation has ended."""
        while (item := self._results.get()) is not None:
            future, result = item
            try:
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
            except BaseException:  # noqa: BLE001 - a callback called sys.exit(), which would end this thread
                _log.exception("a callback of an answer raised an error")

    def _hand_out_answers(self) -> None:
        """Hand out answers until generation ends; end it with the engine, or with the main thread."""
        stopped = False
        while True:
            running = self._manager.is_running()
            output = self._manager.get_result(timeout=_SECONDS_TO_NOTICE_THE_END)
            if output is None and not running:
                break
            if output is not None and output.is_finished():
                self._settle(output)
            if running and not stopped and (self._closed or exiting()):
                stopped = True
                self._stop()  # the interpreter waits for the thread of the manager

    def _stop(self) -> None:
        """End generation. Only one thread may: of two in ``stop()`` of the manager, one raises."""
        self._end_requests()
        if self._manager.is_running():
            self._manager.stop(timeout=self.timeout, hard_stop=True)

    def _end_requests(self) -> None:
        """Fail all requests, also those that come later."""
        with self._changed:
            self._closed = True
        self._fail(ended(self._manager))
        self._resume()

    def _abandon(self) -> None:
        """End what the constructor has started."""
        self._stop()
        self._results.put(None)

    def _answer(self, output: Any, request: _Request) -> Answer:
        times = output.timestamps
        if self._manager.continuous_batching_config.use_async_batching:
            # The time is noted one step later there, so the time before is that of a token's computation.
            times = [output.lifespan[0], *times][: len(times)]
        tokens = output.generated_tokens
        # transformers forgets the times of a request that it puts off when the cache is full
        versions = [request.version] * (len(tokens) - len(times)) + [*map(self._version_at, times)]
        # with max_new_tokens=0, transformers computes a token, and drops it
        return Answer(tokens, output.logprobs, versions[: len(tokens)], output.is_finished())

    def _version_at(self, when: float) -> int:
        """Return the version in force at a time of ``time.perf_counter``."""
        return self._switches[max(bisect(self._switches, when, key=lambda one: one[0]) - 1, 0)][1]

    def _fail(self, error: Exception) -> None:
        with self._changed:
            requests, self._requests = self._requests, {}
            for request_id, request in requests.items():
                self._manager.cancel_request(request_id)
                self._results.put((request.future, error))
            self._updating = False  # callbacks of the futures may submit requests
            self._changed.notify_all()

    def _answer_with_tokens_so_far(self) -> None:
        """Answer the requests that have begun; the others run with the new weights."""
        scheduler = self._manager.batch_processor.scheduler
        for request_id, state in {**scheduler.waiting_requests, **scheduler.active_requests}.items():
            if self._settle(state.to_generation_output()):
                self._manager.cancel_request(request_id)

    def _resume(self) -> None:
        """Let generation and new requests continue."""
        held, self._held = self._held, None
        if held is not None:
            held.release()
        with self._changed:
            self._updating = False
            self._changed.notify_all()
