"""What a trace claims about tokens depends on the numbers that the model computes in."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny import tiny_transformer
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.precision import low_precision_of, scales_by_batch
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler

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
        (torch.bfloat16, f"{SAME} up to near-ties (bfloat16)"),
        (torch.float16, f"{SAME} up to near-ties (float16)"),
    ],
)
def test_the_claim_of_equal_tokens_names_its_condition(dtype, claim):
    trace = trace_of(class_model().to(dtype), SpeculativeJacobiSampler(window=4))
    assert trace.output_law == claim and trace.summary().endswith(claim)
    assert trace.identical and trace.promises_tokens == (claim == SAME)


def test_plain_decoding_is_itself_in_any_precision():
    trace = trace_of(class_model().to(torch.bfloat16), AutoregressiveSampler())
    assert trace.output_law == SAME and trace.promises_tokens


def test_one_narrow_weight_is_enough():
    model = class_model()
    model.layers[1].feed_forward.to(torch.bfloat16)
    assert low_precision_of(model) == "bfloat16"
    assert low_precision_of(class_model()) is None


def test_autocast_counts():
    with torch.autocast("cpu", torch.bfloat16):
        assert low_precision_of(class_model()) == "bfloat16"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nothing_is_claimed_for_activations_that_are_scaled_by_the_whole_call():
    model = torch.ao.quantization.quantize_dynamic(class_model(), {nn.Linear}, dtype=torch.qint8)
    assert scales_by_batch(model) and not scales_by_batch(class_model())
    trace = trace_of(model, SpeculativeJacobiSampler(window=4))
    assert "not known" in trace.output_law and not trace.promises_tokens
