"""Converters in a strategy: what workers get, and what happens when it does not fit them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from convert_parts import GROUPS, HEADS, HuggingFace, Tree, convert, megatron_of, numbers, state
from torch import nn

from weight_update import (
    ConversionError,
    MemoryWeightSyncScheme,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncError,
    WeightSyncScheme,
)
from weight_update.convert import (
    Converter,
    Item,
    chain,
    gather_tensor_parallel,
    megatron_to_hf,
    merge_lora,
    quantize_fp8_blocks,
    quantize_int8,
    rename,
)
from weight_update.testing import WorkerProcesses, fingerprint
from weight_update.testing.worker_processes import start_workers
from weight_update.testing.workers import Method


def connected(
    scheme: WeightSyncScheme, source: Any, target: nn.Module, method: Method = "thread"
) -> WorkerProcesses:
    return start_workers(scheme, [target], method, model=source)


def change(model: nn.Module, seed: int) -> None:
    with torch.no_grad():
        for place, value in enumerate(model.parameters()):
            if value.is_floating_point() and place % 3 == seed % 3:
                value[:1] += numbers(*value[:1].shape, seed=seed)


def unchanged(items: Iterator[Item]) -> Iterator[Item]:
    yield from items


@pytest.mark.parametrize("convert", [None, unchanged], ids=["plain", "converted"])
@pytest.mark.parametrize("encoding", ["dense", "patch", "bucket"])
def test_the_dtype_stays_that_of_connect(encoding: str, convert: Converter | None) -> None:
    source, strategy = nn.Linear(8, 8), WeightStrategy("state_dict", encoding=encoding, convert=convert)
    with MemoryWeightSyncScheme(strategy) as scheme, connected(scheme, source, nn.Linear(8, 8)) as procs:
        for dtype in (torch.float16, torch.float64, torch.bfloat16):
            source.to(dtype)
            change(source, 0)
            scheme.send()
            there = {name: value.to(torch.float32) for name, value in source.state_dict().items()}
            assert procs.ask("fingerprint") == [fingerprint(there)]
        integers = {name: value.to(torch.int32) for name, value in source.state_dict().items()}
        with pytest.raises(SchemaMismatchError, match="dtype int32 in the weights given"):
            scheme.send(integers)


def extra(items: Iterator[Item]) -> Iterator[Item]:
    yield from items
    yield "more.weight", torch.ones(2)


def missing(items: Iterator[Item]) -> Iterator[Item]:
    return ((name, value) for name, value in items if name != "0.bias")


def reshaped(items: Iterator[Item]) -> Iterator[Item]:
    return ((name, value[:1] if name == "0.bias" else value) for name, value in items)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (extra, r"more\.weight: float32\[2\]: missing in"),
        (missing, r"0\.bias: float32\[3\]: unexpected, only in"),
        (reshaped, r"0\.bias: float32\[1\]: shape \[3\] in"),
        (rename({"0.bias": "0.b"}), r"0\.b: .* missing in"),
    ],
    ids=["extra", "missing", "reshaped", "renamed"],
)
@pytest.mark.parametrize(
    ("cls", "method"), [(MemoryWeightSyncScheme, "thread"), (SharedMemWeightSyncScheme, "fork")]
)
def test_what_does_not_fit_is_an_error_on_both_sides_before_anything_is_sent(
    cls: type[WeightSyncScheme], method: Method, wrong: Converter, line: str
) -> None:
    target = nn.Sequential(nn.Linear(4, 3))
    strategy = WeightStrategy("state_dict", convert=wrong)
    scheme, source = cls(strategy, connect_timeout=20.0), nn.Sequential(nn.Linear(4, 3))
    with start_workers(scheme, [target], method, model=source, connect=False) as procs:
        errors = procs.try_connect()
        for error in errors.values():
            assert isinstance(error, WeightSyncError)
            with pytest.raises(type(error), match=line):
                raise error
        assert isinstance(errors[0], SchemaMismatchError)
        assert procs.ask("fingerprint") == [fingerprint(target, strategy)]


@pytest.mark.parametrize("later", [extra, missing, reshaped])
@pytest.mark.parametrize("encoding", ["dense", "bucket", "patch"])
def test_a_converter_that_changes_its_mind(later: Callable[..., Any], encoding: str) -> None:
    now: list[Callable[..., Any]] = [lambda items: items]
    source, target = nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 3))
    strategy = WeightStrategy("state_dict", encoding=encoding, convert=lambda items: now[0](items))
    with connected(MemoryWeightSyncScheme(strategy, timeout=20.0), source, target) as procs:
        before, version = procs.ask("fingerprint"), procs.scheme.version
        change(source, 0)
        now[0] = later
        with pytest.raises(SchemaMismatchError, match="more.weight" if later is extra else r"0\.bias"):
            procs.scheme.send()
        assert procs.ask("fingerprint") == before
        assert procs.ask("version") == [version]
        now[0] = lambda items: items
        procs.scheme.send()
        assert procs.ask("fingerprint") == [fingerprint(source, strategy)]


def reuse(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert into one buffer, which each weight overwrites."""
    buffer = torch.empty(12)
    for name, value in items:
        yield name, buffer[: value.numel()].view_as(value).copy_(value)


