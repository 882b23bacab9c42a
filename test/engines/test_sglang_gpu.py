"""SGLang's engine on GPUs: tokens after patches are those of a load from disk.

None of these tests has been run on a GPU: see docs/engine_sglang.rst.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="make test-engines installs SGLang")

import sglang
from sglang_parts import OPTIONS, PROMPT, change, connected, sampling, trainer

from weight_update.engines import SGLangEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_GPU = {
    name: OPTIONS[name] for name in ("load_format", "dtype", "skip_tokenizer_init", "custom_weight_loader")
}
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def tokens(engine: sglang.Engine) -> list[int]:
    return list(engine.generate(input_ids=PROMPT, sampling_params=sampling())["output_ids"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disable_cuda_graph": True},
        {"quantization": "fp8"},
        pytest.param({"tp_size": 2}, marks=TWO),
        pytest.param({"pp_size": 2}, marks=TWO),
    ],
)
def test_tokens_are_those_of_a_load_from_disk(tmp_path: Path, options: dict[str, Any]) -> None:
    source = trainer(tmp_path)
    started = sglang.Engine(model_path=str(tmp_path), mem_fraction_static=0.3, **{**ON_GPU, **options})
    try:
        engine = SGLangEngine(started)
        sender, receiver = connected(source, engine)
        found = []
        for version in range(1, 4):
            change(source, version)
            assert sender.send().encoding == "patch"
            found.append(tokens(started))  # the prompt is cached, if the cache was not dropped
        assert len(set(map(tuple, found))) > 1, "the weights changed"
        name = "model.layers.1.self_attn.q_proj.weight"  # a part of qkv_proj
        assert engine.last_patch[name] == ("quantization" not in options), (
            "in place, if it is not transformed"
        )
        source.save_pretrained(tmp_path)
        started.update_weights_from_disk(str(tmp_path), load_format="auto")
        assert found[-1] == tokens(started)
        receiver.shutdown()
        sender.shutdown()
    finally:
        started.shutdown()
