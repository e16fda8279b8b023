"""Next-scale sampling on real small transformers: what is drawn, by whom, from what, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from tests.helpers.scales import GUIDED, LABELS, SIDES, STARTS, TOKENIZER, decode, plain_loop
from tests.helpers.tiny import seeded
from tests.helpers.tiny_scales import FormulaTokenizer, TableScaleModel, tiny_var, tiny_var_vq
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.stages import Stage, code_stages
from visual_spec.samplers.scales.trace import ScaleTrace


@pytest.mark.parametrize("shared_adaln", [False, True])
@pytest.mark.parametrize("ramp", [True, False])
def test_draws_what_a_plain_loop_without_caches_draws(ramp, shared_adaln):
    model, rows = tiny_var(shared_adaln=shared_adaln), torch.arange(5)
    result = decode(model, rows, ramp=ramp)
    assert torch.equal(result.tokens, plain_loop([model] * 4, [GUIDED] * 4, rows, TOKENIZER, ramp))
    assert len(result.tokens.unique()) > 6


@pytest.mark.parametrize("num_draft_scales", [1, 2, 3])
def test_two_models_draw_what_a_plain_loop_draws(num_draft_scales):
    large, small, rows = tiny_var(0), tiny_var(7, num_layers=1), torch.arange(5)
    laws = [TokenLaw(temperature=1.2), GUIDED]  # only the second is guided: the first runs without those rows
    stages = code_stages(large, small, num_draft_scales, law=laws[0], small_law=laws[1])
    result = decode(stages, rows)
    split = [num_draft_scales, 4 - num_draft_scales]
    models = [large] * split[0] + [small] * split[1]
    want = plain_loop(models, [laws[0]] * split[0] + [laws[1]] * split[1], rows, TOKENIZER)
    assert torch.equal(result.tokens, want)


@pytest.mark.parametrize("num_draft_scales", [1, 2, 3])
@pytest.mark.parametrize("law", [TokenLaw(), GUIDED, TokenLaw(guidance_scale=2.0, temperature=0.0)])
def test_collaboration_of_equal_models_is_plain_decoding(law, num_draft_scales):
    model, rows = tiny_var(), torch.arange(5)
    stages = code_stages(model, copy.deepcopy(model), num_draft_scales)
    plain, result = decode(model, rows, law), decode(stages, rows, law)
    assert torch.equal(result.tokens, plain.tokens)
    assert (result.canvas - plain.canvas).abs().max() < 1e-12


def test_through_the_real_tokenizer():
    tokenizer = tiny_var_vq().double()
    model, rows = tiny_var(), torch.arange(3)
    plain = decode(model, rows, tokenizer=tokenizer)
    assert torch.equal(plain.tokens, plain_loop([model] * 4, [GUIDED] * 4, rows, tokenizer))
    again = decode(code_stages(model, copy.deepcopy(model), 2), rows, tokenizer=tokenizer)
    assert torch.equal(again.tokens, plain.tokens)
    pictures = tokenizer.decode_canvas(plain.canvas)
    assert torch.equal(pictures, tokenizer.decode_tokens(plain.tokens))
    assert pictures.shape == (3, 3, 8, 8)
    smooth = decode(model, rows, tokenizer=tokenizer, smooth=True)
    assert (
        1e-3 < (tokenizer.decode_tokens(smooth.tokens) - tokenizer.decode_canvas(smooth.canvas)).abs().max()
    )
    single = decode(model, rows, tokenizer=tokenizer.float(), smooth=True)  # of another type than the model
    assert single.canvas.dtype == torch.float64
    assert (single.canvas - smooth.canvas).abs().max() < 1e-4


def test_smooth_tokens_are_mixtures_of_codes():
    model, rows = tiny_var(), torch.arange(3)
    result = decode(model, rows, smooth=True)
    noise = CounterNoise(draw_keys(seeded(100, 101, 102), 3), "cpu")
    canvas = torch.zeros(3, 2, 4, 4, dtype=torch.float64)
    maps: list[Tensor] = []
    for k, side in enumerate(SIDES):
        r = k / 3
        logits = model.teacher_forced(maps, LABELS[rows])[:, STARTS[k] :]
        null = model.teacher_forced(maps, LABELS[rows], torch.ones(3, dtype=torch.bool))[:, STARTS[k] :]
        t = 2.0 * r
        kept = TokenLaw(1.0, 0.9, 8, 0.95)((1 + t) * logits - t * null, False)
        slots = torch.arange(STARTS[k], STARTS[k + 1]).repeat(3, 1)
        gumbel = noise.gumbel(slots, 12, TOKEN, dtype=torch.float64)
        weights = (((1 + r) * kept + gumbel) / max(0.27 * (1 - r * 0.95), 0.005)).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        assert torch.equal(result.tokens[:, STARTS[k] : STARTS[k + 1]], weights.argmax(-1))
        codes = torch.einsum("bnv,vd->bdn", weights, TOKENIZER.codebook).view(3, 2, side, side)
        canvas = TOKENIZER.accumulate_codes(canvas, k, codes)
        if k < 3:
            maps.append(TOKENIZER.next_map(canvas, k + 1))
    assert (result.canvas - canvas).abs().max() < 1e-9
    assert not result.trace.lossless and not ScaleWiseSampler(smooth=True).lossless
    # A mixture lies between codes: the canvas is not that of the tokens.
    hard = TOKENIZER.begin(3, torch.device("cpu"), torch.float64)
    for k, part in enumerate(result.tokens.split([n * n for n in SIDES], 1)):
        hard = TOKENIZER.accumulate(hard, k, part)
    assert (result.canvas - hard).abs().max() > 0.01


def test_callback_sees_every_scale_with_its_canvas():
    seen: list[tuple[int, Tensor]] = []
    result = ScaleWiseSampler()(
        tiny_var(),
        LABELS[:2],
        tokenizer=TOKENIZER,
        law=GUIDED,
        batch_size=2,
        callback=lambda k, canvas: seen.append((k, canvas)),
    )
    assert [k for k, _ in seen] == [0, 1, 2, 3]
    canvas = TOKENIZER.begin(2, torch.device("cpu"), torch.float64)
    for (k, shown), part in zip(seen, result.tokens.split([n * n for n in SIDES], 1), strict=True):
        canvas = TOKENIZER.accumulate(canvas, k, part)
        assert torch.equal(shown, canvas)  # also after later scales: nothing is added in place
    assert torch.equal(result.canvas, canvas)


def test_the_trace_counts_forwards_and_cache_bytes():
    large, small = tiny_var(dtype=torch.float32), tiny_var(3, dtype=torch.float32, num_layers=1)
    rows = torch.arange(2)
    slot = 2 * 16 * 4 * 4  # keys and values, width, bytes, guided rows; for one layer
    plain = decode(large, rows).trace
    assert isinstance(plain, ScaleTrace)
    assert plain.target_calls.tolist() == [4, 4] and plain.model_calls == (4,)
    assert plain.tokens_per_call.tolist() == [7.5, 7.5]
    assert plain.commit_call[1].tolist() == [0] + [1] * 4 + [2] * 9 + [3] * 16
    assert plain.cache_bytes == (2 * slot * 14,)
    assert plain.lossless and plain.identical and plain.divergence is None
    assert "same tokens" in plain.summary()
    code = decode(code_stages(large, small, 2), rows).trace
    assert code.model_calls == (2, 2) and code.target_calls.tolist() == [4, 4]
    assert code.cache_bytes == (2 * slot * 1, slot * 14)  # the large model's last scale is not cached either
    assert decode(code_stages(large, small, 3), rows).trace.cache_bytes == (2 * slot * 5, 0)
    assert not code.lossless and not code.identical and "lossy" in code.summary()
    assert set(code.phase_seconds) == {"prefill", "model", "verify"}


def test_measuring_runs_the_first_model_to_the_end():
    large, small, rows = tiny_var(), tiny_var(3, num_layers=1), torch.arange(3)
    stages = code_stages(large, small, 2, law=TokenLaw(), small_law=GUIDED)
    quiet, measured = decode(stages, rows), decode(stages, rows, measure=True)
    assert torch.equal(quiet.tokens, measured.tokens) and quiet.trace.divergence is None
    assert measured.trace.divergence is not None and 0.1 < measured.trace.divergence < 1
    assert "measured divergence" in measured.trace.summary()
    assert measured.trace.model_calls == (2, 2)
    same = decode(code_stages(large, copy.deepcopy(large), 2), rows, measure=True)
    assert same.trace.divergence is not None and same.trace.divergence < 1e-12
    assert decode(large, rows, measure=True).trace.divergence is None  # nothing to compare


@pytest.mark.parametrize("given", [TokenLaw(), TokenLaw(guidance_scale=4.0)])
@pytest.mark.parametrize("first", [TokenLaw(), TokenLaw(guidance_scale=2.5)])
def test_the_reference_law_is_guided_as_the_first_model_is(first, given):
    """Not as the call's law is. The same network with the same law then measures nothing, with another it does."""
    large, rows = tiny_var(), torch.arange(3)
    stages = code_stages(large, copy.deepcopy(large), 2, law=first, small_law=first)
    same = decode(stages, rows, given, measure=True).trace.divergence
    assert same is not None and same < 1e-12
    stages = code_stages(large, copy.deepcopy(large), 2, law=first, small_law=TokenLaw(guidance_scale=6.0))
    other = decode(stages, rows, given, measure=True).trace.divergence
    assert other is not None and other > 0.01
    stages = [Stage(large, range(2)), Stage(copy.deepcopy(large), range(2, 4))]
    # The call's law where the first has none.
    own = decode(stages, rows, given, measure=True).trace.divergence
    assert own is not None and own < 1e-12


