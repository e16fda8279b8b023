"""`compile_repeated_blocks` of every model compiles what decoding runs: each block that it names is called."""

from typing import Any

import pytest
import torch

from tests.helpers.mage import tiny_mage
from tests.helpers.tiny import seeded, tiny_masked_transformer, tiny_transformer
from tests.helpers.tiny_infinity import captions, tiny_bits, tiny_infinity
from tests.helpers.tiny_scales import tiny_var, tiny_var_vq
from tests.models.continuous.tiny import tiny_causal, tiny_flowar, tiny_mar
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.prototype.flowar.sampler import FlowScaleSampler
from visual_spec.prototype.reuse.masked import ReusingMaskedSampler
from visual_spec.prototype.reuse.recap import Reuse
from visual_spec.samplers.continuous.continuous import ContinuousSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.scales.scales import ScaleWiseSampler

WORDS = TextCondition(torch.zeros(1, 6, 8), torch.ones(1, 6, dtype=torch.bool))
LABELS = torch.tensor([1])
# Sampler, model, what it draws, and the tokenizer that maps of scales go through.
DECODES: dict[str, tuple[Any, Any, Any, tuple[Any, ...]]] = {
    "llamagen": (AutoregressiveSampler(), tiny_transformer, WORDS, ()),
    "maskgit": (MaskedSampler(2), tiny_masked_transformer, WORDS, ()),
    "mage": (MaskedSampler(2), tiny_mage, None, ()),
    "mage, reuse": (ReusingMaskedSampler(4, reuse=Reuse(reuse=2)), tiny_mage, None, ()),
    "mar": (ContinuousSampler(head_steps=2), tiny_mar, LABELS, ()),
    "causal": (ContinuousSampler(head_steps=2), tiny_causal, LABELS, ()),
    "flowar": (FlowScaleSampler(2), tiny_flowar, LABELS, ()),
    "flowar, large": (FlowScaleSampler(2), lambda: tiny_flowar(cross=True), LABELS, ()),
    "var": (ScaleWiseSampler(), tiny_var, LABELS, (tiny_var_vq,)),
    "infinity": (ScaleWiseSampler(), tiny_infinity, captions(lengths=(4,)), (tiny_bits,)),
}


@pytest.mark.parametrize("name", DECODES)
def test_every_block_that_is_named_runs_as_a_module(name):
    sampler, make, condition, tokenizer = DECODES[name]
    model: Any = make()
    named = [one for one in model.modules() if type(one).__name__ in model._repeated_blocks]
    calls: list[Any] = []
    for block in named:
        block.register_forward_pre_hook(lambda module, _: calls.append(module))
    parts = dict(zip(("tokenizer",), (one() for one in tokenizer), strict=False))
    sampler(model, condition, law=TokenLaw(), generator=seeded(1), batch_size=1, **parts)
    assert named and {id(one) for one in calls} == {id(one) for one in named}
    # In every call, not in the first alone.
    assert min(sum(one is block for one in calls) for block in named) > 1
