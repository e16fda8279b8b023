"""Masked decoding: its pieces, MAGNeT against a plain loop over single clips, and bad input."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.masked import FRAMES, LAW, MAGNET, STEPS, magnet, text
from tests.helpers.musicgen import CODES, musicgen
from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularColumnModel, TabularMaskedModel
from tests.helpers.tiny import seeded
from visual_spec.models.columns.musicgen import MagnetModel, MusicgenColumnModel
from visual_spec.models.columns.musicgen_modules import MusicCondition
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import of_settings
from visual_spec.samplers.core import masking
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import (
    Spans,
    halton_order,
    hidden_counts,
    hidden_shares,
    least_sure,
)
from visual_spec.samplers.core.noise import CounterNoise
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice, LawByStep, Schedule
from visual_spec.samplers.masked.presets import PRESETS
from visual_spec.samplers.masked.unmasking import MaskedTrace, Unmasking

# -- pieces -----------------------------------------------------------------------------------------------------------


def counts(schedule: str, clock: str, steps: int, units: int) -> list[int]:
    shares = hidden_shares(schedule, clock, steps)
    return [int(count) for count in hidden_counts(shares, clock, torch.tensor([units]))]


@pytest.mark.parametrize("units, steps", [(256, 8), (256, 12), (1024, 12), (16, 16), (5, 8)])
def test_the_schedule_of_maskgit(units, steps):
    """After step i, floor(N cos(pi (i + 1) / 2 T)) are hidden, one less than before at least, and one at least."""
    before, expected = units, [units]
    for step in range(steps - 1):
        before = max(1, min(math.floor(units * math.cos(math.pi / 2 * (step + 1) / steps)), before - 1))
        expected.append(before)
    assert counts("cosine", "maskgit", steps, units) == expected


@pytest.mark.parametrize("units, steps", [(166, 20), (166, 10), (500, 60), (3, 10), (7, 1)])
def test_the_schedule_of_magnet(units, steps):
    """Before step i, int(cos(pi i / 2 (T - 1)) N) spans are hidden, and one at least."""
    times = torch.linspace(0, 1, steps, dtype=torch.float64)
    expected = [max(int(math.cos(float(t) * math.pi * 0.5) * units + 1e-9), 1) for t in times]
    assert counts("cosine", "magnet", steps, units) == expected


@pytest.mark.parametrize("units, steps", [(256, 32), (576, 32), (256, 16), (16, 12)])
def test_the_schedule_of_halton(units, steps):
    """After step i, int(N (1 - 2 arccos((i + 1) / T) / pi)) are kept, and i + 1 at least."""
    kept = [
        max(i + 1, int((1 - math.acos((i + 1) / steps) / (math.pi / 2)) * units + 1e-9))
        for i in range(steps - 1)
    ]
    assert counts("arccos", "halton", steps, units) == [units, *(units - count for count in kept)]


@pytest.mark.parametrize("bound", [0.0, 0.1, 0.5, 2.0, 50.0])
def test_the_entropy_bound_keeps_what_diffusers_keeps(bound):
    """Slots of least entropy first, as its scheduler for discrete diffusion accepts them."""
    from diffusers.schedulers.scheduling_entropy_bound import EntropyBoundScheduler

    logits = 3 * torch.randn(4, 12, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scheduler = EntropyBoundScheduler(entropy_bound=bound, t_max=1.0, t_min=1.0)
    accepted: Any = scheduler.step(logits, 0, torch.zeros(4, 12, dtype=torch.long)).accepted_index  # pyright: ignore
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    stays = masking.beyond_entropy_bound(-entropy, entropy, torch.ones_like(accepted), bound)
    assert torch.equal(~stays, accepted)
    hidden = torch.zeros_like(accepted)
    hidden[:, 3:] = True
    assert not (masking.beyond_entropy_bound(-entropy, entropy, hidden, bound) & ~hidden).any()


@pytest.mark.parametrize(
    "rule", [dict(entropy_bound=0.0), dict(threshold=1.0), dict(factor=1e-9), dict(commit_gaps=(99.0,) * 3)]
)
def test_where_draws_decide_rows_end_at_their_own_call(rule):
    class Certain(TabularMaskedModel):
        def forward(self, state, tokens, stage):
            logits = super().forward(state, tokens, stage).clone()
            logits[0, :, 0] += 1e4  # nothing is open in the first sample
            return logits

    model = Certain(TokenGrid(1, 5), 3)
    result = of_settings(MaskedSampler, 5, schedule="linear", **rule)(
        model, None, law=TokenLaw(), batch_size=2, generator=seeded(1, 2)
    )
    assert result.trace.target_calls.tolist() == [1, 5]
    assert result.tokens[0].tolist() == [0] * 5 and (result.tokens < 3).all()
    assert sorted(result.trace.commit_call[1].tolist()) == [0, 1, 2, 3, 4]
    assert of_settings(MaskedSampler, 2, **rule)(
        model, None, law=TokenLaw(), batch_size=2
    ).trace.target_calls.tolist() == [1, 2]


def test_every_schedule_has_its_published_values():
    """By hand: cos(30 degrees), and powers of a quarter or a half. A few tokens round alike under different powers."""
    values = {
        ("cosine", 1 / 3): 0.8660254037844386,
        ("arccos", 1 / 2): 2 / 3,
        ("linear", 1 / 4): 0.75,
        ("square", 1 / 2): 0.75,
        ("cubic", 1 / 2): 0.875,
        ("root", 1 / 4): 0.5,
        ("power_2.5", 1 / 4): 1 - 1 / 32,
    }
    assert {name for name, _ in values} == set(masking.SCHEDULES)
    for (name, u), share in values.items():
        assert masking.SCHEDULES[name](u) == pytest.approx(share, abs=1e-12)
        assert masking.SCHEDULES[name](0) == pytest.approx(1) and abs(masking.SCHEDULES[name](1)) < 1e-12


def test_counts_that_should_be_whole_are():
    assert counts("linear", "magnet", 11, 10) == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 1]
    assert counts("linear", "maskgit", 10, 10) == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]


def test_samples_have_counts_of_their_own():
    shares = hidden_shares("cosine", "magnet", 5)
    together = torch.stack(hidden_counts(shares, "magnet", torch.tensor([0, 1, 9, 40])))
    for column, units in enumerate([0, 1, 9, 40]):
        alone = counts("cosine", "magnet", 5, units)
        assert together[:, column].tolist() == alone and (units > 0 or alone == [0] * 5)


@pytest.mark.parametrize("shape", [(1, 16, 16), (1, 64, 64), (1, 1, 7), (3, 4, 5), (1, 1, 1), (1, 5, 1)])
def test_halton_orders_hold_every_cell_once(shape):
    order = halton_order(*shape)
    assert order.sort().values.tolist() == list(range(math.prod(shape)))


def test_halton_orders_cover_evenly_from_the_first_cell_on():
    """Points of the sequence by hand: 1/2, 1/4, 3/4, 1/8 in base 2, and 1/3, 2/3, 1/9 in base 3."""
    assert halton_order(1, 1, 8)[:4].tolist() == [4, 2, 6, 1]
    assert halton_order(1, 4, 9)[:3].tolist() == [2 * 9 + 3, 1 * 9 + 6, 3 * 9 + 1]
    cells = halton_order(1, 16, 16)[:64]
    quarters = torch.bincount(cells // 16 // 4 * 4 + cells % 16 // 4, minlength=16)
    assert quarters.min() >= 3 and quarters.max() <= 6


# What the code of its authors gave (valeoai/Halton-MaskGIT, f61b0a1, `build_halton_mask`): the first ten cells, and the
# sum of (place + 1) times cell over the whole order, modulo 1,000,003.
OFFICIAL_HALTON = {
    8: ([34, 21, 48, 11, 46, 25, 60, 7, 32, 18], 66507),
    16: ([133, 74, 193, 39, 172, 99, 232, 30, 144, 85], 198827),
    24: ([296, 160, 434, 82, 378, 221, 517, 45, 312, 176], 907774),
    32: ([522, 277, 771, 142, 664, 391, 913, 92, 577, 331], 729067),
}


@pytest.mark.parametrize("side", OFFICIAL_HALTON)
def test_halton_orders_are_the_official_ones(side):
    first, whole = OFFICIAL_HALTON[side]
    order = halton_order(1, side, side)
    assert order[:10].tolist() == first
    assert int((order * torch.arange(1, len(order) + 1)).sum()) % 1_000_003 == whole


def test_ranks_and_not_a_threshold_choose_what_stays_hidden():
    score = torch.tensor([[0.5, 0.5, 0.5, 0.1], [-math.inf, 0.2, -math.inf, 0.3]])
    hidden = torch.tensor([[True, True, True, False], [True, True, True, True]])
    stays = least_sure(score, hidden, torch.tensor([2, 3]))
    assert stays.tolist() == [[True, True, False, False], [True, True, True, False]]


def test_spans_cover_the_slots_and_the_last_one_is_cut_off():
    spans = Spans(7, 3)
    assert spans.count == 3
    assert spans.spread(torch.tensor([[1, 2, 3]])).tolist() == [[1, 1, 1, 2, 2, 2, 3]]
    values = torch.tensor([[0.1, 0.2, 0.9, 0.3, 0.4, 0.0, -0.5]])
    hidden = torch.tensor([[True, True, False, True, True, True, True]])
    assert spans.score(values, hidden, "max")[0].tolist() == pytest.approx([0.2, 0.4, -0.5])
    assert spans.score(values, hidden, "sum")[0].tolist() == pytest.approx([0.3, 0.7, -0.5])
    assert spans.any(~hidden).tolist() == [[True, False, False]]


# -- MAGNeT, clip by clip ---------------------------------------------------------------------------------------------


def test_greedy_clips_are_ranked_at_the_temperature_of_the_step():
    """At a high temperature tokens rank in another order than at temperature 1."""
    model, condition = magnet(), text()

    def codes(law: TokenLaw, greedy: bool) -> Tensor:
        settings: Any = dict(MAGNET, greedy=greedy)
        return of_settings(MaskedSampler, STEPS, **settings)(model, condition, law=law, batch_size=3).tokens

    warm = codes(TokenLaw(guidance_scale=4.0, temperature=20.0), True)
    assert torch.equal(warm, codes(TokenLaw(guidance_scale=4.0, temperature=20.0, top_p=0.5), True))
    assert not torch.equal(warm, codes(TokenLaw(guidance_scale=4.0, temperature=0.0), False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_draws_are_scored_by_the_law(dtype):
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(3)).to(dtype)
    slots = torch.arange(3).expand(1, -1)
    law = CheckedLaw(TokenLaw(guidance_scale=3.0, temperature=2.5), 3)
    run: Any = SimpleNamespace(law=law, noise=CounterNoise(torch.tensor([5]), "cpu"))
    two_steps = dict(laws=[law.law] * 2, guided=[True] * 2, order=None, step=0)
    stage: Any = SimpleNamespace(entries=slots, **two_steps)
    loop = Unmasking(Schedule(), Choice(greedy=True), LawByStep())
    drawn, score, _ = loop._draw(run, stage, logits, slots >= 0)
    guided = logits[1] + 3 * (logits[0] - logits[1])
    assert drawn[0].tolist() == guided.argmax(-1).tolist()
    assert score is not None
    assert (score[0] - (guided / 2.5).log_softmax(-1).amax(-1)).abs().max() < 1e-5


def test_rescoring_ranks_by_both_models():
    """Rescored clips differ, and each model alone is one end of the mixture."""
    model, rescorer = magnet(), MusicgenColumnModel(musicgen(), FRAMES)

    def decode(share: float, **options: Any) -> Tensor:
        sampler = of_settings(MaskedSampler, STEPS, **MAGNET, rescorer_share=share)
        result: Any = sampler(model, text(), law=LAW, generator=seeded(1, 2, 3), batch_size=3, **options)
        assert result.trace.rescorer_calls == (7 if options else 0)
        return result.tokens

    plain = decode(0.5)
    assert torch.equal(decode(1.0, rescorer=rescorer), plain)
    assert not torch.equal(decode(0.0, rescorer=rescorer), plain)


# -- any batch, any order of work -------------------------------------------------------------------------------------


def test_rows_with_other_numbers_of_known_tokens_keep_as_many_as_alone():
    model = TabularMaskedModel(TokenGrid(1, 12), 2, seed=1)
    given = torch.full((4, 12), 2)
    for row, count in enumerate((0, 3, 7, 11)):
        given[row, :count] = 1
    sampler = MaskedSampler(4, choice=Choice(choice_temperature=1.0))
    whole: Any = sampler(
        model, None, law=TokenLaw(), generator=seeded(0, 1, 2, 3), batch_size=4, known_tokens=given
    )
    for row in range(4):
        alone: Any = sampler(
            model, None, law=TokenLaw(), generator=seeded(row), batch_size=1, known_tokens=given[row, None]
        )
        assert torch.equal(alone.trace.entry_call[0], whole.trace.entry_call[row])
        assert torch.equal(alone.tokens[0], whole.tokens[row])


def test_known_tokens_in_an_open_span_are_never_kept_by_a_call():
    model = TabularMaskedModel(TokenGrid(1, 7), 2)
    given = torch.tensor([[2, 1, 2, 2, 2, 0, 2]])
    result: Any = MaskedSampler(3, span=3)(model, None, law=TokenLaw(), batch_size=1, known_tokens=given)
    assert (result.trace.entry_call[0, :, 0] == -1).tolist() == (given[0] < 2).tolist()
    assert result.tokens[0, [1, 5]].tolist() == [1, 0]


def test_falling_temperatures_end_where_they_should():
    """MAGNeT's code ends at 0.01; MaskGCT takes the likeliest tokens, but draws where there is one step."""
    law = TokenLaw(temperature=2.0)
    after, before = (LawByStep(temperature="falling", falls=falls) for falls in ("after", "before"))

    def temperatures(rule: LawByStep, steps: int) -> list[float]:
        return [rule.law(law, 0.5, step, rule.left(steps)).temperature for step in range(steps)]

    assert temperatures(after, 4) == [1.5, 1.0, 0.5, 0.01] and temperatures(before, 4) == [2.0, 1.5, 1.0, 0.0]
    assert temperatures(before, 1) == [0.2]
    root = LawByStep(temperature="root", last_temperature=0.5)
    assert temperatures(root, 5)[1] == pytest.approx(2.0 * (1 - 0.5 * 0.5))  # the root of a quarter


