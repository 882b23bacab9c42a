"""A Qwen3 of SGLang that stores some weights upside down, as kernels store them in a form of their own."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.models.qwen3 import Qwen3ForCausalLM


class Flipping(UnquantizedLinearMethod):
    """Flips the rows of the weight at the end of each load; a load does not flip them back."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.data.copy_(layer.weight.data.flip(0))

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().apply(layer, x, bias).flip(-1)


class FlippedQwen3ForCausalLM(Qwen3ForCausalLM):
    """Flips ``qkv_proj`` of each layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for layer in self.model.layers:
            layer.self_attn.qkv_proj.quant_method = Flipping()


EntryClass = FlippedQwen3ForCausalLM
