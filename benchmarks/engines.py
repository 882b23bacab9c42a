"""Patches into the model of an inference engine, busy or idle, beside loading all weights."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing as mp

from benchmarks.options import Options
from benchmarks.processes import Process
from benchmarks.report import Figure, Table, Unable, machine, ratio, say
from benchmarks.targets import Target, target, targets_table
from benchmarks.updates import Weights, change
from weight_update import PatchEncoding, SharedMemWeightSyncScheme, WeightStrategy, WeightSyncScheme
from weight_update.engines import TransformersEngine
from weight_update.wire.memory import digest

QUICK = "40 MB, 2 turns"

LOADED = "dense, load_state_dict()"
PATCHED = "patch, tensors exchanged"
IN_PLACE = "patch, elements written in place"
_SPEEDS = {"on one host": math.inf, "at 1 Gbit/s": 1e9 / 8, "at 10 Gbit/s": 10e9 / 8}  # bytes a second
_VOCABULARY, _LAYERS = 32_000, 24
_WARM = 2
_PATIENCE = 100.0  # seconds for an answer of an engine
_PROMPT, _TOKENS, _REQUEST_SECONDS = [1, 2, 3], 24, 2.0
_BEGIN_SECONDS = 0.2  # in which a request surely has some tokens


def make_model(megabytes: float, device: str) -> Any:
    """Return a Qwen3 model of about ``megabytes`` in bfloat16, all of whose weights are equal."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    # 13 x width squared for each layer: attention with 4 of 16 key-value heads, and an MLP of 3.5 widths
    layers = _LAYERS if megabytes >= 500 else 2
    width = 64
    while 2e-6 * (13.0 * layers * width**2 + _VOCABULARY * width) < megabytes:
        width += 64
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=width // 16,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device=device).eval()
    model.tie_weights()
    with torch.no_grad():
        for weight in model.state_dict().values():
            weight.view(torch.int16).fill_(0x3C00)  # 0.0078
    return model