def test_the_trace_tells_when_tokens_were_kept():
    model, seen = magnet(), []
    sampler = of_settings(MaskedSampler, STEPS, **MAGNET)
    given = model.known_tokens(torch.zeros(3, 4, 3, dtype=torch.long))
    result = sampler(
        model,
        text(),
        law=LAW,
        batch_size=3,
        known_tokens=given,
        callback=lambda call, lengths: seen.append((call, lengths.tolist())),
    )
    trace = result.trace
    assert isinstance(trace, MaskedTrace)
    assert trace.target_calls.tolist() == [11] * 3 and not trace.lossless
    assert trace.tokens_per_call.tolist() == pytest.approx([7 / 11] * 3)
    assert "masked decoding" in trace.summary()
    assert (trace.entry_call[:, :3] == -1).all() and (trace.commit_call[:, :3] == 0).all()
    ends = [0, 5, 8, 10, 11]
    for stage in range(4):
        calls = trace.entry_call[:, 3:, stage]
        assert calls.min() >= ends[stage] and (calls.amax(1) == ends[stage + 1] - 1).all()
        # Spans are kept together: frames 3 to 5, 6 to 8, and 9.
        assert (calls[:, :3] == calls[:, :1]).all() and (calls[:, 3:6] == calls[:, 3:4]).all()
    assert (trace.commit_call[:, 3:] == 10).all()
    assert [call for call, _ in seen] == list(range(11))
    assert seen[-1][1] == [FRAMES] * 3
    for call, lengths in seen:
        kept = (trace.entry_call <= call).sum((1, 2)) // 4
        assert lengths == kept.tolist()


