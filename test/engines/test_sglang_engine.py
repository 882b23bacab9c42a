"""SGLang's own engine on the CPU, with its own model code, is a receiver."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="make test-engines installs SGLang")

import sglang
from sglang_parts import ENVIRONMENT, OPTIONS, PROMPT, answer_of, change, connected, sampling, trainer

from weight_update import LifecycleError
from weight_update.engines import SGLangEngine

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("model")
    source = trainer(folder)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in ENVIRONMENT.items():
            patched.setitem(os.environ, name, value)
        engine = sglang.Engine(model_path=str(folder), **OPTIONS)
    yield source, engine
    engine.shutdown()


def test_signatures() -> None:
    """Each call that SGLangEngine makes is one of this version's ``Engine``."""
    from sglang.srt.managers.io_struct import FlushCacheReqOutput, UpdateWeightVersionReqInput

    made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("get_server_info", (), {}),
        ("begin_weight_update", (), {}),
        ("update_weights_from_tensor", ([],), {"load_format": "name", "flush_cache": False}),
        ("end_weight_update", (), {}),
        ("flush_cache", (), {}),
    ]
    for name, args, kwargs in made:
        inspect.signature(getattr(sglang.Engine, name)).bind(None, *args, **kwargs)
    UpdateWeightVersionReqInput(new_version="1", abort_all_requests=False)
    assert FlushCacheReqOutput(success=True).message == ""


def test_tokens_after_patches(started: Any) -> None:
    """After each update the engine gives the tokens of the trainer; fused weights are written in place."""
    source, sglang_engine = started
    engine = SGLangEngine(sglang_engine)
    with pytest.raises(LifecycleError, match="no complete version"):
        engine.generate(input_ids=PROMPT)
    sender, receiver = connected(source, engine)
    seen = []
    for version in range(4):
        if version:
            change(source, version)
            assert sender.send().encoding == "patch"
        for cached in (False, True):
            found = engine.generate(input_ids=PROMPT, sampling_params=sampling())
            assert found["output_ids"] == answer_of(source)
            assert found["meta_info"]["weight_version"] == str(version)
            assert (found["meta_info"]["cached_tokens"] > 0) is cached, "an update drops cached prefixes"
        seen.append(tuple(found["output_ids"]))
    assert len(set(seen)) == 4
    assert engine.last_patch == dict.fromkeys(source.state_dict(), True), "all weights in place"
    receiver.shutdown()
    sender.shutdown()


def test_weights_that_sglang_has_replaced(started: Any, tmp_path: Path) -> None:
    """After SGLang has loaded a checkpoint, a patch has it load all weights."""
    source, sglang_engine = started
    source.save_pretrained(tmp_path)
    engine = SGLangEngine(sglang_engine)
    sender, receiver = connected(source, engine)
    for version in range(1, 5):
        change(source, 10 + version, 0.01)
        if version == 3:
            assert sglang_engine.update_weights_from_disk(str(tmp_path), "safetensors")[0]
        assert sender.send().encoding == "patch"
        found = engine.generate(input_ids=PROMPT, sampling_params=sampling())
        assert found["output_ids"] == answer_of(source)
        assert found["meta_info"]["weight_version"] == str(version)
    assert engine.last_patch
    assert all(engine.last_patch.values()), "in place again"
    receiver.shutdown()
    sender.shutdown()


def test_a_weight_of_the_wrong_shape(started: Any) -> None:
    """SGLang ends its server when a loader raises; ours does not, and the error reaches the sender."""
    source, sglang_engine = started
    engine = SGLangEngine(sglang_engine)
    engine.begin_update(10)
    with pytest.raises(RuntimeError, match=r"did not load 'model\.norm\.weight'(.|\n)*AssertionError"):
        engine.load_weights(iter([("model.norm.weight", torch.ones(3, dtype=torch.bfloat16))]))
    engine.abort_update(10)
    with pytest.raises(LifecycleError, match="no complete version"):
        engine.generate(input_ids=PROMPT)
    engine.begin_update(11)
    engine.load_weights(iter(source.state_dict().items()))
    engine.finish_update(11)
    found = engine.generate(input_ids=PROMPT, sampling_params=sampling())
    assert found["output_ids"] == answer_of(source)
    assert found["meta_info"]["weight_version"] == "11"