class Engine(TransformersEngine):
    """An engine that continues requests after an update, and measures how long no step can run.

    Attributes:
        pauses: seconds of each update in which generation was paused.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        super().__init__(
            model,
            GenerationConfig(max_new_tokens=_TOKENS, do_sample=False, eos_token_id=-1),
            ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64),
            pause="keep",
            **options,
        )
        self.pauses: list[float] = []

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        self._since = time.perf_counter()

    def finish_update(self, version: int) -> None:
        super().finish_update(version)
        self.pauses.append(time.perf_counter() - self._since)


class Loader(Engine):
    """Loads all weights by ``load_state_dict``."""

    loads_changes = False

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._model.load_state_dict(dict(weights))


class Receiver:
    """A process with one engine."""

    def __init__(self, name: str, scheme: WeightSyncScheme, megabytes: float, device: str) -> None:
        self._model, self._scheme = make_model(megabytes, device), scheme
        kind = Loader if name == LOADED else Engine
        self._engine = kind(self._model, stable_addresses=name != PATCHED)
        self._step = 0.0  # seconds of a decoding step
        scheme.init_on_receiver(model=self._engine, worker_idx=0)

    def join(self) -> None:
        """Connect; then find out how long a decoding step takes."""
        self._scheme.connect()
        for _ in range(2):
            start = time.perf_counter()
            self._engine.generate([_PROMPT])
            self._step = (time.perf_counter() - start) / _TOKENS

    def submit(self) -> None:
        """Begin a request, and return when it has some tokens."""
        tokens = max(_TOKENS, int(_REQUEST_SECONDS / self._step))
        self._running = self._engine.submit(_PROMPT, max_new_tokens=tokens)
        time.sleep(max(4 * self._step, _BEGIN_SECONDS))

    def noticed(self) -> bool:
        """Wait for the answer; return whether the update came while the engine computed it."""
        return len(set(self._running.result(_PATIENCE).versions)) == 2

    def pause(self) -> float:
        """Return the seconds of the last pause."""
        return self._engine.pauses[-1]

    def digests(self) -> list[str]:
        """Return a digest of each weight that the engine generates with."""
        return [digest(value) for value in self._model.state_dict().values()]

    def close(self) -> None:
        self._scheme.shutdown()
        self._engine.close()


def schemes(device: str) -> dict[str, WeightSyncScheme]:
    """Return a scheme for each row of the table; an engine on a GPU always writes elements in place."""
    names = [LOADED, IN_PLACE, *[PATCHED] * (device != "cuda")]
    encodings = {name: "dense" if name == LOADED else PatchEncoding() for name in names}
    return {
        name: SharedMemWeightSyncScheme(WeightStrategy("state_dict", encoding=encoding))
        for name, encoding in encodings.items()
    }


class Update(NamedTuple):
    """One measured update.

    Attributes:
        seconds: from ``send()`` until generation continues.
        pause: seconds in which no step could run.
        wire_bytes: bytes that a link would have to carry.
    """

    seconds: float
    pause: float
    wire_bytes: int


def _updates(receiver: Process, scheme: WeightSyncScheme, *, busy: bool) -> list[Update]:
    """Send an update while the engine answers, or is idle; return it, or none if the answer missed it."""
    if busy:
        receiver.ask("submit")
    start = time.perf_counter()
    report = scheme.send()
    seconds = time.perf_counter() - start
    if busy and not receiver.ask("noticed"):
        return []
    return [Update(seconds, receiver.ask("pause"), report.wire_bytes)]


def measure(
    megabytes: float, fraction: float, turns: int, device: str
) -> dict[bool, dict[str, list[Update]]]:
    """Send updates by each scheme, in turns; return those that came while the engine was busy, and idle."""
    model = make_model(megabytes, device)
    live: Weights = model.state_dict()
    owned = list({value.data_ptr(): value for value in live.values()}.values())
    newest = {str(i): value.cpu() for i, value in enumerate(owned)}
    context, found, random = mp.get_context("spawn"), schemes(device), np.random.default_rng(0)
    receivers = {}
    sent: dict[bool, dict[str, list[Update]]] = {busy: {name: [] for name in found} for busy in (True, False)}
    try:
        for name, scheme in found.items():
            scheme.init_on_sender(model=model, num_workers=1, ctx=context)
            receivers[name] = Process(Receiver, name, scheme, megabytes, device)
            receivers[name].answer()
            receivers[name].send("join")
            scheme.connect()
            receivers[name].answer()
        for _ in range(_WARM + 3 * turns):
            if all(len(updates) >= _WARM + turns for updates in sent[True].values()):
                break
            for busy in sent:
                change(newest, fraction, "1..4 ulp", random)
                torch._foreach_copy_(owned, list(newest.values()))
                for name, scheme in found.items():
                    sent[busy][name] += _updates(receivers[name], scheme, busy=busy)
        _require_same(live, receivers)
    finally:
        for receiver in receivers.values():
            receiver.close()
        for scheme in found.values():
            scheme.shutdown()
    if any(len(updates) <= _WARM for updates in sent[True].values()):
        raise Unable("requests ended before the updates, or began after them")
    return {
        busy: {name: updates[_WARM:] for name, updates in by_name.items()} for busy, by_name in sent.items()
    }


def _require_same(weights: Weights, receivers: dict[str, Process]) -> None:
    expected = [digest(value) for value in weights.values()]
    for name, receiver in receivers.items():
        if receiver.ask("digests") != expected:
            raise RuntimeError(f"{name}: the engine generates with other weights than the trainer's")


def add_options(known: Options) -> None:
    known.add("--size", 1000.0, "MB of the model", quick=40.0)
    known.add("--fraction", 0.01, "of the elements changed")
    known.add("--turns", 7, quick=2)
    known.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="of both models; default: cpu"
    )


def facts(options: argparse.Namespace) -> list[str]:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise Unable("it needs a CUDA device, and torch sees none here")
    try:
        return machine("transformers", threads=torch.get_num_threads())
    except PackageNotFoundError:
        raise Unable('transformers is not installed: pip install "weight-update[transformers]"') from None


def tables(options: argparse.Namespace) -> Iterator[Table]:
    size, fraction, turns = options.size, options.fraction, options.turns
    say(f"{size:g} MB, {fraction:.1%} changed, {turns} turns")
    place = " on a GPU" if options.device == "cuda" else ""
    targets: list[Target] = []
    for busy, sent in measure(size, fraction, turns, options.device).items():
        pauses = {name: Figure([one.pause for one in updates]) for name, updates in sent.items()}
        seconds = {
            (name, way): Figure([one.seconds + one.wire_bytes / speed for one in updates])
            for name, updates in sent.items()
            for way, speed in _SPEEDS.items()
        }
        rows = [
            [
                name,
                Figure([one.wire_bytes for one in updates]).show(1e-6, 1),
                *(seconds[name, way].cell(1e3, 0) for way in _SPEEDS),
                pauses[name].cell(1e3, 1),
            ]
            for name, updates in sent.items()
        ]
        yield Table(
            f"A Qwen3 model of {size:g} MB in bfloat16{place}, {fraction:.1%} of its elements changed, "
            + ("the engine answers" if busy else "the engine is idle"),
            "Milliseconds, median (min .. max), from ``send()`` in the trainer until the engine "
            + ("continues a request that ran before. " if busy else "can begin a request. ")
            + "*on one host*: measured, over shared memory. *at 1 (10) Gbit/s*: the same, plus the time that "
            "the link needs for the bytes. *pause*: time in which no decoding step could run.",
            ["update", "MB", *_SPEEDS, "pause"],
            rows,
        )
        targets += _targets(seconds, pauses, busy=busy)
    yield targets_table(targets)


def _targets(
    seconds: dict[tuple[str, str], Figure], pauses: dict[str, Figure], *, busy: bool
) -> Iterator[Target]:
    patched, way = PATCHED if PATCHED in pauses else IN_PLACE, "at 10 Gbit/s"
    reached = ratio(seconds[patched, way], seconds[LOADED, way])
    yield target("{state} engine, 10 Gbit/s: patch, of dense", reached, state="busy" if busy else "idle")
    if busy:
        template = "busy engine: pause with a patch, of loading all"
        yield target(template, ratio(pauses[patched], pauses[LOADED]))