class CountedRows(TabularMaskedModel):
    """Notes the rows of every call."""

    rows: list[int]

    def forward(self, state: Any, tokens: Tensor, stage: int) -> Tensor:
        logits = super().forward(state, tokens, stage)
        self.rows.append(len(logits))
        return logits


def test_after_the_guided_calls_no_unconditional_row_is_computed():
    model, law = CountedRows(TokenGrid(2, 3), 3), TokenLaw(guidance_scale=3.0)
    settings: dict[str, Any] = {"steps": 5, "choice_temperature": 1.0, "schedule": "linear"}

    def decode(law: TokenLaw, **changed: Any) -> Any:
        model.rows = []
        generator = [torch.Generator().manual_seed(seed) for seed in range(40)]
        return of_settings(MaskedSampler, **{**settings, **changed})(
            model, None, law=law, batch_size=40, generator=generator
        )

    guided, two = decode(law), decode(law, guided_steps=2)
    assert model.rows == [80, 80, 40, 40, 40]
    early = guided.trace.entry_call < 2
    assert torch.equal(early, two.trace.entry_call < 2) and 0 < early.sum() < early.numel()
    assert torch.equal(guided.tokens[early[..., 0]], two.tokens[early[..., 0]])
    assert not torch.equal(guided.tokens, two.tokens)
    assert torch.equal(decode(law, guided_steps=5).tokens, guided.tokens) and model.rows == [80] * 5
    none = decode(law, guided_steps=0)
    assert model.rows == [40] * 5 and torch.equal(none.tokens, decode(TokenLaw()).tokens)
    late = decode(law, guided_steps=2, measure=True)
    assert torch.equal(late.tokens, two.tokens) and model.rows == [80, 80] * 2 + [40, 40] * 3


