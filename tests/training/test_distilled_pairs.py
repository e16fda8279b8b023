"""The teacher's pairs: the flow of a law against fine integration and quadrature, and pictures redrawn from noise."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_readers
from tests.helpers.training import tiny_raster
from visual_spec.data.shapes import is_held_out, training_prompts
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.training.distilled_pairs import Flow, PairDrawing, Pairs, draw_pairs, drawn_pairs

SMALL = PairDrawing(pictures=8, batch_size=4, noises=3, candidates=16)
_ANGLES = torch.tensor([0.0, 0.5, 1.1, 2.2, 3.6, 5.0], dtype=torch.float64)
CODES = torch.stack([_ANGLES.cos(), _ANGLES.sin()], -1)
LAW = torch.tensor([0.35, 0.05, 0.3, 0.0, 0.2, 0.1], dtype=torch.float64)


@pytest.fixture(scope="module")
def models() -> tuple[LlamaGenTransformer, CaptionEncoder, VQModel]:
    """A random teacher of 4 x 4 tokens, its caption encoder and its tokenizer, in float64."""
    teacher = tiny_raster(0)
    for parameter in teacher.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    encoder, vq_model = tiny_readers()
    return teacher.double().eval(), encoder.double().eval(), vq_model.double().eval()


def by_runge_kutta(law: Tensor, noise: Tensor, codes: Tensor, last: float = 1e-3, steps: int = 600) -> Tensor:
    """Tokens [N] of noise [N, D] under one law [V]: four stages a step, and the velocity as a mean over pairs.

    A pair of code c and noise e passes x = (1 - t) c + t e with velocity e - c. Given x, e is (x - (1 - t) c) / t.
    """

    def velocity(x: Tensor, time: float) -> Tensor:
        pairs = (x[:, None] - (1 - time) * codes) / time  # the noise of each code [N, V, D]
        weights = (
            law * (-0.5 * pairs.square().sum(-1)).sub((-0.5 * pairs.square().sum(-1)).amax(-1, True)).exp()
        )
        shares = weights / weights.sum(-1, keepdim=True)
        return (shares[..., None] * (pairs - codes)).sum(1)

    x, times = noise, [last ** (step / steps) for step in range(steps + 1)]
    for time, following in zip(times[:-1], times[1:], strict=True):
        step, middle = following - time, (time + following) / 2
        first = velocity(x, time)
        second = velocity(x + step / 2 * first, middle)
        third = velocity(x + step / 2 * second, middle)
        fourth = velocity(x + step * third, following)
        x = x + step / 6 * (first + 2 * second + 2 * third + fourth)
    distances = torch.stack([(x - code).norm(dim=-1) for code in codes], -1)
    return distances.masked_fill(law == 0, math.inf).argmin(-1)


def grid_noise(side: int) -> Tensor:
    """Normal noise [side ** 2, 2] in equal shares of mass: the middle quantiles of each."""
    quantiles = torch.special.ndtri((torch.arange(side, dtype=torch.float64) + 0.5) / side)
    return torch.cartesian_prod(quantiles, quantiles)


def flow_of(law: Tensor, rows: int, candidates: int = 6, steps: int = PairDrawing().flow_steps) -> Flow:
    return Flow(law.log().expand(rows, -1), CODES, candidates, steps)


def test_the_flow_of_a_law_draws_that_law():
    noise = grid_noise(150)
    apart = []
    for steps in (PairDrawing().flow_steps, 48):
        found = torch.bincount(flow_of(LAW, len(noise), steps=steps).tokens(noise), minlength=6) / len(noise)
        assert found[3] == 0
        apart.append(float((found - LAW).abs().sum() / 2))
    assert apart[0] < 0.03 and apart[1] < 0.005, apart


def test_its_tokens_are_those_of_a_fine_integration_of_the_mean_over_pairs():
    noise = torch.randn(600, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    want = by_runge_kutta(LAW, noise, CODES)
    for steps, least in ((PairDrawing().flow_steps, 0.96), (48, 0.995)):  # noise at a border may differ
        assert (flow_of(LAW, 600, steps=steps).tokens(noise) == want).double().mean() > least


def test_one_noise_gives_one_token_in_any_batch():
    noise = torch.randn(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    laws = torch.rand(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).log_softmax(-1)
    together = Flow(laws, CODES, 6, 8).tokens(noise)
    alone = [Flow(laws[row : row + 1], CODES, 6, 8).tokens(noise[row : row + 1]) for row in range(40)]
    assert torch.equal(together, torch.cat(alone)) and together.unique().numel() > 3


def test_candidates_leave_out_the_least_likely_codes_alone():
    noise = torch.randn(400, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    kept = LAW.where(LAW >= 0.2, 0.0)
    assert torch.equal(
        flow_of(LAW, 400, candidates=3).tokens(noise), flow_of(kept / kept.sum(), 400).tokens(noise)
    )


def test_the_flow_backward_gives_noise_of_a_token_with_the_law_of_that_noise():
    generator = torch.Generator().manual_seed(9)
    tokens = torch.multinomial(LAW, 6000, replacement=True, generator=generator)
    around = torch.randn(6000, 2, dtype=torch.float64, generator=generator)
    flow = flow_of(LAW, 6000, steps=48)
    noise = flow.noise(CODES[tokens], around)
    assert (flow.tokens(noise) == tokens).double().mean() > 0.99
    assert (by_runge_kutta(LAW, noise[:500], CODES) == tokens[:500]).double().mean() > 0.99
    # Over all tokens of the law it is normal noise; of one token it is not.
    for way in (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([0.6, 0.8])):
        assert stats.kstest((noise @ way.double()).numpy(), "norm").pvalue > 1e-3
    first = noise[tokens == 0] @ CODES[0]
    assert stats.kstest(first.numpy(), "norm").pvalue < 1e-6


def straight_laws(teacher: Any, encoder: Any, words: Tensor, tokens: Tensor, scale: float) -> Tensor:
    """The guided law [B, L, V] of every slot, from whole pictures and not from the cache."""
    told = encoder(words)
    with torch.no_grad():
        own = teacher.teacher_forced(tokens, told)
        free = teacher.teacher_forced(tokens, told, torch.ones(len(tokens), dtype=torch.bool))
    mixed = free + scale * (own - free)
    return torch.stack([row.exp() / row.exp().sum() for row in mixed.flatten(0, 1)]).view_as(mixed)


def test_pictures_are_the_teachers_and_every_noise_leads_to_its_token(models):
    teacher, encoder, vq_model = models
    codes = vq_model.quantize.codes.detach()
    captions = training_prompts(4, (0, 0))
    pairs = draw_pairs(teacher, encoder, codes, captions, SMALL, torch.Generator().manual_seed(1))
    assert torch.equal(pairs.words, encoder.word_ids(captions)) and pairs.noise.shape == (4, 3, 16, 4)
    tokens = pairs.tokens.long()
    laws = straight_laws(teacher, encoder, pairs.words, tokens, SMALL.guidance_scale)
    right = torch.zeros(3)
    for row in range(4):
        for slot in range(16):
            noise = pairs.noise[row, :, slot].double()
            right += by_runge_kutta(laws[row, slot], noise, codes, steps=150) == tokens[row, slot]
    assert (right / 64 > 0.93).all(), right
    assert tokens.unique().numel() > 8
    # The noises of a slot are several.
    assert (pairs.noise[:, 0] != pairs.noise[:, 1]).any(-1).all()


def test_a_certain_slot_keeps_noise_that_is_free_of_its_token(models):
    teacher, encoder, vq_model = models
    certain = LlamaGenTransformer.from_config(teacher.config).double().eval()  # pyright: ignore
    certain.load_state_dict(teacher.state_dict())
    certain.output.weight.data.mul_(1e4)
    codes = vq_model.quantize.codes.detach()
    one, two = (
        draw_pairs(
            certain, encoder, codes, training_prompts(4, (0, 0)), SMALL, torch.Generator().manual_seed(1)
        )
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert stats.kstest(one.noise.double().flatten().numpy(), "norm").pvalue > 1e-3
    assert torch.equal(one.noise, torch.randn(4, 3, 16, 4, generator=torch.Generator().manual_seed(1)).half())


def test_captions_are_never_held_out():
    found = [training_prompts(60, (3, shard)) for shard in range(3)]
    assert not any(is_held_out(text) for texts in found for text in texts)
    assert found[0] != found[1] and found[0] == training_prompts(60, (3, 0))


def test_shards_are_drawn_once_and_only_read_by_their_own_run(models, tmp_path: Path, monkeypatch):
    drawn: list[list[str]] = []
    draw = partial(drawn_pairs, models[0], models[1], models[2])

    def counted(*arguments: Any) -> Pairs:
        drawn.append(arguments[3])
        return draw_pairs(*arguments)

    monkeypatch.setattr("visual_spec.training.distilled_pairs.draw_pairs", counted)
    half = draw(replace(SMALL, pictures=4), tmp_path)
    whole = draw(SMALL, tmp_path)
    assert len(drawn) == 2 and len(whole.tokens) == 8
    assert all(torch.equal(part[:4], first) for part, first in zip(whole, half, strict=True))
    again = draw(SMALL, tmp_path / "again")
    assert all(torch.equal(one, two) for one, two in zip(whole, again, strict=True))
    refuses(ValueError, r"pairs_0000\.pt", draw, replace(SMALL, guidance_scale=2.0), tmp_path)


@pytest.mark.parametrize("changes", [{"pictures": 6}, {"noises": 0}, {"batch_size": 0}])
def test_counts_that_make_no_shards_are_refused(changes):
    refuses(ValueError, "least 1", replace, SMALL, **changes)
