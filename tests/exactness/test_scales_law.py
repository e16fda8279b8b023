"""The exact law of whole pictures of the next-scale sampler, by enumeration of its real steps."""

import pytest
import torch

from tests.exactness.enumeration import PLAIN
from tests.exactness.regions import total_variation
from tests.helpers.scale_laws import LAWS, enumerated, every_sequence, known_maps, parts, product_law
from tests.helpers.statistics import LEAST_P, p_value
from tests.helpers.tiny_scales import FormulaTokenizer, TableScaleModel
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales import stages as stages_module
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.stages import Stage, code_stages
from visual_spec.samplers.scales.trace import ScaleTrace


def trace_of(model: TableScaleModel | list[Stage], tokenizer: FormulaTokenizer, **options) -> ScaleTrace:
    trace = ScaleWiseSampler(**options)(model, None, tokenizer=tokenizer, law=PLAIN, batch_size=2).trace
    assert isinstance(trace, ScaleTrace)
    return trace


@pytest.mark.parametrize("ramp", [True, False])
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_one_model_follows_its_own_law(law, ramp):
    tokenizer, [model] = parts("3 ** 5")
    found = enumerated(model, tokenizer, law, ScaleWiseSampler(ramp=ramp))
    want = product_law(tokenizer, [model] * 2, [law] * 2, ramp)
    assert want.sum().item() == pytest.approx(1, abs=1e-12)
    assert total_variation(found.law, want) < 1e-10
    trace = trace_of(model, tokenizer, ramp=ramp)
    assert trace.lossless and trace.identical


@pytest.mark.parametrize("num_draft_scales", [1, 2])
@pytest.mark.parametrize("name", ["plain", "guidance"])
def test_collaborative_decoding_is_the_large_law_first_and_the_small_law_then(name, num_draft_scales):
    tokenizer, [large, small] = parts("2 ** 9", 2)
    law = LAWS[name]
    stages = code_stages(large, small, num_draft_scales)
    found = enumerated(stages, tokenizer, law).law
    models = [large] * num_draft_scales + [small] * (3 - num_draft_scales)
    assert total_variation(found, product_law(tokenizer, models, [law] * 3)) < 1e-10
    assert total_variation(found, product_law(tokenizer, [large] * 3, [law] * 3)) > 0.1
    trace = trace_of(stages, tokenizer)
    assert not trace.lossless and not trace.identical


def test_three_models_with_laws_of_their_own():
    tokenizer, models = parts("2 ** 9", 3)
    laws = [
        TokenLaw(temperature=0.8),
        TokenLaw(guidance_scale=2.0),
        TokenLaw(guidance_scale=4.0, temperature=1.2),
    ]
    stages = [Stage(model, range(k, k + 1), laws[k]) for k, model in enumerate(models)]
    found = enumerated(stages, tokenizer, TokenLaw(temperature=0.0)).law
    assert total_variation(found, product_law(tokenizer, models, laws)) < 1e-10


def test_a_model_that_comes_back_starts_from_all_maps():
    tokenizer, [large, small] = parts("2 ** 9", 2)
    stages = [Stage(large, range(1)), Stage(small, range(1, 2)), Stage(large, range(2, 3))]
    found = enumerated(stages, tokenizer, PLAIN).law
    assert total_variation(found, product_law(tokenizer, [large, small, large], [PLAIN] * 3)) < 1e-10


def test_a_late_temperature_leaves_the_filtered_set_alone():
    tokenizer, [model] = parts("3 ** 5")
    law = TokenLaw(top_k=2)
    stages = [Stage(model, range(1), law, 1.7), Stage(model, range(1, 2), law)]
    found = enumerated(stages, tokenizer, law).law
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
def test_the_measured_divergence_is_the_distance_of_the_laws(name):
    """In expectation over the sampler's own law; and it bounds the distance between whole pictures."""
    tokenizer, [large, small] = parts("2 ** 9", 2)
    law = LAWS[name]
    stages = code_stages(large, small, 1)
    found = enumerated(stages, tokenizer, law, ScaleWiseSampler(measure=True))
    weight, measured = found.law, found.moved
    want = 0.0
    sequences = every_sequence(tokenizer)
    for k, maps in list(enumerate(known_maps(tokenizer, sequences)))[1:]:
        scaled = TokenLaw(guidance_scale=1 + (law.guidance_scale - 1) * k / 2)
        tables = torch.arange(2 if scaled.guided else 1).repeat_interleave(len(sequences))
        first, second = (scaled(model.logits(tables, maps), scaled.guided).exp() for model in (large, small))
        want += float(weight @ (first - second).abs().sum((1, 2))) / 2
    assert measured == pytest.approx(want, abs=1e-10)
    trace = trace_of(stages, tokenizer, measure=True)
    assert trace.moved_mass is not None
    assert trace.divergence == pytest.approx(float(trace.moved_mass.mean()) / 8, abs=1e-12)
    joint = product_law(tokenizer, [large] * 3, [law] * 3)
    assert total_variation(weight, joint) <= measured
    assert torch.equal(enumerated(stages, tokenizer, law).law, weight)  # measuring changes nothing


def test_the_real_noise_gives_the_law(keys_in_bulk):
    """Chi-square over 3 ** 5 pictures."""
    tokenizer, [large, small] = parts("3 ** 5", 2)
    law = LAWS["guidance"]
    result = ScaleWiseSampler()(
        code_stages(large, small, 1),
        None,
        tokenizer=tokenizer,
        law=law,
        batch_size=20_000,
        generator=torch.Generator().manual_seed(0),
    )
    counts = torch.bincount(result.tokens @ 3 ** torch.arange(4, -1, -1), minlength=3**5)
    assert p_value(counts, product_law(tokenizer, [large, small], [law] * 2)) > LEAST_P


# -- planted mistakes ------------------------------------------------------------------------------------------------


def distance(monkeypatch, owner: object, name: str, value: object, law: TokenLaw = PLAIN) -> float:
    """Between the law that should be and the sampler's, with something planted in it."""
    tokenizer, [large, small] = parts("2 ** 9", 2)
    want = product_law(tokenizer, [large, small, small], [law] * 3)
    monkeypatch.setattr(owner, name, value)
    found = enumerated(code_stages(large, small, 1), tokenizer, law).law
    assert found.sum().item() == pytest.approx(1, abs=1e-10)
    return total_variation(found, want)


def test_catches_a_small_model_that_is_told_of_another_picture(monkeypatch):
    real = TableScaleModel.prefill

    def forgetful(self, condition, *, maps=(), **rest):
        return real(self, condition, maps=[torch.zeros_like(map) for map in maps], **rest)

    assert distance(monkeypatch, TableScaleModel, "prefill", forgetful) > 1e-2


def test_catches_guidance_that_does_not_ramp(monkeypatch):
    assert (
        distance(monkeypatch, stages_module, "law_at_scale", lambda law, ratio: law, LAWS["guidance"]) > 1e-2
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