def test_presets_are_samplers_and_survive_their_files(tmp_path):
    for name, preset in PRESETS.items():
        sampler = preset.sampler()
        sampler.save_pretrained(tmp_path / name)
        again: Any = MaskedSampler.from_pretrained(tmp_path / name)
        for key, value in preset.settings.items():
            kept = again.config[key]
            assert (tuple(kept) if isinstance(kept, list) else kept) == value


def test_greedy_decoding_keeps_the_likeliest_tokens():
    model = TabularMaskedModel(TokenGrid(1, 4), 3)
    law = TokenLaw(temperature=0.0)
    tokens = (
        MaskedSampler(4, schedule=Schedule(clock="magnet", schedule="linear"))(model, None, law=law)
        .tokens[0]
        .tolist()
    )
    state, known = model.prepare(None, batch_size=1, guided=False), [3, 3, 3, 3]
    for after in (2, 1, 1, 0):  # 4 * (1 - step / 3) are hidden, and one at least
        logits = model(state, torch.tensor(known)[None, :, None], 0)[0].log_softmax(-1)
        order = sorted((i for i in range(4) if known[i] == 3), key=lambda i: float(logits[i].max()))
        for i in order[after:]:
            known[i] = int(logits[i].argmax())
    assert tokens == known


# -- bad input --------------------------------------------------------------------------------------------------------


