"""Weight-only int8 by torchao, if it is installed: a quantised LlamaGen decodes as a model like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import tiny_transformer
from visual_spec.models.core.projections import fuse_projections
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler

quantization = pytest.importorskip("torchao.quantization")


@pytest.mark.parametrize("joined", [False, True])
def test_int8_weights_decode_identically(joined):
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
