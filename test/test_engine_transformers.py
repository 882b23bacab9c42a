"""The engine for transformers, with a tiny Qwen3 of random weights."""

from __future__ import annotations

import copy
import inspect
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import pytest
import torch
from interpreters import run_python
from marks import slow
from pairs import connect_pair

transformers = pytest.importorskip(
    "transformers", reason='transformers is not installed: pip install "weight-update[transformers]"'
)

from weight_update import (  # noqa: E402
    BucketEncoding,
    LifecycleError,
    MemoryWeightSyncScheme,
    PatchEncoding,
    SchemaMismatchError,
    SyncFailedError,
    UnsupportedSourceError,
    WeightStrategy,
)
from weight_update.engines import Answer, TransformersEngine  # noqa: E402
from weight_update.testing import EngineContract  # noqa: E402
from weight_update.testing.processes import wait_until  # noqa: E402

WAIT = 20.0
PAGE = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
LONG = 60


def model_of(seed: int, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model whose greedy answers differ from seed to seed, and do not repeat one token."""
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.5,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    return transformers.Qwen3ForCausalLM(config).to(dtype).eval()


def greedy() -> Any:
    """Return the options of a generation of 8 tokens."""
    return transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)


def engine_of(model: Any, **options: Any) -> TransformersEngine:
    batching = transformers.ContinuousBatchingConfig(page_size=PAGE, num_blocks=256, max_batch_tokens=64)
    return TransformersEngine(model, greedy(), batching, **{"timeout": WAIT, **options})


@torch.no_grad()
def continued(*phases: tuple[Any, int]) -> list[int]:
    """Return the greedy answer to PROMPT, so many tokens by each model, which share one key-value cache."""
    cache = transformers.DynamicCache(config=phases[0][0].config)
    parameters = inspect.signature(phases[0][0].forward).parameters
    key = "cache" if "cache" in parameters else "past_key_values"  # its name in transformers 5.23
    todo, answer = PROMPT, []
    for model, count in phases:
        for _ in range(count):
            logits = model(torch.tensor([todo]), use_cache=True, **{key: cache}).logits
            todo = [int(logits[0, -1].argmax())]
            answer += todo
    return answer


class Steps:
    """Counts the forward passes of a model; at the one of number ``stop_at`` it waits until ``go`` is set."""

    def __init__(self, model: Any, stop_at: int) -> None:
        self.count, self.stop_at = 0, stop_at
        self.reached, self.go = threading.Event(), threading.Event()
        model.register_forward_pre_hook(self._before)

    def _before(self, *_: Any) -> None:
        self.count += 1
        if self.count == self.stop_at:
            self.reached.set()
            assert self.go.wait(WAIT)


@pytest.fixture
def connected() -> Iterator[Callable[..., MemoryWeightSyncScheme]]:
    """Return a function that connects a sender of weights to an engine."""
    ends: list[Callable[[], None]] = []

    def connect(source: Any, engine: TransformersEngine, **options: Any) -> MemoryWeightSyncScheme:
        ends.append(engine.close)
        scheme = MemoryWeightSyncScheme(WeightStrategy("state_dict", **options), timeout=WAIT)
        ends.append(scheme.shutdown)
        ends.append(connect_pair(scheme, source, engine).shutdown)
        return scheme

    yield connect
    for end in reversed(ends):
        end()


@pytest.mark.parametrize("tied", [True, slow(False)], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("encoding", "options"),
    [
        ("dense", {"stable_addresses": False}),
        ("patch", {}),
        ("dense", {"stable_addresses": True}),
        (BucketEncoding(bucket_size=2048), {"loads_in_chunks": True}),
    ],
    ids=["dense", "patch", "dense, copied", "in chunks"],
)
def test_answers_are_those_of_the_trainers_model(
    connected: Any, tied: bool, encoding: Any, options: dict[str, bool]
) -> None:
    trainer, mine = model_of(1, tied=tied), model_of(2, tied=tied, dtype=torch.bfloat16)
    engine = engine_of(mine, **options)
    with pytest.raises(LifecycleError, match="no complete version"):
        engine.generate([PROMPT])
    scheme = connected(trainer, engine, encoding=encoding)
    places = [parameter.data_ptr() for parameter in mine.parameters()]
    for seed in range(3, 5):
        trainer.load_state_dict(model_of(seed, tied=tied).state_dict())
        report = scheme.send()
        held = mine.state_dict()
        assert all(torch.equal(held[name], value.bfloat16()) for name, value in trainer.state_dict().items())
        (answer,) = engine.generate([PROMPT])
        assert answer.tokens == continued((copy.deepcopy(trainer).bfloat16(), 8))
        assert answer.versions == [engine.version] * 8 == [report.version] * 8
        assert answer.finished
    in_place = any(options.values())
    assert engine.keeps_tensors is not in_place
    if in_place:
        assert places == [parameter.data_ptr() for parameter in mine.parameters()]
    assert (mine.lm_head.weight is mine.model.embed_tokens.weight) == tied


SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
WINDOW = {"sliding_window": 8}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Gemma3Text", {"head_dim": 8, **WINDOW}),
        ("Mixtral", EXPERTS),
        *(
            slow(kind, more)
            for kind, more in (
                ("Llama", {}),
                ("Mistral", WINDOW),
                ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
                ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, **EXPERTS}),
                ("Gemma2", {"head_dim": 8, **WINDOW}),
                ("Phi3", {}),
                ("Olmo2", {}),
                ("Cohere", {}),
            )
        ),
    ],
)
def test_architectures(connected: Any, kind: str, more: dict[str, Any]) -> None:
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    trainer, mine = (transformers.AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    engine = engine_of(mine)
    scheme = connected(trainer, engine, encoding="patch")
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter += (torch.rand_like(parameter) < 0.1) * torch.randn_like(parameter)
        assert scheme.send().encoding == "patch"
        assert all(torch.equal(mine.state_dict()[name], one) for name, one in trainer.state_dict().items())
        (answer,) = engine.generate([PROMPT])
        whole = trainer.generate(torch.tensor([PROMPT]), generation_config=greedy())
        assert answer.tokens == whole[0, len(PROMPT) :].tolist()


def test_a_patch_writes_what_changed(connected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, mine = model_of(1), model_of(2)
    engine = engine_of(mine, stable_addresses=True)
    scheme = connected(trainer, engine, encoding=PatchEncoding())
    monkeypatch.setattr(engine, "load_weights", None)
    written: dict[str, Any] = {}
    load_changes = engine.load_changes

    def noted(changes: Any, base: int) -> None:
        found = list(changes)
        written.update({change.name: change.positions.tolist() for change in found}, base=base)
        load_changes(iter(found), base)

    monkeypatch.setattr(engine, "load_changes", noted)
    with torch.no_grad():
        trainer.model.embed_tokens.weight.view(-1)[[5, 70]] = torch.tensor([1.5, -2.5])
        trainer.model.norm.weight[3] = 0.25
    scheme.send()
    assert written.pop("base") == 0
    assert written["model.embed_tokens.weight"] == [5, 70]
    assert written["model.norm.weight"] == [3]
    assert set(written) <= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert all(torch.equal(mine.state_dict()[name], value) for name, value in trainer.state_dict().items())
    assert engine.generate([PROMPT])[0].tokens == continued((trainer, 8))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e8m0fnu])
def test_a_patch_of_a_dtype_that_pytorch_writes_no_elements_of(connected: Any, dtype: torch.dtype) -> None:
    trainer, mine = model_of(1), model_of(2)
    for model in (trainer, mine):
        model.register_buffer("scales", torch.arange(16, dtype=torch.uint8).view(dtype))
    scheme = connected(trainer, engine_of(mine, stable_addresses=True), encoding=PatchEncoding())
    trainer.scales.view(torch.uint8)[4] = 77
    assert scheme.send().encoding == "patch"
    assert torch.equal(mine.scales.view(torch.uint8), trainer.scales.view(torch.uint8))


def test_tied_weights_are_sent_once(connected: Any) -> None:
    trainer, mine = model_of(1), model_of(2)
    report = connected(trainer, engine_of(mine)).send()
    assert report.wire_bytes < sum(weight.nbytes for weight in trainer.parameters()) + 4096


def updated_midway(connected: Any, pause: Any) -> tuple[Any, Any, TransformersEngine, Future[Answer]]:
    """Send an update during the tenth step of an answer.

    Returns:
        the trainer's model before and after the update, the engine, and the answer.
    """
    trainer, mine = model_of(1), model_of(2)
    steps = Steps(mine, stop_at=10)
    engine = engine_of(mine, pause=pause)
    scheme = connected(trainer, engine)
    before = copy.deepcopy(trainer)
    future = engine.submit(PROMPT, max_new_tokens=LONG)
    assert steps.reached.wait(WAIT)
    trainer.load_state_dict(model_of(3).state_dict())
    sending = scheme.send_async()
    steps.go.set()
    sending.wait(WAIT)
    return before, trainer, engine, future


def test_keep_continues_with_the_new_weights_and_the_old_cache(connected: Any) -> None:
    before, trainer, _, future = updated_midway(connected, "keep")
    answer = future.result(WAIT)
    old = answer.versions.index(1)
    assert answer.versions == [0] * old + [1] * (LONG - old)
    assert 10 <= old < LONG
    assert answer.tokens == continued((before, old), (trainer, LONG - old))
    assert answer.tokens != continued((before, LONG))


@pytest.mark.parametrize("ends", ["finish_update", "abort_update"])
def test_no_forward_pass_runs_during_an_update(connected: Any, ends: str) -> None:
    mine = model_of(2)
    steps = Steps(mine, stop_at=10)
    engine = engine_of(mine, pause="keep")
    connected(model_of(1), engine)
    engine.submit(PROMPT, max_new_tokens=LONG)
    assert steps.reached.wait(WAIT)
    threading.Timer(0.1, steps.go.set).start()
    engine.begin_update(1)
    count = steps.count
    assert count < LONG, "generation has ended, so this test shows nothing"
    time.sleep(0.3)
    assert steps.count == count
    getattr(engine, ends)(1)
    if ends == "finish_update":
        wait_until(lambda: steps.count > count, WAIT)


def test_wait_finishes_running_requests_first(connected: Any) -> None:
    before, trainer, engine, running = updated_midway(connected, "wait")
    assert running.result(WAIT).versions == [0] * LONG, "the update came before the end of the request"
    assert running.result(0).tokens == continued((before, LONG))
    (later,) = engine.generate([PROMPT])
    assert (later.tokens, later.versions) == (continued((trainer, 8)), [1] * 8)


def test_requests_wait_for_an_update_that_has_begun(connected: Any) -> None:
    trainer, mine = model_of(1), model_of(2)
    engine = engine_of(mine)
    connected(trainer, engine)
    answers: list[Any] = []
    engine.begin_update(1)
    asking = threading.Thread(target=lambda: answers.extend(engine.generate([PROMPT] * 3)))
    asking.start()
    asking.join(0.2)
    assert asking.is_alive(), "it was answered during the update"
    engine.load_weights(iter(model_of(3).state_dict().items()))
    engine.finish_update(1)
    asking.join(WAIT)
    assert [answer.versions for answer in answers] == [[1] * 8] * 3
    assert answers[0].tokens == continued((model_of(3), 8))


def test_abort_answers_with_the_tokens_so_far(connected: Any) -> None:
    before, trainer, engine, future = updated_midway(connected, "abort")
    answer = future.result(WAIT)
    assert not answer.finished
    count = len(answer.tokens)
    assert 10 <= count < LONG
    assert (answer.tokens, answer.versions) == (continued((before, count)), [0] * count)
    assert engine.generate([PROMPT])[0].tokens == continued((trainer, 8))


@pytest.mark.parametrize("pause", ["wait", "keep"])
def test_no_request_shares_a_prefix_of_former_weights(connected: Any, pause: Any) -> None:
    trainer, mine = model_of(1), model_of(2)
    steps = Steps(mine, stop_at=30)
    engine = engine_of(mine, pause=pause)
    scheme = connected(trainer, engine)
    (first,) = engine.generate([PROMPT])  # 8 steps
    running = engine.submit(PROMPT, max_new_tokens=LONG)
    assert steps.reached.wait(WAIT)
    trainer.load_state_dict(model_of(3).state_dict())
    sending = scheme.send_async()
    steps.go.set()
    sending.wait(WAIT)
    whole = PROMPT + running.result(WAIT).tokens
    for length in (len(PROMPT), len(PROMPT) + 10, len(whole)):
        (answer,) = engine.generate([whole[:length]])
        fresh = trainer.generate(torch.tensor([whole[:length]]), max_new_tokens=8, do_sample=False)
        assert answer.tokens == fresh[0, length:].tolist(), "it read keys and values of former weights"
    assert first.versions == [0] * 8


def test_an_update_that_fails_midway(connected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, mine = model_of(1), model_of(2)
    steps = Steps(mine, stop_at=10)
    engine = engine_of(mine, pause="keep")
    scheme = connected(trainer, engine)
    running = engine.submit(PROMPT, max_new_tokens=LONG)
    assert steps.reached.wait(WAIT)
    load_weights = engine.load_weights
    monkeypatch.setattr(engine, "load_weights", lambda weights: [load_weights(iter([next(weights)])), 1 / 0])
    sending = scheme.send_async()
    steps.go.set()
    with pytest.raises(SyncFailedError, match="ZeroDivisionError"):
        sending.wait(WAIT)
    with pytest.raises(LifecycleError, match="failed midway"):
        running.result(WAIT)
    with pytest.raises(LifecycleError, match="no complete version"):
        engine.submit(PROMPT)
    monkeypatch.undo()
    scheme.send()
    assert engine.generate([PROMPT])[0].tokens == continued((trainer, 8))


@pytest.mark.parametrize("pause", ["wait", "abort"])
def test_a_callback_that_submits_during_an_update(connected: Any, pause: Any) -> None:
    """Neither the update nor the answers to other requests wait for the callback."""
    trainer, mine = model_of(1), model_of(2)
    steps = Steps(mine, stop_at=10)
    engine = engine_of(mine, pause=pause, timeout=WAIT / 2)
    scheme = connected(trainer, engine)
    again: SimpleQueue[Future[Answer]] = SimpleQueue()
    short, long = (engine.submit(PROMPT, max_new_tokens=count) for count in (12, LONG))
    short.add_done_callback(lambda _: again.put(engine.submit(PROMPT)))
    assert steps.reached.wait(WAIT)
    sending = scheme.send_async()
    wait_until(lambda: engine._updating, WAIT)
    start = time.monotonic()
    steps.go.set()
    sending.wait(WAIT)
    assert again.get(timeout=WAIT).result(WAIT).versions == [1] * 8
    assert long.result(WAIT).finished is (pause == "wait")
    assert time.monotonic() - start < WAIT / 4


@pytest.mark.parametrize("ending", ["answered", "failed"])
def test_a_callback_that_would_end_its_thread(connected: Any, ending: str) -> None:
    """As by ``sys.exit()``; other requests get their answers, or their errors."""
    mine = model_of(2)
    steps = Steps(mine, stop_at=5)
    engine = engine_of(mine)
    connected(model_of(1), engine)
    running = [engine.submit(PROMPT, max_new_tokens=LONG) for _ in range(3)]
    assert steps.reached.wait(WAIT)
    running[0].add_done_callback(lambda _: sys.exit())
    if ending == "answered":
        steps.go.set()
        assert all(len(one.result(WAIT).tokens) == LONG for one in running)
        assert len(engine.generate([PROMPT])[0].tokens) == 8
    else:
        closing = threading.Thread(target=engine.close)
        closing.start()
        steps.go.set()
        closing.join(WAIT)
        for one in running:
            with pytest.raises(LifecycleError, match="generation has ended"):
                one.result(WAIT)


def test_a_request_that_is_longer_than_the_timeout(connected: Any) -> None:
    trainer, mine = model_of(1), model_of(2)
    steps = Steps(mine, stop_at=10)
    engine = engine_of(mine)
    scheme = connected(trainer, engine)
    running = engine.submit(PROMPT, max_new_tokens=LONG)
    assert steps.reached.wait(WAIT)
    for pause, message in (("wait", "1 request ran longer"), ("keep", "a decoding step did not end in time")):
        engine.pause, engine.timeout = pause, 0.05
        with pytest.raises(SyncFailedError, match=message):
            scheme.send()
    engine.timeout = WAIT
    steps.go.set()
    assert running.result(WAIT).versions == [0] * LONG
    scheme.send()
    assert set(engine.generate([PROMPT])[0].versions) == {engine.version}


def test_a_version_of_transformers_without_pauses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    monkeypatch.delattr(ContinuousBatchingManager, "pause")
    with pytest.raises(ImportError, match=r"weight-update\[transformers\]"):
        engine_of(model_of(0))


def test_differences_are_found_in_connect(connected: Any) -> None:
    with pytest.raises(SchemaMismatchError, match=r"lm_head\.weight"):
        connected(model_of(1, tied=False), engine_of(model_of(2, tied=True)))


def test_after_close(connected: Any) -> None:
    mine = model_of(2)
    steps = Steps(mine, stop_at=10)
    engine = engine_of(mine)
    scheme = connected(model_of(1), engine)
    running = engine.submit(PROMPT, max_new_tokens=LONG)
    assert steps.reached.wait(WAIT)
    closing = threading.Thread(target=engine.close)
    closing.start()
    steps.go.set()
    closing.join(WAIT)
    with pytest.raises(LifecycleError, match="generation has ended"):
        running.result(WAIT)
    with pytest.raises(LifecycleError, match="generation has ended"):
        engine.generate([PROMPT])
    with pytest.raises(SyncFailedError, match="generation has ended"):
        scheme.send()


def test_requests_that_would_end_generation(connected: Any) -> None:
    """One caller's mistake does not end the answers of others."""
    engine = engine_of(model_of(2))
    connected(model_of(1), engine)
    running = engine.submit(PROMPT, max_new_tokens=LONG)
    for prompts in ([1, 2, 3], ["text"], "text", [PROMPT, [1.5]]):
        with pytest.raises(TypeError, match=r"a prompt is a list of token ids, and generate\(\) takes"):
            engine.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got 'text'"):
        engine.submit("text")  # type: ignore[arg-type]
    for prompt in ([], [1, 32], [-1]):
        with pytest.raises(ValueError, match="token ids from 0 to 31, at least one; got"):
            engine.submit(prompt)
    for count in ("5", [5], 2.5, -1):
        with pytest.raises(ValueError, match="max_new_tokens is an integer of at least 0, not"):
            engine.submit(PROMPT, max_new_tokens=count)
    assert len(running.result(WAIT).tokens) == LONG
    assert len(engine.generate([PROMPT, torch.tensor(PROMPT)])) == 2


def test_options_of_a_request(connected: Any) -> None:
    engine = engine_of(model_of(1))
    connected(model_of(2), engine)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'request_id'"):
        engine.submit(PROMPT, request_id="mine")  # two requests of one id would share one answer
    assert engine.generate([PROMPT], max_new_tokens=0)[0][:3] == ([], [], [])
    assert engine.generate([PROMPT], max_new_tokens=2)[0].versions == [0, 0]
    assert len(engine.generate([PROMPT], max_new_tokens=None)[0].tokens) == 8


def test_what_cannot_be_served() -> None:
    with pytest.raises(TypeError, match="give a PreTrainedModel, not 'Qwen/Qwen3-8B'"):
        TransformersEngine("Qwen/Qwen3-8B")
    with pytest.raises(ValueError, match="cannot be combined with loads_in_chunks"):
        TransformersEngine(model_of(1), loads_in_chunks=True, stable_addresses=False)
    with pytest.raises(ValueError, match="'wait', 'keep' or 'abort', not 'hold'"):
        TransformersEngine(model_of(1), pause="hold")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give generate\\(\\) the prompt several times"):
        TransformersEngine(model_of(1), transformers.GenerationConfig(num_return_sequences=2, do_sample=True))
    with torch.device("meta"), pytest.raises(UnsupportedSourceError, match=r"model\.embed_tokens\.weight"):
        TransformersEngine(model_of(1))
    batching = transformers.ContinuousBatchingConfig(cpu_offload_space=1.0)
    with pytest.raises(ValueError, match="allow_block_sharing=False"):
        TransformersEngine(model_of(1), continuous_batching_config=batching, pause="keep")


def test_a_model_that_keeps_a_manager() -> None:
    """It would generate with the configurations of that manager, not with those that are given."""
    model = model_of(1)
    batching = transformers.ContinuousBatchingConfig(page_size=PAGE, num_blocks=256, max_batch_tokens=64)
    model.generate_batch([PROMPT], greedy(), continuous_batching_config=batching, persistent_manager=True)
    with pytest.raises(ValueError, match=r"call model\.destroy_cached_continuous_batching_manager\(\) first"):
        engine_of(model)
    model.destroy_cached_continuous_batching_manager()
    engine_of(model).close()


FORGETFUL = """
import threading
import transformers
from test_engine_transformers import PROMPT, engine_of, model_of

engine = engine_of(model_of(1), pause="keep")
engine.begin_update(0)
engine.load_weights(iter(model_of(2).state_dict().items()))
engine.finish_update(0)
running = engine.submit(PROMPT, max_new_tokens=100_000)
engine.begin_update(1)
raise SystemExit("the program ends during an update")
"""


@pytest.mark.slow
def test_a_program_ends_that_does_not_close_its_engine(tmp_path: Path) -> None:
    program = tmp_path / "forgetful.py"
    program.write_text(FORGETFUL)
    done = run_python(program, timeout=60.0, env={"PYTHONPATH": str(Path(__file__).parent)})
    assert (done.returncode, done.stderr.strip()) == (1, "the program ends during an update")


UNUSED = """
import atexit
import time
from test_engine_transformers import engine_of, model_of

engine = engine_of(model_of(1))
stop = engine._manager.stop

def stop_slowly(**options):
    stop(**options)
    time.sleep(1.0)

engine._manager.stop = stop_slowly
atexit.register(lambda: print("still frees tensors" if engine._deliverer.is_alive() else "has ended"))
"""


@pytest.mark.slow
def test_a_program_waits_at_exit_for_the_threads_of_its_engine(tmp_path: Path) -> None:
    """A thread that frees tensors while the interpreter ends would abort the process."""
    program = tmp_path / "unused.py"
    program.write_text(UNUSED)
    done = run_python(program, timeout=60.0, env={"PYTHONPATH": str(Path(__file__).parent)})
    assert (done.returncode, done.stdout) == (0, "has ended\n"), done.stderr


def test_a_request_that_transformers_cannot_answer(connected: Any) -> None:
    mine = model_of(2)
    engine = engine_of(mine)
    connected(model_of(1), engine)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("no memory left")

    mine.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="did not answer: no memory left"):
        engine.generate([PROMPT])
    with pytest.raises(LifecycleError, match="generation has ended"):
        engine.generate([PROMPT])