def test_a_model_that_follows_itself_keeps_its_cache():
    model, rows = tiny_var(), torch.arange(3)
    laws = [TokenLaw(), TokenLaw(guidance_scale=2.0), TokenLaw(guidance_scale=2.0), TokenLaw(top_k=3)]
    stages = [Stage(model, range(1)), Stage(model, range(1, 3), laws[1]), Stage(model, range(3, 4), laws[3])]
    result = decode(stages, rows, laws[0])
    assert torch.equal(result.tokens, plain_loop([model] * 4, laws, rows, TOKENIZER))
    assert result.trace.model_calls == (4,) and result.trace.lossless
    tables = TableScaleModel(SIDES, 12)
    stages = [
        Stage(tables, range(1)),
        Stage(tables, range(1, 3), laws[1]),
        Stage(tables, range(3, 4), laws[3]),
    ]
    ScaleWiseSampler()(stages, None, tokenizer=TOKENIZER, law=laws[0])
    assert tables.prefills == 1


def test_logits_that_define_no_law_are_named():
    model = tiny_var()
    model.get_parameter("pos_1LC").data[0, 6] = torch.nan
    refuses(FloatingPointError, "sample 0.*0.*5.*nan", decode, model, torch.arange(2))


def test_requests_that_cannot_be_served_are_refused_before_compute():
    model, other = TableScaleModel(SIDES, 12), TableScaleModel(SIDES, 12, seed=1)
    sampler = ScaleWiseSampler()

    def refused(model: Any, match: str, law: TokenLaw = GUIDED, tokenizer: Any = TOKENIZER, **rest) -> None:
        refuses(ValueError, match, sampler, model, None, tokenizer=tokenizer, law=law, **rest)

    cover = r"follow each other without gap or overlap, from scale 0 to scale 3"
    refused([], "the stages draw scales none; .* " + cover)
    refused([Stage(model, range(3))], "draw scales 0 to 2; .* " + cover)
    refused([Stage(model, range(1, 4))], "draw scales 1 to 3; .* " + cover)
    refused([Stage(model, range(2)), Stage(other, range(3, 4))], "draw scales 0 to 1, 3 to 3; .* " + cover)
    refused([Stage(model, range(3)), Stage(other, range(2, 4))], "draw scales 0 to 2, 2 to 3; .* " + cover)
    refused([Stage(model, range(5))], "draw scales 0 to 4; .* " + cover)
    shapes = [
        (TableScaleModel((1, 2, 3, 5), 12), r"1.*\(1, 2, 3, 5\).*12.*2"),
        (TableScaleModel(SIDES, 11), r"1.*\(1, 2, 3, 4\).*11"),
        (TableScaleModel(SIDES, 12, code_dim=3), "12 codes.*3.*2"),
    ]
    for wrong, match in shapes:
        refused(code_stages(model, wrong, 2), match)
    refused(model, "13 codes", tokenizer=FormulaTokenizer(SIDES, 13))
    for split in (0, 4, -1, 2.0, True):
        refuses(ValueError, f"num_draft_scales={split!r}.*1 to 3", code_stages, model, other, split)
    for scales in (range(0), range(0, 4, 2), (0, 4), range(-1, 2)):
        refuses(ValueError, r"range\(first, stop\)", Stage, model, scales)
    for temperature in (0.0, -1.0, float("nan")):
        refuses(ValueError, "late_temperature=.*0", Stage, model, range(1), late_temperature=temperature)
    assert model.prefills == other.prefills == 0
