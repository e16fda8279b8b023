"""The exact law of whole pictures of the next-scale sampler, by enumeration: every outcome is a row of one batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.exactness.branching import total_variation
from tests.tiny_scales import FormulaTokenizer, TableScaleModel
from visual_spec.samplers import scales as scales_module
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN
from visual_spec.samplers.scales import ScaleResult, ScaleWiseSampler, Stage, code_stages

PLAIN = TokenLaw()
LAWS = {
    "plain": PLAIN,
    "guidance": TokenLaw(guidance_scale=2.5),
    "temperature": TokenLaw(temperature=0.7),
    "top-k": TokenLaw(top_k=2),
    "top-p": TokenLaw(top_p=0.8),
    "greedy": TokenLaw(temperature=0.0),
    "allowed": TokenLaw(allowed=(1, 3)),
    "guided at first": TokenLaw(guidance_scale=3.0, guidance_until=3),
    "all": TokenLaw(guidance_scale=1.7, temperature=1.3, top_k=2, top_p=0.9),
}
SHAPES = {"3 ** 5": ((1, 2), 3), "2 ** 9": ((1, 2, 2), 2)}


class ForcedNoise:
    """Row i draws the i-th sequence, and is weighted by the probability of its draws."""

    def __init__(self, sequences: Tensor) -> None:
        self.sequences = sequences
        self.weight = torch.ones(len(sequences), dtype=torch.float64)
        self.drawn = torch.zeros(sequences.shape[1], dtype=torch.long)

    def categorical(self, log_probs: Tensor, slots: Tensor, stream: int, round: int = 0) -> Tensor:
        assert stream == TOKEN and round == 0, "a slot has one noise of its own"
        assert (slots == slots[:1]).all()
        self.drawn += torch.bincount(slots[0], minlength=len(self.drawn))
        outcome = self.sequences.gather(1, slots)
        self.weight = self.weight * log_probs.softmax(-1).gather(-1, outcome[..., None]).prod(1)[:, 0]
        return outcome


def enumerate_law(
    monkeypatch, model, tokenizer: FormulaTokenizer, law: TokenLaw, sampler: ScaleWiseSampler | None = None
) -> tuple[Tensor, ScaleResult]:
    """Probability of every sequence under the real sampler, and its result."""
    noise = ForcedNoise(every_sequence(tokenizer))
    monkeypatch.setattr(scales_module, "CounterNoise", lambda keys, device: noise)
    monkeypatch.setattr(scales_module, "draw_keys", lambda generator, batch_size: None)
    sampler = sampler or ScaleWiseSampler()
    result = sampler(model, tokenizer, None, law=law, batch_size=len(noise.sequences))
    assert (noise.drawn == 1).all(), "every slot is drawn once"
    assert torch.equal(result.tokens, noise.sequences)
    return noise.weight, result


def every_sequence(tokenizer: FormulaTokenizer) -> Tensor:
    """[V ** L, L]; a sequence's index is its tokens read as a number in base V."""
    length = sum(n * n for n in tokenizer.scales)
    return torch.tensor(list(itertools.product(range(tokenizer.codebook_size), repeat=length)))


def known_maps(tokenizer: FormulaTokenizer, sequences: Tensor) -> list[list[Tensor]]:
    """The input maps that are known at each scale of these pictures."""
    canvas = torch.zeros(len(sequences), 2, tokenizer.scales[-1], tokenizer.scales[-1], dtype=torch.float64)
    known: list[list[Tensor]] = [[]]
    start = 0
    for k, side in enumerate(tokenizer.scales[:-1]):
        canvas = tokenizer.accumulate(canvas, k, sequences[:, start : start + side * side])
        known.append([*known[-1], tokenizer.next_map(canvas, k + 1)])
        start += side * side
    return known


def product_law(
    tokenizer: FormulaTokenizer, models: list[TableScaleModel], laws: list[TokenLaw], ramp: bool = True
) -> Tensor:
    """The same from the definition: model and law of each scale, slot after slot, for every sequence."""
    count = len(tokenizer.scales)
    sequences = every_sequence(tokenizer)
    rows, slot = len(sequences), 0
    probability = torch.ones(rows, dtype=torch.float64)
    for k, maps in enumerate(known_maps(tokenizer, sequences)):
        law = laws[k]
        conditional = models[k].logits(torch.zeros(rows, dtype=torch.long), maps)
        unconditional = models[k].logits(torch.full((rows,), models[k].conditions), maps)
        filters = TokenLaw(1.0, law.temperature, law.top_k, law.top_p, law.allowed)
        for place in range(tokenizer.scales[k] ** 2):
            logits = conditional[:, place]
            if law.guidance_scale > 1 and (law.guidance_until is None or slot < law.guidance_until):
                t = (law.guidance_scale - 1) * (k / (count - 1) if ramp else 1)
                logits = (1 + t) * conditional[:, place] - t * unconditional[:, place]
            chances = filters(logits[:, None], False)[:, 0].exp()  # [V ** L, V]
            probability = probability * chances.gather(1, sequences[:, slot, None])[:, 0]
            slot += 1
    return probability