def slices(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert into one buffer, where each weight has its place."""
    buffer, end = torch.empty(15), 0
    for name, value in items:
        start, end = end, end + value.numel()
        yield name, buffer[start:end].view_as(value).copy_(value)


@pytest.mark.parametrize("encoding", ["dense", "bucket", "patch"])
def test_a_converter_with_one_buffer(encoding: str) -> None:
    now: list[Callable[..., Any]] = [slices]
    source, target = nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 3))
    strategy = WeightStrategy("state_dict", encoding=encoding, convert=lambda items: now[0](items))
    with connected(MemoryWeightSyncScheme(strategy, timeout=20.0), source, target) as procs:
        change(source, 0)
        procs.scheme.send()
        before = procs.ask("fingerprint")
        assert before == [fingerprint(source, WeightStrategy("state_dict"))]
        change(source, 1)
        now[0] = reuse
        with pytest.raises(ConversionError, match=r"memory of '0\.weight' again as '0\.bias'"):
            procs.scheme.send()
        assert procs.ask("fingerprint") == before


def again(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert into one large buffer, which is given for each weight."""
    buffer = torch.empty(600, 600)
    for name, value in items:
        yield name, buffer.copy_(value)


@pytest.mark.parametrize("later", [reuse, again])
def test_a_converter_with_one_buffer_in_a_pipeline(later: Any) -> None:
    now: list[Callable[..., Any]] = [lambda items: items]
    sizes = (600, 600) if later is again else (3, 4)
    source, target = ({name: torch.randn(sizes) for name in "abc"} for _ in range(2))
    strategy = WeightStrategy(
        "state_dict", encoding="bucket", max_in_flight=2, convert=lambda items: now[0](items)
    )
    with connected(MemoryWeightSyncScheme(strategy, timeout=20.0), source, target) as procs:
        before = procs.ask("fingerprint")
        assert before == [fingerprint(source)]
        source["b"] += 1
        now[0] = later
        with pytest.raises(ConversionError, match=r"memory of '.' again as '.'"):
            procs.scheme.send()
        assert procs.ask("fingerprint") == before
        now[0] = lambda items: items
        procs.scheme.send()
        assert procs.ask("fingerprint") == [fingerprint(source)]


def without_padding(items: Iterator[Item]) -> Iterator[Item]:
    for name, value in items:
        yield name, value[:5]


TIED = megatron_to_hf(1, vocab_size=5, tie_word_embeddings=True)
HEAD = {"model.embed_tokens.weight": numbers(6, 4), "model.norm.weight": numbers(4)}
HEAD["lm_head.weight"] = HEAD["model.embed_tokens.weight"]
PADDED = {"embedding.word_embeddings.weight": numbers(6, 4), "decoder.final_layernorm.weight": numbers(4)}


@pytest.mark.parametrize("max_in_flight", [None, 2])
@pytest.mark.parametrize(
    ("source", "converter"),
    [(HEAD, without_padding), (PADDED, TIED), (PADDED, chain(TIED, quantize_int8()))],
    ids=["apart", "in a row", "chain"],
)
def test_embeddings_stay_tied_if_a_converter_cuts_the_padding_off(
    source: dict[str, torch.Tensor], converter: Converter, max_in_flight: int | None
) -> None:
    """Both names then have views that the trainer does not have."""
    target = nn.ModuleDict({"model": nn.ModuleDict({"embed_tokens": nn.Embedding(5, 4)})})
    target["model"]["norm"], target["lm_head"] = nn.RMSNorm(4), nn.Linear(4, 5, bias=False)
    target["lm_head"].weight = target["model"]["embed_tokens"].weight
    strategy = WeightStrategy("state_dict", encoding="bucket", max_in_flight=max_in_flight, convert=converter)
    with connected(MemoryWeightSyncScheme(strategy, timeout=20.0), source, target) as procs:
        next(iter(source.values())).add_(1)
        procs.scheme.send()
        assert procs.ask("fingerprint") == [fingerprint(convert(converter, source.items()))]


@pytest.mark.parametrize("encoding", ["dense", "bucket", "patch"])
def test_a_converter_that_computes_in_inference_mode(encoding: str) -> None:
    @torch.inference_mode()
    def doubled(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    strategy = WeightStrategy(
        "state_dict",
        encoding=encoding,
        convert=lambda items: ((name, doubled(value)) for name, value in items),
    )
    source = nn.Linear(4, 3)
    with connected(MemoryWeightSyncScheme(strategy, timeout=20.0), source, nn.Linear(4, 3)) as procs:
        for seed in range(2):
            change(source, seed)
            procs.scheme.send()
            assert procs.ask("fingerprint") == [
                fingerprint({name: value * 2 for name, value in source.state_dict().items()})
            ]


def test_a_converter_that_fails_leaves_workers_alone() -> None:
    source = nn.Sequential(nn.Linear(4, 3))
    strategy = WeightStrategy("state_dict", convert=quantize_int8())
    quantized = Tree(convert(quantize_int8(), source.state_dict().items()))
    with connected(MemoryWeightSyncScheme(strategy, timeout=20.0), source, quantized) as procs:
        before = procs.ask("fingerprint")
        with torch.no_grad():
            source[0].weight[1, 1] = torch.nan
        with pytest.raises(WeightSyncError, match=r"0\.weight: has a NaN"):
            procs.scheme.send()
        assert procs.ask("fingerprint") == before
        with torch.no_grad():
            source[0].weight[1, 1] = 0.0
        procs.scheme.send()
        assert procs.ask("fingerprint") == [
            fingerprint(convert(quantize_int8(), source.state_dict().items()))
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("encoding", ["dense", "bucket", "patch"])
def test_a_fused_trainer_and_a_worker_process_with_separate_weights(
    encoding: str, dtype: torch.dtype
) -> None:
    source = Tree(megatron_of(state(HuggingFace(1, layers=2)), layers=2))
    strategy = WeightStrategy("state_dict", encoding=encoding, convert=megatron_to_hf(HEADS, GROUPS))
    scheme = SharedMemWeightSyncScheme(strategy, timeout=20.0)
    with connected(scheme, source, HuggingFace(2, layers=2).to(dtype), "fork") as procs:
        for seed in range(4):
            expected = convert(megatron_to_hf(HEADS, GROUPS), source.named_parameters())
            assert procs.ask("fingerprint") == [
                fingerprint({name: value.to(dtype) for name, value in expected.items()}, strategy)
            ]
            change(source, seed)
            scheme.send()


@pytest.mark.parametrize("encoding", ["dense", "bucket", "patch"])
@pytest.mark.parametrize("quantize", [quantize_int8(), quantize_fp8_blocks((4, 4))], ids=["int8", "fp8"])
def test_quantized_weights_and_their_scales_arrive(quantize: Converter, encoding: str) -> None:
    source = Tree(megatron_of(state(HuggingFace(1, layers=2)), layers=2))
    converter = chain(megatron_to_hf(HEADS, GROUPS), quantize)
    target = Tree(
        {
            name: torch.zeros_like(value)
            for name, value in convert(converter, source.named_parameters()).items()
        }
    )
    strategy = WeightStrategy("state_dict", encoding=encoding, convert=converter)
    scheme = SharedMemWeightSyncScheme(strategy, timeout=20.0)
    with connected(scheme, source, target, "fork") as procs:
        for seed in range(4):
            expected = convert(converter, source.named_parameters())
            assert procs.ask("fingerprint") == [fingerprint(expected, strategy)]
            change(source, seed)
            report = scheme.send()
        assert report.encoding == encoding


class Noted(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"amax": 1.0}

    def set_extra_state(self, state: Any) -> None:
        pass


@pytest.mark.parametrize("extract_as", ["state_dict", "tensordict"])
def test_extra_state_stays_with_the_trainer(extract_as: Any) -> None:
    source, target = nn.Sequential(Noted(4, 3)), nn.ModuleDict({"body": nn.Linear(4, 3)})
    strategy = WeightStrategy(extract_as, convert=rename([("^0", "body")]))
    with connected(MemoryWeightSyncScheme(strategy, timeout=20.0), source, target) as procs:
        change(source, 0)
        procs.scheme.send()
        assert procs.ask("fingerprint") == [
            fingerprint({f"body.{name}": value for name, value in source[0].named_parameters()})
        ]


def test_only_the_adapters_are_trained() -> None:
    base = state(HuggingFace(1, layers=1))
    adapted = {f"base_model.model.{name}": value for name, value in base.items()}
    layer = "base_model.model.model.layers.0.self_attn.o_proj"
    adapted[f"{layer}.base_layer.weight"] = adapted.pop(f"{layer}.weight")
    adapted[f"{layer}.lora_A.default.weight"] = numbers(2, 12)
    adapted[f"{layer}.lora_B.default.weight"] = torch.zeros(8, 2)
    source = Tree(adapted)
    strategy = WeightStrategy("state_dict", encoding="patch", convert=merge_lora(2.0))
    scheme = SharedMemWeightSyncScheme(strategy, timeout=20.0)
    with connected(scheme, source, HuggingFace(2, layers=1), "fork") as procs:
        assert procs.ask("fingerprint") == [fingerprint(base, strategy)]
        with torch.no_grad():
            dict(source.named_parameters())[f"{layer}.lora_B.default.weight"][:2] += 1.0
        report = scheme.send()
        assert report.encoding == "patch"
        assert procs.ask("fingerprint") == [
            fingerprint(convert(merge_lora(2.0), source.named_parameters()), strategy)
        ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_an_exception_of_a_converter_names_the_weight() -> None:
    def halved(items: Iterator[Item]) -> Iterator[Item]:
        for name, value in items:
            yield name, value / {"0.weight": 2}[name]

    strategy = WeightStrategy("state_dict", convert=halved)
    with pytest.raises(KeyError) as caught:
        MemoryWeightSyncScheme(strategy).init_on_sender(model=nn.Sequential(nn.Linear(4, 3)), num_workers=1)
    assert caught.value.__notes__ == [
        "raised while convert= ran; the last weight that it took is '0.bias', the last that it gave "
        "'0.weight'"
    ]


TAKES_ONE = ", which takes one iterator of (name, tensor) pairs"


def never(items: Iterator[Item]) -> Iterator[Item]:
    raise IndexError
    yield from items


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize(
    ("wrong", "raised", "call", "taken"),
    [
        (lambda name, tensor: (name, tensor), TypeError, TAKES_ONE, None),
        (lambda items: [(name, {}[name]) for name, _ in items], KeyError, TAKES_ONE, "weight"),
        (never, IndexError, "", None),
    ],
    ids=["wrong signature", "eager", "nothing taken"],
)
def test_every_exception_of_a_converter_says_so(
    wrong: Any, raised: type[Exception], call: str, taken: str | None
) -> None:
    with pytest.raises(raised) as caught:
        WeightStrategy(convert=wrong).outgoing(nn.Linear(2, 2))
    last = f"the last weight that it took is {taken!r}, the last that it gave None"
    assert caught.value.__notes__ == [f"raised while convert= ran{call}; {last}"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: chain([rename({"a": "b"})]), "chain takes converters, each an argument of its own"),
        (lambda: rename(5), "rename takes a dict"),
        (lambda: rename([("a",)]), "rename takes a dict"),
        (lambda: rename([("a", 3)]), "rename takes a dict"),
        (lambda: rename({"a": 1}), "rename takes a dict"),
        (lambda: megatron_to_hf("8"), "num_heads is an integer of at least 1, not '8'"),
        (lambda: megatron_to_hf(8, 2.0), "num_kv_groups is an integer of at least 1, not 2.0"),
        (lambda: merge_lora({"default": "0.5"}), "scaling= is alpha / r, or a dict"),
        (lambda: quantize_fp8_blocks(("a", "b")), "block= is rows and columns"),
        (lambda: quantize_fp8_blocks((1.5, 2)), "block= is rows and columns"),
        (lambda: gather_tensor_parallel(None, [("a", 0)]), "shards= takes pairs of a pattern and a Sharded"),
        (lambda: gather_tensor_parallel(None, 5), "shards= takes pairs of a pattern and a Sharded"),
    ],
)
def test_an_argument_that_no_converter_can_use(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
