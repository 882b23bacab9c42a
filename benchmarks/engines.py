"""Patches into the model of an inference engine, beside loading all weights."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from benchmarks.processes import Process
from benchmarks.report import Figure, Table, Unable, chosen, machine, ratio, say
from benchmarks.targets import Target, target, targets_table
from benchmarks.updates import Weights, change
from weight_update import (
    InferenceEngine,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    SyncReport,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.engines import TransformersEngine
from weight_update.wire.memory import digest

QUICK = "40 MB, 2 turns"

LOADED, PATCHED = "dense, load_state_dict()", "patch, TransformersEngine"
_LINKS = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 10e9 / 8}
_VOCABULARY, _LAYERS = 32_000, 24
_WARM = 2


def make_model(megabytes: float) -> Any:
    """Return a Qwen3 model of about ``megabytes`` in bfloat16, with random weights."""
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
    model = model.to(torch.bfloat16).to_empty(device="cpu").eval()
    model.tie_weights()
    with torch.no_grad():
        for weight in model.state_dict().values():
            weight.view(torch.int16).fill_(0x3C00)  # 0.0078
    return model


class Loader(InferenceEngine):
    """Loads all weights by ``load_state_dict``."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def begin_update(self, version: int) -> None: ...

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._model.load_state_dict(dict(weights))

    def finish_update(self, version: int) -> None: ...


class Receiver:
    """A process with one engine."""

    def __init__(self, name: str, scheme: WeightSyncScheme, megabytes: float) -> None:
        self._model, self._scheme = make_model(megabytes), scheme
        self._engine: Any = Loader(self._model) if name == LOADED else self._transformers_engine()
        scheme.init_on_receiver(model=self._engine, worker_idx=0)

    def _transformers_engine(self) -> TransformersEngine:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        return TransformersEngine(
            self._model,
            GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1),
            ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64),
        )

    def join(self) -> None:
        self._scheme.connect()

    def digests(self) -> list[str]:
        """Return a digest of each weight that the engine generates with."""
        return [digest(value) for value in self._model.state_dict().values()]

    def close(self) -> None:
        self._scheme.shutdown()
        if isinstance(self._engine, TransformersEngine):
            self._engine.close()


def schemes() -> dict[str, WeightSyncScheme]:
    patch = WeightStrategy("state_dict", encoding=PatchEncoding())
    return {
        LOADED: SharedMemWeightSyncScheme("state_dict"),
        PATCHED: SharedMemWeightSyncScheme(patch),
    }


def measure(megabytes: float, fraction: float, turns: int) -> dict[str, list[tuple[float, SyncReport]]]:
    """Send updates by each scheme, in turns; return the seconds and the report of each ``send()``."""
    model = make_model(megabytes)
    live: Weights = model.state_dict()
    owned = {value.data_ptr(): value for value in live.values()}
    context, found, random = mp.get_context("spawn"), schemes(), np.random.default_rng(0)
    receivers = {}
    sent: dict[str, list[tuple[float, SyncReport]]] = {name: [] for name in found}
    try:
        for name, scheme in found.items():
            scheme.init_on_sender(model=model, num_workers=1, ctx=context)
            receivers[name] = Process(Receiver, name, scheme, megabytes)
            receivers[name].answer()
            receivers[name].send("join")
            scheme.connect()
            receivers[name].answer()
        for _ in range(_WARM + turns):
            change(dict(enumerate(owned.values())), fraction, "1..4 ulp", random)  # type: ignore[arg-type]
            for name, scheme in found.items():
                start = time.perf_counter()
                report = scheme.send()
                sent[name].append((time.perf_counter() - start, report))
        expected = [digest(value) for value in live.values()]
        for name, receiver in receivers.items():
            if receiver.ask("digests") != expected:
                raise RuntimeError(f"{name}: the engine generates with other weights than the trainer's")
    finally:
        for receiver in receivers.values():
            receiver.close()
        for scheme in found.values():
            scheme.shutdown()
    return {name: one[_WARM:] for name, one in sent.items()}


def add_options(known: argparse.ArgumentParser) -> None:
    known.add_argument("--size", type=float, metavar="MB", help="size of the model; default: 1000")
    known.add_argument("--fraction", type=float, metavar="F", help="of the elements changed; default: 0.01")
    known.add_argument("--turns", type=int, metavar="N", help="default: 7")


def facts(options: argparse.Namespace) -> list[str]:
    del options
    try:
        return machine(["torch", "tensordict", "transformers"], threads=torch.get_num_threads())
    except PackageNotFoundError:
        raise Unable('transformers is not installed: pip install "weight-update[transformers]"') from None


def tables(options: argparse.Namespace) -> Iterator[Table]:
    given = chosen(options, ["size", "fraction", "turns"], {"size": 40.0, "turns": 2})
    size, fraction, turns = given.get("size", 1000.0), given.get("fraction", 0.01), given.get("turns", 7)
    say(f"{size:g} MB, {fraction:.1%} changed, {turns} turns")
    found = measure(size, fraction, turns)
    seconds = {name: Figure(tuple(time for time, _ in sent)) for name, sent in found.items()}
    pauses = {
        name: Figure(tuple(report.stall_seconds[0] for _, report in sent)) for name, sent in found.items()
    }
    over = {
        (name, link): Figure(tuple(time + report.wire_bytes / speed for time, report in sent))
        for name, sent in found.items()
        for link, speed in _LINKS.items()
    }
    rows = [
        [
            name,
            Figure(tuple(float(report.wire_bytes) for _, report in sent)).show(1e-6, 1),
            seconds[name].cell(1e3, 0),
            *(over[name, link].cell(1e3, 0) for link in _LINKS),
            pauses[name].cell(1e3, 1),
        ]
        for name, sent in found.items()
    ]
    yield Table(
        f"A Qwen3 model of {size:g} MB in bfloat16, {fraction:.1%} of its elements changed",
        "Milliseconds, median (min .. max), from ``send()`` in the trainer until the engine may go on. *on "
        "one host*: measured, over shared memory. *at 1 (10) Gbit/s*: the same, plus the time that the link "
        "needs for the bytes. *pause*: time in which the engine may not generate.",
        ["update", "MB", "on one host", *(f"at {link}" for link in _LINKS), "pause"],
        rows,
    )
    yield targets_table(list(_targets(over, pauses)))


def _targets(over: dict[tuple[str, str], Figure], pauses: dict[str, Figure]) -> Iterator[Target]:
    link = "10 Gbit/s"
    yield target("engine, 10 Gbit/s: patch, of dense", ratio(over[PATCHED, link], over[LOADED, link]))
    yield target("engine: pause with a patch, of loading all", ratio(pauses[PATCHED], pauses[LOADED]))
