"""Weight-only int8: a quantised LlamaGen decodes as a model like any other. By torchao if it is installed, and plainly.

Without torchao, int8 layers of our own stand in: weights that are no parameters, and no floating numbers. That checks
what decoding and joined projections need of a quantised layer, not torchao's tensors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tiny import tiny_transformer
from visual_spec.models.core.projections import fuse_projections
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler


class Int8Linear(nn.Module):
    """A linear layer of int8 weights with one scale a row."""

    scale: Tensor
    numbers: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("numbers", (layer.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.numbers * self.scale)


def test_plain_int8_layers_decode_identically():
    size: dict[str, Any] = dict(num_classes=5, caption_dim=None, prefix_length=1, dim=32)
    model: Any = tiny_transformer(**size)
    state, condition = _prefill(model)
    replaced = 0
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear:
            model.set_submodule(path, Int8Linear(layer))
            replaced += 1
    assert replaced == 5 * len(model.layers) + 1
    quantised, _ = _prefill(model)
    apart = (quantised.logits - state.logits).abs().max()
    assert 0 < apart < 0.1 * state.logits.std()
    options: dict[str, Any] = dict(law=TokenLaw(guidance_scale=2.0, top_k=8), batch_size=3)
    found, expected = (
        sampler(model, condition, generator=torch.Generator().manual_seed(0), **options)
        for sampler in (SpeculativeJacobiSampler(6), AutoregressiveSampler())
    )
    assert torch.equal(found.tokens, expected.tokens)
    assert (found.trace.target_calls < expected.trace.target_calls).all()
    with pytest.raises(ValueError, match="is a Int8Linear; only plain linear layers can be joined"):
        fuse_projections(model)


@pytest.mark.parametrize("joined", [False, True])
def test_int8_weights_decode_identically(joined):
    quantization = pytest.importorskip("torchao.quantization")
    size: dict[str, Any] = dict(num_classes=5, caption_dim=None, prefix_length=1, dim=32)
    model: Any = tiny_transformer(**size)
    state, condition = _prefill(model)
    if joined:
        fuse_projections(model)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    quantised, _ = _prefill(model)
    # Near the model it was, and not it.
    apart = (quantised.logits - state.logits).abs().max()
    assert 0 < apart < 0.1 * state.logits.std()
    assert type(model.layers[0].feed_forward.w1.weight) is not torch.nn.Parameter
    if joined:  # the numbers are those of projections that were quantised one by one
        separate = tiny_transformer(**size)
        quantization.quantize_(separate, quantization.Int8WeightOnlyConfig())
        for (key, one), (wanted, other) in zip(
            model.state_dict().items(), separate.state_dict().items(), strict=True
        ):
            both = (one, other) if type(one) is torch.Tensor else (one.dequantize(), other.dequantize())
            assert key == wanted and torch.equal(*both)

    options: dict[str, Any] = dict(law=TokenLaw(guidance_scale=2.0, top_k=8), batch_size=3)
    found, expected = (
        sampler(model, condition, generator=torch.Generator().manual_seed(0), **options)
        for sampler in (SpeculativeJacobiSampler(6), AutoregressiveSampler())
    )
    assert torch.equal(found.tokens, expected.tokens)
    assert (found.trace.target_calls < expected.trace.target_calls).all()


def _prefill(model: Any) -> tuple[Any, torch.Tensor]:
    condition = torch.tensor([1, 4, 0])
    return model.prefill(condition, batch_size=3, guided=True, window=1), condition
