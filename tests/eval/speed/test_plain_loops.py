"""The straight loop of the bench draws what plain decoding draws, whatever the law, the batch and the prefix."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.llamagen import make, text_condition
from tests.helpers.tiny import seeded, tiny_video_pipeline
from visual_spec.eval.speed.plain_loops import fits, straight_loop
from visual_spec.models.core.projections import fuse_projections
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

LAWS = [TokenLaw(), TokenLaw(guidance_scale=2.5), TokenLaw(guidance_scale=1.5, top_k=7, temperature=0.8)]


def both(model, condition, law: TokenLaw, batch_size: int) -> list[torch.Tensor]:
    request: dict[str, Any] = dict(law=law, batch_size=batch_size)
    plain = AutoregressiveSampler()(model, condition, generator=seeded(*range(batch_size)), **request)
    straight = straight_loop(model, condition, generator=seeded(*range(batch_size)), **request)
    return [plain.tokens, straight]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("valid", [[3], [5, 1, 2]])
@pytest.mark.parametrize("zero_prefix_keys", [True, False])
def test_the_tokens_are_those_of_plain_decoding(law, valid, zero_prefix_keys):
    model = make(zero_prefix_keys=zero_prefix_keys)
    plain, straight = both(model, text_condition(len(valid), valid), law, len(valid))
    assert torch.equal(plain, straight) and plain.unique().numel() > 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_class_labels_other_dtypes_and_joined_projections(dtype):
    model = make(prefix_length=1, num_classes=7, caption_dim=None).to(dtype)
    fuse_projections(model)
    plain, straight = both(model, torch.tensor([3, 6]), TokenLaw(guidance_scale=2.0), 2)
    assert torch.equal(plain, straight)


class Operators(TorchDispatchMode):
    """Counts operators that compute; views cost little."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_plain_decoding_takes_few_operators_more():
    """Times would say so, too, but not on every machine. Six layers, as the embedded model has."""
    model, condition = make(num_layers=6).float(), text_condition(1, [3])
    counts = []
    for decode in (AutoregressiveSampler(), straight_loop):
        with Operators() as operators:
            decode(model, condition, law=TokenLaw(guidance_scale=1.5), generator=seeded(0), batch_size=1)
        counts.append(operators.count)
    assert counts[0] < 1.5 * counts[1]  # twice as many, before calls were made lean


def test_it_is_for_pictures_of_llamagen():
    assert fits(make()) and not fits(torch.nn.Linear(2, 2)) and not fits(tiny_video_pipeline().transformer)
