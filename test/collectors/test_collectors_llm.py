"""The collector for language models, with TorchRL's wrapper of a transformers model."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason='transformers is not installed: pip install "weight-update[transformers]"'
)
tokenizers = pytest.importorskip("tokenizers")

from torchrl.envs.llm import ChatEnv  # noqa: E402
from torchrl.modules.llm import TransformersWrapper  # noqa: E402

from collectors import LLMCollector  # noqa: E402
from weight_update import (  # noqa: E402
    BucketEncoding,
    MemoryWeightSyncScheme,
    PatchEncoding,
    PolicyLag,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    WeightStrategy,
)

WAIT = 20.0
TOKENS = 32


def tokenizer() -> Any:
    """Return a tokenizer of the words w0 to w31, without a download."""
    vocabulary = {f"w{index}": index for index in range(TOKENS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w2"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "eos_token": "w1", "unk_token": "w2"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **special)
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def model_of(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen3Config(vocab_size=TOKENS, initializer_range=0.5, **sizes, **heads)
    config.eos_token_id = None
    return transformers.Qwen3ForCausalLM(config).eval()


def policy_of(seed: int) -> TransformersWrapper:
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return TransformersWrapper(
        model_of(seed),
        tokenizer=tokenizer(),
        input_mode="tokens",
        generate_kwargs=greedy,
        return_log_probs=False,  # torch warns of the way in which TorchRL computes them
    )


def env_of() -> ChatEnv:
    queries = [{"query": "w3 w4 w5 w6"}] * 100
    return ChatEnv.from_dataloader(queries, tokenizer=tokenizer(), input_mode="tokens", batch_size=(1,))


def answers_of(model: Any, batch: Any) -> list[list[int]]:
    """Return what ``model`` answers to the prompts of a batch."""
    found = []
    for step in batch.unbind(-1):
        prompt = step["tokens"].prompt[0]
        whole = model.generate(prompt[None], max_new_tokens=6, do_sample=False, pad_token_id=0)
        found.append(whole[0, len(prompt) :].tolist())
    return found


def collected(batch: Any) -> list[list[int]]:
    return [step["tokens"].response[0].tolist() for step in batch.unbind(-1)]


@pytest.fixture
def collect(made: Any) -> Any:
    def build(policy: Any, **options: Any) -> LLMCollector:
        return made(LLMCollector, env_of(), policy=policy, dialog_turns_per_batch=2, **options)

    return build


def check(collector: LLMCollector, batch: Any, model: Any, version: int) -> None:
    """Check that ``model`` answered, and the version in the data."""
    assert collected(batch) == answers_of(model, batch)
    for data in (batch, batch["next"]):
        assert data["policy_version"].flatten().tolist() == [version] * 2
    assert collector.policy_version == collector.get_policy_version() == version


SCHEMES: dict[str, Any] = {
    "none": lambda: None,
    "memory": lambda: {"policy": MemoryWeightSyncScheme()},
    "patch": lambda: {"policy": MemoryWeightSyncScheme(WeightStrategy(encoding=PatchEncoding()))},
    "bucket": lambda: {"policy": SharedMemWeightSyncScheme(WeightStrategy(encoding=BucketEncoding(4096)))},
}


@pytest.mark.parametrize("kind", SCHEMES)
def test_it_generates_with_the_new_weights(collect: Any, kind: str) -> None:
    policy, others = policy_of(1), [policy_of(2), policy_of(3)]
    before = copy.deepcopy(policy.model)
    collector = collect(policy, weight_sync_schemes=SCHEMES[kind]())
    lags: list[PolicyLag] = []
    told = threading.Event()
    collector.add_observer(lambda event: isinstance(event, PolicyLag) and [lags.append(event), told.set()])
    batches = iter(collector)
    check(collector, next(batches), before, 0)
    for version, other in enumerate(others, start=1):
        report = collector.update_policy_weights_(other)
        assert report.version == version
        check(collector, next(batches), other.model, version)
    if kind != "none":
        assert not torch.equal(policy.model.lm_head.weight, others[1].model.lm_head.weight), "a copy runs"
    assert told.wait(WAIT)
    assert {lag.max for lag in lags} == {0}


def test_the_policy_given_is_the_source(collect: Any) -> None:
    policy = policy_of(1)
    collector = collect(policy, weight_sync_schemes={"policy": MemoryWeightSyncScheme()})
    batches = iter(collector)
    before = copy.deepcopy(policy.model)
    policy.model.load_state_dict(model_of(2).state_dict())
    check(collector, next(batches), before, 0)
    collector.update_policy_weights_()
    check(collector, next(batches), policy.model, 1)


def test_the_model_inside_the_wrapper(collect: Any) -> None:
    """By the names of the transformers model, as its trainer has them."""
    policy, trainer = policy_of(1), model_of(2)
    schemes = {"policy.model": MemoryWeightSyncScheme("state_dict")}
    collector = collect(policy, weight_sync_schemes=schemes)
    batches = iter(collector)
    check(collector, next(batches), policy.model, 0)
    collector.update_policy_weights_(trainer, model_id="policy.model")
    check(collector, next(batches), trainer, 1)


def test_an_update_waits_for_the_answer(collect: Any) -> None:
    policy, other = policy_of(1), policy_of(2)
    before, inner = copy.deepcopy(policy.model), policy.model
    collector = collect(policy, weight_sync_schemes={"policy.model": MemoryWeightSyncScheme()})
    reached, go = threading.Event(), threading.Event()

    def stop_in_the_middle(*_: Any) -> None:
        if not reached.is_set():
            reached.set()
            assert go.wait(WAIT)

    inner.model.layers[1].register_forward_hook(stop_in_the_middle)
    found: list[Any] = []
    batches = iter(collector)
    collecting = threading.Thread(target=lambda: found.append(next(batches)))
    collecting.start()
    assert reached.wait(WAIT)
    updating = threading.Thread(
        target=collector.update_policy_weights_, args=(other.model,), kwargs={"model_id": "policy.model"}
    )
    updating.start()
    updating.join(0.2)
    assert updating.is_alive(), "the weights changed in the middle of an answer"
    go.set()
    collecting.join(WAIT)
    updating.join(WAIT)
    first, second = found[0].unbind(-1)
    assert collected(found[0])[0] == answers_of(before, found[0])[0]
    assert first["policy_version"].tolist() == first["next", "policy_version"].tolist() == [0]
    expected = {0: before, 1: other.model}[int(second["policy_version"])]
    assert collected(found[0])[1] == answers_of(expected, found[0])[1]


def test_weights_that_do_not_fit(collect: Any) -> None:
    policy = policy_of(1)
    collector = collect(policy, weight_sync_schemes={"policy": MemoryWeightSyncScheme()})
    with pytest.raises(SchemaMismatchError):
        collector.update_policy_weights_(policy.model.state_dict())
    check(collector, next(iter(collector)), policy.model, 0)


def test_without_versions(collect: Any) -> None:
    collector = collect(policy_of(1), track_policy_version=False)
    assert "policy_version" not in next(iter(collector)).keys(True)


def test_schemes_of_another_library() -> None:
    from torchrl.weight_update import SharedMemWeightSyncScheme as Theirs

    with pytest.raises(TypeError, match=r"need one of weight_update"):
        LLMCollector(
            env_of(), policy=policy_of(1), dialog_turns_per_batch=2, weight_sync_schemes={"policy": Theirs()}
        )