def parts(shape: str, count: int = 1, **changes) -> tuple[FormulaTokenizer, list[TableScaleModel]]:
    scales, vocab_size = SHAPES[shape]
    return FormulaTokenizer(scales, vocab_size), [
        TableScaleModel(scales, vocab_size, seed=seed, **changes) for seed in range(count)
    ]


@pytest.mark.parametrize("ramp", [True, False])
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_one_model_follows_its_own_law(monkeypatch, law, ramp):
    tokenizer, [model] = parts("3 ** 5")
    found, result = enumerate_law(monkeypatch, model, tokenizer, law, ScaleWiseSampler(ramp=ramp))
    want = product_law(tokenizer, [model] * 2, [law] * 2, ramp)
    assert want.sum().item() == pytest.approx(1, abs=1e-12)
    assert total_variation(found, want) < 1e-10
    assert result.trace.lossless and result.trace.identical


@pytest.mark.parametrize("num_draft_scales", [1, 2])
@pytest.mark.parametrize("name", ["plain", "guidance"])
def test_collaborative_decoding_is_the_large_law_first_and_the_small_law_then(
    monkeypatch, name, num_draft_scales
):
    tokenizer, [large, small] = parts("2 ** 9", 2)
    law = LAWS[name]
    stages = code_stages(large, small, num_draft_scales)
    found, result = enumerate_law(monkeypatch, stages, tokenizer, law)
    models = [large] * num_draft_scales + [small] * (3 - num_draft_scales)
    assert total_variation(found, product_law(tokenizer, models, [law] * 3)) < 1e-10
    assert total_variation(found, product_law(tokenizer, [large] * 3, [law] * 3)) > 0.1
    assert not result.trace.lossless and not result.trace.identical


def test_three_models_with_laws_of_their_own(monkeypatch):
    tokenizer, models = parts("2 ** 9", 3)
    laws = [
        TokenLaw(temperature=0.8),
        TokenLaw(guidance_scale=2.0),
        TokenLaw(guidance_scale=4.0, temperature=1.2),
    ]
    stages = [Stage(model, range(k, k + 1), laws[k]) for k, model in enumerate(models)]
    found, _ = enumerate_law(monkeypatch, stages, tokenizer, TokenLaw(temperature=0.0))
    assert total_variation(found, product_law(tokenizer, models, laws)) < 1e-10


def test_a_model_that_comes_back_starts_from_all_maps(monkeypatch):
    tokenizer, [large, small] = parts("2 ** 9", 2)
    stages = [Stage(large, range(1)), Stage(small, range(1, 2)), Stage(large, range(2, 3))]
    found, _ = enumerate_law(monkeypatch, stages, tokenizer, PLAIN)
    assert total_variation(found, product_law(tokenizer, [large, small, large], [PLAIN] * 3)) < 1e-10


def test_a_late_temperature_leaves_the_filtered_set_alone(monkeypatch):
    tokenizer, [model] = parts("3 ** 5")
    law = TokenLaw(top_k=2)
    stages = [Stage(model, range(1), law, 1.7), Stage(model, range(1, 2), law)]
    found, _ = enumerate_law(monkeypatch, stages, tokenizer, law)
    sequences = every_sequence(tokenizer)
    none, maps = known_maps(tokenizer, sequences)
    table = torch.zeros(len(sequences), dtype=torch.long)
    kept = law(model.logits(table, none), False)[:, 0].exp() ** (1 / 1.7)
    want = (kept / kept.sum(1, keepdim=True)).gather(1, sequences[:, :1])[:, 0]
    rest = law(model.logits(table, maps), False).exp()
    for place in range(4):
        want = want * rest[:, place].gather(1, sequences[:, 1 + place, None])[:, 0]
    assert total_variation(found, want) < 1e-10