def test_noise_on_a_fixed_order_is_refused():
    with pytest.raises(ValueError, match=r"choice_temperature=1\.0.*score='halton'"):
        MaskedSampler(choice=Choice(score="halton", choice_temperature=1.0))


def test_requests_that_cannot_be_served_are_refused():
    model, image = magnet(), TabularMaskedModel(TokenGrid(2, 2), 3)
    law = TokenLaw()

    def refused(sampler: MaskedSampler, message: str, served: Any = model, **options: Any) -> None:
        options = {"law": law, "batch_size": 3, **options}
        refuses(ValueError, message, sampler, served, text() if served is model else None, **options)

    refused(MaskedSampler((20, 10)), r"steps=\(20, 10\).*2.*4")
    refused(MaskedSampler(4, span=11), "span=11.*1 x 1 x 10.*1.*10")
    refused(MaskedSampler(4, span=2), "span=2.*1 x 2 x 2.*1", image)
    refused(MaskedSampler(4, schedule=Schedule(entropy_bound=0.1)), r"entropy_bound=0\.1.*4")
    refused(MaskedSampler(4), "guidance_until=3", law=TokenLaw(guidance_until=3))
    columns = TabularColumnModel(torch.ones(3, 2, dtype=torch.bool), 2)
    refused(MaskedSampler(4), "MagnetModel", columns)
    refused(MaskedSampler(4), "num_frames=None", MagnetModel(musicgen()))
    known = torch.zeros(3, FRAMES, 4, dtype=torch.long)
    refused(
        MaskedSampler(4),
        r"known_tokens.*torch\.int64.*\(3, 10\).*int64 \(3, 10, 4\)",
        known_tokens=known[..., 0],
    )
    refused(MaskedSampler(4), r"known_tokens.*torch\.float32", known_tokens=known.float())
    refused(MaskedSampler(4), "0.*17.*0.*15.*16", known_tokens=known.index_fill(1, torch.tensor([1]), 17))
    refused(MaskedSampler(4), "all tokens", known_tokens=known)
    other = MusicgenColumnModel(musicgen(), FRAMES)
    other.vocab_size = 9
    refused(MaskedSampler(4), "9 codes.*16", rescorer=other)
    other.vocab_size = CODES
    refused(MaskedSampler(4, choice=Choice(score="entropy")), "score='log_probability'", rescorer=other)
    codes = torch.zeros(3, 4, 2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\(3, 4, 2\).*known_tokens=model\.known_tokens"):
        condition = MusicCondition(text().features, text().mask, codes)
        MaskedSampler(4)(model, condition, law=law, batch_size=3)
    for wrong, message in [
        (codes[:, :3], r"\(3, 3, 2\).*\[B, 4, P\].*10"),
        (torch.zeros(3, 4, 10, dtype=torch.long), "10 frames"),
        (codes + CODES, "16.*16.*0.*15"),
    ]:
        refuses(ValueError, message, model.known_tokens, wrong)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_define_no_law_name_sample_and_slot(bad):
    class Broken(TabularMaskedModel):
        def forward(self, state, tokens, stage):
            logits = super().forward(state, tokens, stage).clone()
            logits[1, 2] = bad
            return logits

    model = Broken(TokenGrid(1, 3, codebooks=2), 2)
    with pytest.raises(FloatingPointError, match=r"sample 1 .*slot 4"):  # slot 2 of codebook 0
        MaskedSampler(2)(model, None, law=TokenLaw(), batch_size=2)
    given = torch.tensor([[2, 2], [2, 2], [1, 1]]).expand(2, -1, -1)
    MaskedSampler(2)(model, None, law=TokenLaw(), batch_size=2, known_tokens=given)  # nothing is drawn there