def test_an_update_that_fails_after_the_pause_began(connected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engine = model_of(1), engine_of(model_of(2), stable_addresses=True, timeout=3.0)
    scheme = connected(trainer, engine)

    def fail() -> None:
        raise ZeroDivisionError("the model has no weights today")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "expected_weights", fail)
        with pytest.raises(SyncFailedError, match="no weights today"):
            scheme.send()
    assert engine.version == 0
    assert engine.generate([PROMPT])[0].tokens == continued((trainer, 8)), "generation goes on"


def test_an_answer_that_cannot_be_read(connected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that hands out answers does not leave their callers waiting."""
    engine = engine_of(model_of(2))
    connected(model_of(1), engine)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("an answer of another form")

    monkeypatch.setattr(engine, "_answer", fail)
    with pytest.raises(ZeroDivisionError, match="another form"):
        engine.submit(PROMPT).result(WAIT)
    with pytest.raises(LifecycleError, match="generation has ended"):
        engine.generate([PROMPT])


def test_two_threads_that_end_generation(connected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that hands out answers may end it while close() does."""
    engine = engine_of(model_of(2))
    connected(model_of(1), engine)
    stop, calls = engine._manager.stop, []
    first, go = threading.Event(), threading.Event()

    def noted(**options: Any) -> None:
        calls.append(options)
        first.set()
        assert go.wait(WAIT)
        stop(**options)

    monkeypatch.setattr(engine._manager, "stop", noted)
    closing = [threading.Thread(target=engine.close) for _ in range(2)]
    closing[0].start()
    assert first.wait(WAIT)
    closing[1].start()
    closing[1].join(0.2)
    go.set()
    for thread in closing:
        thread.join(WAIT)
    assert len(calls) == 1


def test_an_interrupt_while_a_pause_begins(connected: Any) -> None:
    """Generation goes on; the thread of the pause would hold it for ever."""
    mine = model_of(2)
    steps = Steps(mine, stop_at=10)
    engine = engine_of(mine, pause="keep")
    connected(model_of(1), engine)
    running = engine.submit(PROMPT, max_new_tokens=LONG)
    assert steps.reached.wait(WAIT)
    main = threading.main_thread().ident or 0
    interrupting = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        engine.begin_update(1)
    interrupting.join()
    steps.go.set()
    assert len(running.result(WAIT).tokens) == LONG


def test_a_signal_handler_that_closes_an_engine_which_is_being_closed(connected: Any) -> None:
    mine = model_of(2)
    steps = Steps(mine, stop_at=10)
    engine = engine_of(mine)
    connected(model_of(1), engine)
    engine.submit(PROMPT, max_new_tokens=LONG)
    assert steps.reached.wait(WAIT)
    main = threading.main_thread().ident or 0
    timers = [
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR1)),
        threading.Timer(0.5, steps.go.set),
    ]
    former = signal.signal(signal.SIGUSR1, lambda *_: engine.close())
    try:
        for timer in timers:
            timer.start()
        engine.close()
        for timer in timers:
            timer.join()
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert not engine._manager.is_running()