@pytest.mark.parametrize("name", ["plain", "guidance"])
def test_the_measured_divergence_is_the_distance_of_the_laws(monkeypatch, name):
    """In expectation over the sampler's own law; and it bounds the distance between whole pictures."""
    tokenizer, [large, small] = parts("2 ** 9", 2)
    law = LAWS[name]
    weight, result = enumerate_law(
        monkeypatch, code_stages(large, small, 1), tokenizer, law, ScaleWiseSampler(measure=True)
    )
    assert result.trace.moved_mass is not None and result.trace.divergence is not None
    measured = float((weight * result.trace.moved_mass).sum())
    want = 0.0
    sequences = every_sequence(tokenizer)
    for k, maps in list(enumerate(known_maps(tokenizer, sequences)))[1:]:
        scaled = TokenLaw(guidance_scale=1 + (law.guidance_scale - 1) * k / 2)
        tables = torch.arange(2 if scaled.guided else 1).repeat_interleave(len(sequences))
        first, second = (scaled(model.logits(tables, maps), scaled.guided).exp() for model in (large, small))
        want += float(weight @ (first - second).abs().sum((1, 2))) / 2
    assert measured == pytest.approx(want, abs=1e-10)
    assert result.trace.divergence == pytest.approx(float(result.trace.moved_mass.mean()) / 8, abs=1e-12)
    joint = product_law(tokenizer, [large] * 3, [law] * 3)
    assert total_variation(weight, joint) <= measured
    same = enumerate_law(monkeypatch, code_stages(large, small, 1), tokenizer, law)[0]
    assert torch.equal(same, weight)  # measuring changes nothing


def test_the_real_noise_gives_the_law(monkeypatch):
    """Chi-square over 3 ** 5 pictures."""
    rows = 20_000
    monkeypatch.setattr(
        scales_module,
        "draw_keys",
        lambda generator, batch_size: torch.randint(-(2**63), 2**63 - 1, (batch_size,), generator=generator),
    )
    tokenizer, [large, small] = parts("3 ** 5", 2)
    law = LAWS["guidance"]
    result = ScaleWiseSampler()(
        code_stages(large, small, 1),
        tokenizer,
        None,
        law=law,
        batch_size=rows,
        generator=torch.Generator().manual_seed(0),
    )
    counts = torch.bincount(result.tokens @ 3 ** torch.arange(4, -1, -1), minlength=3**5)
    expected = rows * product_law(tokenizer, [large, small], [law] * 2)
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    statistic = ((observed - expected) ** 2 / expected).sum()
    p = torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2.0, dtype=torch.float64), statistic / 2)
    assert p > 1e-4


# -- planted mistakes ------------------------------------------------------------------------------------------------


def distance(monkeypatch, owner: object, name: str, value: object, law: TokenLaw = PLAIN) -> float:
    """Between the law that should be and the sampler's, with something planted in it."""
    tokenizer, [large, small] = parts("2 ** 9", 2)
    want = product_law(tokenizer, [large, small, small], [law] * 3)
    monkeypatch.setattr(owner, name, value)
    found, _ = enumerate_law(monkeypatch, code_stages(large, small, 1), tokenizer, law)
    assert found.sum().item() == pytest.approx(1, abs=1e-10)
    return total_variation(found, want)


def test_catches_a_small_model_that_is_told_of_another_picture(monkeypatch):
    real = TableScaleModel.prefill

    def forgetful(self, condition, *, maps=(), **rest):
        return real(self, condition, maps=[torch.zeros_like(map) for map in maps], **rest)

    assert distance(monkeypatch, TableScaleModel, "prefill", forgetful) > 1e-2


def test_catches_guidance_that_does_not_ramp(monkeypatch):
    assert (
        distance(monkeypatch, scales_module, "law_at_scale", lambda law, ratio: law, LAWS["guidance"]) > 1e-2
    )


def test_catches_a_scale_that_is_missing_from_the_canvas(monkeypatch):
    real = FormulaTokenizer.accumulate

    def without(self, canvas, scale, tokens):
        return canvas if scale == 1 else real(self, canvas, scale, tokens)

    assert distance(monkeypatch, FormulaTokenizer, "accumulate", without) > 1e-2


def test_catches_rows_in_the_wrong_order(monkeypatch):
    """Guidance towards the null class."""
    real = TableScaleModel.logits

    def swapped(self, tables, maps):
        both = len(tables.unique()) > 1
        return real(self, tables.roll(len(tables) // 2) if both else tables, maps)

    assert distance(monkeypatch, TableScaleModel, "logits", swapped, LAWS["guidance"]) > 1e-2
