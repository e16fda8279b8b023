"""Int8: a LlamaGen with int8 weights decodes as a model like any other; with int8 activations rounding decides.

By torchao, and by int8 layers of our own: weights that are no parameters, and no floating numbers.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_transformer
from visual_spec.models.core.projections import fuse_projections, in_one_order
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.core.precision import rounding_of, rounding_unit
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

quantization = pytest.importorskip("torchao.quantization")


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
    refuses(ValueError, "Int8Linear", fuse_projections, model)


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
    assert torch.equal(found.tokens, expected.tokens) and found.trace.promises_tokens
    assert (found.trace.target_calls < expected.trace.target_calls).all()


ACTIVATIONS = {
    "int8": (quantization.Int8DynamicActivationInt8WeightConfig(), "int8 activations"),
    "int8, int4 weights": (
        quantization.Int8DynamicActivationIntxWeightConfig(vars(torch)["int4"]),
        "int8 activations",
    ),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_no_trace_claims_the_same_tokens_where_activations_are_quantised(kind):
    config, named = ACTIVATIONS[kind]
    model: Any = tiny_transformer(num_classes=5, caption_dim=None, prefix_length=1, dim=32)
    quantization.quantize_(model, config)
    options: dict[str, Any] = dict(law=TokenLaw(), batch_size=3)
    condition = torch.tensor([1, 4, 0])
    trace = SpeculativeJacobiSampler(6)(model, condition, **options).trace
    assert trace.low_precision == named and trace.promise == "near-ties" and trace.near_ties is not None
    assert "exact_width=True" in trace.output_law


@pytest.mark.slow
@torch.no_grad()
def test_int8_activations_change_tokens_at_near_ties_only_and_none_with_exact_width():
    model: Any = tiny_transformer(num_classes=5, caption_dim=None, prefix_length=1, dim=64, vocab_size=40)
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    condition, batch, law = torch.arange(64) % 5, 64, TokenLaw(guidance_scale=2.0)

    def decode(sampler: Any) -> Any:
        return sampler(
            model, condition, law=law, generator=torch.Generator().manual_seed(0), batch_size=batch
        )

    plain, fast = decode(AutoregressiveSampler()), decode(SpeculativeJacobiSampler(8))
    differs = fast.tokens != plain.tokens
    assert differs.any()  # else the test is empty
    # Near-ties of plain decoding, from its own logits; up to its first other token a row has plain's contexts.
    state = model.prefill(condition, batch_size=batch, guided=True, window=1)
    noise = CounterNoise(draw_keys(torch.Generator().manual_seed(0), batch), "cpu")
    for slot in range(1, 16):
        at = torch.full((batch, 1), slot - 1)
        logits = model(state, plain.tokens[:, slot - 1 : slot], at)
        scores = law(logits, True)[:, 0] + noise.gumbel(at + 1, 40, TOKEN)[:, 0]
        best = scores.topk(2).values
        near = (
            best[:, 0] - best[:, 1]
            < 2 * rounding_of(logits, law, True, rounding_unit("int8 activations"))[:, 0]
        )
        first = differs[:, slot] & ~differs[:, :slot].any(1)
        assert near[first].all(), slot
    exact = decode(SpeculativeJacobiSampler(8, exact_width=True))
    assert torch.equal(exact.tokens, decode(AutoregressiveSampler(exact_width=True)).tokens)
    assert exact.trace.promises_tokens


def _prefill(model: Any) -> tuple[Any, torch.Tensor]:
    condition = torch.tensor([1, 4, 0])
    return model.prefill(condition, batch_size=3, guided=True, window=1), condition


@pytest.mark.parametrize("how", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_sums_in_one_order_are_of_the_quantised_weights(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 32, dtype=torch.bfloat16))
    quantization.quantize_(model, getattr(quantization, how)())
    weight: Any = model[0].weight
    x = torch.randn(3, 48).bfloat16()
    with torch.no_grad():
        found = in_one_order(model[0], x)
        exact = x.double() @ (weight.qdata.double() * weight.scale.double()).T + model[0].bias.double()
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("how", ["Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig"])
def test_weights_that_the_kernel_does_not_read_are_refused(how):
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    quantization.quantize_(model, getattr(quantization, how)())
    refuses(ValueError, "Int8WeightOnlyConfig", in_one_order, model[0], torch.randn(3, 64))
