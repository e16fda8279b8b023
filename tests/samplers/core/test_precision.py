"""What a trace claims about tokens depends on the numbers that the model computes in."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.tiny import tiny_transformer
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.precision import (
    low_precision_of,
    rounding_of,
    rounding_unit,
    scales_by_batch,
    was_watched,
    watched,
)
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

SAME = "same tokens as autoregressive sampling"


def trace_of(model: Any, sampler: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    return sampler(model, torch.tensor([1]), law=TokenLaw(), generator=generator).trace


def class_model() -> Any:
    return tiny_transformer(num_classes=5, caption_dim=None, prefix_length=1, dim=32)


@pytest.mark.parametrize(
    ("dtype", "claim"),
    [
        (torch.float64, SAME),
        (torch.float32, SAME),
        (torch.bfloat16, f"{SAME} up to near-ties (bfloat16; none with exact_width=True)"),
        (torch.float16, f"{SAME} up to near-ties (float16; none with exact_width=True)"),
    ],
)
def test_the_claim_of_equal_tokens_names_its_condition(dtype, claim):
    trace = trace_of(class_model().to(dtype), SpeculativeJacobiSampler(window=4))
    met = "" if claim == SAME else f", {int(trace.near_ties.sum())} near-ties met"
    assert trace.output_law == claim and trace.summary().endswith(
        claim + met.replace(" 1 near-ties", " 1 near-tie")
    )
    assert trace.identical and trace.promises_tokens == (claim == SAME)
    assert (trace.near_ties is None) == (claim == SAME)


def test_plain_decoding_is_itself_in_any_precision():
    trace = trace_of(class_model().to(torch.bfloat16), AutoregressiveSampler())
    assert trace.output_law == SAME and trace.promises_tokens
    assert "met" in trace.summary()  # near-ties, where the model's own `generate` may take the other token
    assert trace_of(class_model(), AutoregressiveSampler()).near_ties is None


def test_one_narrow_weight_is_enough():
    model = class_model()
    model.layers[1].feed_forward.to(torch.bfloat16)
    assert low_precision_of(model) == "bfloat16"
    assert low_precision_of(class_model()) is None


def test_autocast_counts():
    with torch.autocast("cpu", torch.bfloat16):
        assert low_precision_of(class_model()) == "bfloat16"


@pytest.fixture
def shortened_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # also sets allow_tf32
    yield
    torch.set_float32_matmul_precision(before)


def test_shortened_products_of_float32_count(shortened_products):
    assert torch.backends.cuda.matmul.allow_tf32
    assert low_precision_of(class_model()) == "tf32"
    assert low_precision_of(class_model().double()) is None
    assert low_precision_of(class_model().bfloat16()) == "bfloat16"
    trace = trace_of(class_model(), SpeculativeJacobiSampler(window=4))
    assert (
        trace.output_law == f"{SAME} up to near-ties (tf32; none with exact_width=True)"
        and not trace.promises_tokens
    )
    assert trace.near_ties is not None
    exact = trace_of(class_model(), SpeculativeJacobiSampler(window=4, exact_width=True))
    assert exact.output_law == f"{SAME} with exact_width (tf32)" and exact.promises_tokens


def test_rounding_follows_guidance_temperature_and_the_allowed_ids():
    logits = torch.tensor([[[1.0, -3.0, 90.0]], [[2.0, 0.5, -torch.inf]]])  # conditional, unconditional
    unit = rounding_unit("bfloat16")
    assert unit == 2.0**-7 and rounding_unit("tf32") == 2.0**-10
    law = TokenLaw(guidance_scale=3.0, temperature=0.5, allowed=(0, 2))
    # 3 c - 2 u: three times the largest c and twice the largest u, at half the temperature.
    assert rounding_of(logits, law, True, unit).tolist() == [[(3 * 3 + 2 * 2) * unit / 0.5]]
    assert rounding_of(logits[1:], TokenLaw(), False, unit).tolist() == [[2 * unit]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nothing_is_claimed_for_activations_that_are_scaled_by_the_whole_call():
    model = torch.ao.quantization.quantize_dynamic(class_model(), {nn.Linear}, dtype=torch.qint8)
    assert scales_by_batch(model) and not scales_by_batch(class_model())
    trace = trace_of(model, SpeculativeJacobiSampler(window=4))
    assert "not known" in trace.output_law and not trace.promises_tokens


class RoundedLinear(nn.Linear):
    """A float32 layer that rounds what it reads: nothing of its weights says so."""

    as_int8 = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        step = input.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
        steps = (input / step).round()
        return super().forward((steps.to(torch.int8) if self.as_int8 else steps).to(input.dtype) * step)


@pytest.mark.parametrize(("as_int8", "named"), [(True, "int8 activations"), (False, "rounded activations")])
def test_activations_that_a_model_of_ones_own_rounds_are_seen(as_int8, named):
    model = class_model()
    assert trace_of(model, SpeculativeJacobiSampler(window=4)).output_law == SAME
    for layer in model.layers:
        layer.feed_forward.w1.__class__ = RoundedLinear
        layer.feed_forward.w1.as_int8 = as_int8
    trace = trace_of(model, SpeculativeJacobiSampler(window=4))  # the same model, watched again
    assert trace.low_precision == named and trace.promise == "near-ties" and trace.near_ties is not None
    assert f"up to near-ties ({named}; none with exact_width=True)" in trace.output_law
    assert trace_of(model, SpeculativeJacobiSampler(window=4, exact_width=True)).promises_tokens
    assert trace_of(model, AutoregressiveSampler()).output_law == SAME


def test_a_narrow_type_inside_float32_and_an_operation_of_others_are_seen():
    class Half(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(input.bfloat16(), self.weight.bfloat16()).float()

    model = class_model()
    model.layers[0].feed_forward.w1.__class__ = Half
    trace = trace_of(model, SpeculativeJacobiSampler(window=4))
    assert trace.low_precision == "bfloat16"

    library = torch.library.Library("somebodys", "DEF")
    library.define("product(Tensor a, Tensor b) -> Tensor")
    library.impl("product", lambda a, b: a @ b.mT, "CompositeExplicitAutograd")

    class Foreign(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.ops.somebodys.product(input, self.weight)

    model = class_model()
    model.layers[0].feed_forward.w1.__class__ = Foreign
    trace = trace_of(model, SpeculativeJacobiSampler(window=4))
    assert trace.low_precision == "somebodys::product activations" and not trace.promises_tokens


def test_a_model_is_watched_once_and_its_compiled_functions_still_compile():
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    layer = nn.Linear(4, 4)
    product = torch.compile(layer.forward, backend=backend)
    with torch.no_grad(), watched(layer):
        product(torch.ones(2, 4))
    assert not compiled and was_watched(layer) and low_precision_of(layer) is None
    with torch.no_grad():
        product(torch.ones(2, 4))
    assert len(compiled) == 1
