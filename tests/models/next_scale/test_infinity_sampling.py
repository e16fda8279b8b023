"""Infinity under the next-scale sampler: every bit follows its own law, with one model, two, or a compressed cache."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.helpers.tiny_infinity import SIDES, captions, some, tiny_bits, tiny_infinity
from visual_spec.models.core.protocol import Side
from visual_spec.models.next_scale.scale_budget import ScaleBudget, cache_bytes, window_size
from visual_spec.models.next_scale.scale_cache import CompressedVAR, calibrate, observers
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.scales.scales import ScaleWiseSampler, mixture
from visual_spec.samplers.scales.stages import Stage, code_stages
from visual_spec.samplers.scales.trace import ScaleTrace

LAW = TokenLaw(guidance_scale=3.0, temperature=0.8, top_p=0.97)
TOKENIZER = tiny_bits()
STARTS = (0, 3, 15, 42, 90)


def decode(model: Any, rows: Tensor, law: TokenLaw = LAW, tokenizer: Any = TOKENIZER, **options: Any):
    sampler = ScaleWiseSampler(**{"ramp": False, **options})
    condition = some(captions(), rows)
    generator = seeded(*(100 + row for row in rows.tolist()))
    return sampler(model, condition, tokenizer=tokenizer, law=law, generator=generator, batch_size=len(rows))


def plain_loop(
    models: list[Any], laws: list[TokenLaw], rows: Tensor, smooth: bool = False
) -> tuple[Tensor, Tensor]:
    """Bits and canvas of a decode without caches: every scale from scratch, one bit after the other."""
    noise = CounterNoise(draw_keys(seeded(*(100 + row for row in rows.tolist())), len(rows)), "cpu")
    condition, nobody = some(captions(), rows), torch.ones(len(rows), dtype=torch.bool)
    canvas = torch.zeros(len(rows), 3, 4, 4, dtype=torch.float64)
    maps: list[Tensor] = []
    drawn: list[Tensor] = []
    for k, (model, law) in enumerate(zip(models, laws, strict=True)):
        conditional = model.teacher_forced(maps, condition)[:, STARTS[k] :]
        null = model.teacher_forced(maps, condition, nobody)[:, STARTS[k] :]
        logits = (null + law.guidance_scale * (conditional - null)) / law.temperature
        chances = logits.softmax(-1)
        rare = chances <= 1 - law.top_p  # as the official code: a value this rare is left out
        log_probs = logits.masked_fill(rare, -torch.inf).log_softmax(-1)
        bits = []
        codes = torch.zeros(len(rows), 3, SIDES[k] ** 2, dtype=torch.float64)
        for place, bit in itertools.product(range(SIDES[k] ** 2), range(3)):
            column = 3 * place + bit
            slot = torch.full((len(rows), 1), STARTS[k] + column)
            if smooth:
                gumbel = noise.gumbel(slot, 2, TOKEN, dtype=torch.float64)
                share = mixture(log_probs[:, column, None], gumbel, k / 3)[:, 0]
                bits.append(share.argmax(-1, keepdim=True))
                codes[:, bit, place] = (share[:, 1] - share[:, 0]) / 3**0.5
            else:
                bits.append(noise.categorical(log_probs[:, column, None], slot, TOKEN))
                codes[:, bit, place] = (2 * bits[-1][:, 0].double() - 1) / 3**0.5
        drawn.append(torch.cat(bits, 1))
        canvas = TOKENIZER.accumulate_codes(canvas, k, codes.unflatten(2, (SIDES[k], SIDES[k])))
        if k < 3:
            maps.append(TOKENIZER.next_map(canvas, k + 1))
    return torch.cat(drawn, 1), canvas


@pytest.mark.parametrize("smooth", [False, True])
def test_draws_what_a_plain_loop_without_caches_draws(smooth):
    model, rows = tiny_infinity(), torch.arange(3)
    result = decode(model, rows, smooth=smooth)
    tokens, canvas = plain_loop([model] * 4, [LAW] * 4, rows, smooth)
    assert torch.equal(result.tokens, tokens)
    assert (result.canvas - canvas).abs().max() < 1e-10
    assert result.tokens.shape == (3, 90) and 0.2 < result.tokens.double().mean() < 0.8
    if not smooth:
        assert torch.equal(TOKENIZER.decode_canvas(result.canvas), TOKENIZER.decode_tokens(result.tokens))
    trace: ScaleTrace = result.trace
    assert trace.commit_call.shape == (3, 90)
    assert trace.commit_call[0].bincount().tolist() == [3, 12, 27, 48]
    trace = trace.beside({"ramp": False})  # its plain decoding
    assert trace.lossless == trace.identical == (not smooth)


def test_guidance_and_temperature_of_each_scale():
    """The official lists `cfg_list` and `tau_list` are stages of one model, which goes on with its cache."""
    model, rows = tiny_infinity(), torch.arange(3)
    laws = [TokenLaw(s, t, top_p=0.97) for s, t in [(1.5, 1.0), (4.0, 0.5), (2.0, 0.7), (3.0, 1.2)]]
    result = decode([Stage(model, range(k, k + 1), law) for k, law in enumerate(laws)], rows)
    assert torch.equal(result.tokens, plain_loop([model] * 4, laws, rows)[0])
    assert result.trace.model_calls == (4,) and result.trace.beside({"ramp": False}).lossless


@pytest.mark.parametrize("num_draft_scales", [1, 2, 3])
def test_two_models_decode_together(num_draft_scales):
    large, small, rows = tiny_infinity(0), tiny_infinity(7, num_layers=1, num_heads=1), torch.arange(3)
    models = [large] * num_draft_scales + [small] * (4 - num_draft_scales)
    result = decode(code_stages(large, small, num_draft_scales), rows, measure=True)
    assert torch.equal(result.tokens, plain_loop(models, [LAW] * 4, rows)[0])
    assert (result.trace.divergence or 0) > 0.01
    same = decode(code_stages(large, copy.deepcopy(large), num_draft_scales), rows)
    assert torch.equal(same.tokens, decode(large, rows).tokens)


def test_a_whole_budget_is_no_compression_and_a_tight_one_takes_its_bytes():
    model, rows = tiny_infinity(), torch.arange(3)
    plain = decode(model, rows)
    full = decode(CompressedVAR(model, ScaleBudget.full(SIDES, 2)), rows)
    assert torch.equal(full.tokens, plain.tokens) and full.trace.beside({"ramp": False}).lossless
    tight = ScaleBudget(SIDES, ((0, 0), (1, 1), (4, 5), (9, 11)))
    compressed = CompressedVAR(model, tight)
    result = decode([Stage(model, range(1)), Stage(compressed, range(1, 4))], rows, measure=True)
    assert not result.trace.lossless and (result.trace.divergence or 0) > 1e-4
    planned = cache_bytes(model.config, tight, 3, True, torch.float64)
    assert decode(compressed, rows).trace.cache_bytes == (planned.held,)
    assert planned.held < 0.75 * plain.trace.cache_bytes[0]
    budget = calibrate(
        model, TOKENIZER, captions(), sampler=ScaleWiseSampler(ramp=False), law=LAW, share=0.8, batch_size=3
    )
    assert budget.share <= 0.8 and budget.scales == SIDES


def test_maps_that_are_no_squares():
    sides: tuple[Side, ...] = (1, (2, 1), (5, 6), (10, 7))
    model, tokenizer, rows = tiny_infinity(scales=sides), tiny_bits(scales=sides), torch.arange(3)
    plain = decode(model, rows, tokenizer=tokenizer)
    assert plain.tokens.shape == (3, 3 * (1 + 2 + 30 + 70))
    assert tokenizer.decode_tokens(plain.tokens).shape == (3, 3, 20, 14)
    again = decode(code_stages(model, copy.deepcopy(model), 2), rows, tokenizer=tokenizer)
    assert torch.equal(again.tokens, plain.tokens)
    full = decode(CompressedVAR(model, ScaleBudget.full(sides, 2)), rows, tokenizer=tokenizer)
    assert torch.equal(full.tokens, plain.tokens)
    tight = CompressedVAR(model, ScaleBudget(sides, ((0, 0), (1, 1), (3, 3), (20, 28))))
    assert decode(tight, rows, tokenizer=tokenizer).trace.cache_bytes[0] < 0.8 * plain.trace.cache_bytes[0]
    refuses(ValueError, "model.*0", decode, tiny_infinity(), rows, tokenizer=tokenizer)


@pytest.mark.parametrize(("height", "width"), [(5, 6), (10, 7), (3, 8), (2, 1), (8, 2)])
def test_observers_of_maps_that_are_no_squares(height: int, width: int):
    """The centres of a grid of 4 x 4 cells, or of as many as there are places."""
    down, across = min(height, 4), min(width, 4)
    want = [
        width * math.floor((row + 0.5) * height / down) + math.floor((column + 0.5) * width / across)
        for row in range(down)
        for column in range(across)
    ]
    assert observers((height, width)).tolist() == want
    assert window_size((height, width)) == len(want)


def test_patches_and_models_of_other_codes():
    patches = tiny_bits(patchify=True)
    model, rows = tiny_infinity(bits=12), torch.arange(3)
    result = decode(model, rows, tokenizer=patches)
    assert result.tokens.shape == (3, 30 * 12)
    assert torch.equal(patches.decode_tokens(result.tokens), patches.decode_canvas(result.canvas))
    refuses(ValueError, "2 codes.*3.*12", decode, tiny_infinity(), rows, tokenizer=patches)