def test_an_engine_without_threads_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would wait for the manager's at exit, for ever."""
    before, begin = set(threading.enumerate()), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "weight_update-answers":
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match=r"can't start new thread \(weight_update-answers\): raise"):
            engine_of(model_of(1))
    wait_until(lambda: set(threading.enumerate()) <= before, WAIT)


def test_arguments_of_other_types() -> None:
    model = model_of(0)
    with pytest.raises(TypeError, match="give a PreTrainedModel, not <class"):
        TransformersEngine(type(model))
    with pytest.raises(TypeError, match=r"give a GenerationConfig or None, not {'max_new_tokens': 8}"):
        TransformersEngine(model, {"max_new_tokens": 8})
    with pytest.raises(TypeError, match="give a ContinuousBatchingConfig or None, not GenerationConfig"):
        TransformersEngine(model, None, transformers.GenerationConfig())
    for timeout in (0, -1):
        with pytest.raises(ValueError, match=f"timeout is a positive number of seconds, .* got {timeout}"):
            engine_of(model, timeout=timeout)


class TestContract(EngineContract):
    options: ClassVar[dict[str, Any]] = {}

    def setup_method(self) -> None:
        self.engines: list[TransformersEngine] = []

    def teardown_method(self) -> None:
        for engine in self.engines:
            engine.close()

    def make_engine(self) -> TransformersEngine:
        self.engines.append(engine_of(model_of(2, dtype=torch.bfloat16), **self.options))
        return self.engines[-1]

    def make_source(self) -> Any:
        return model_of(1)

    def read_weights(self, engine: Any) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = engine.expected_weights()
        return weights

    def generate(self, engine: Any) -> list[int]:
        (answer,) = engine.generate([PROMPT])
        tokens: list[int] = answer.tokens
        return tokens


class TestContractInChunks(TestContract):
    options: ClassVar[dict[str, Any]] = {"loads_in_chunks": True, "pause": "keep"}


@pytest.mark.slow
class TestContractCopied(TestContract):
    options: ClassVar[dict[str, Any]] = {"stable_addresses": True}
