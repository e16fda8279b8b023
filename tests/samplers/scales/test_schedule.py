"""Schedules of a next-scale decode: what is left out, against decodes without caches, and what is refused."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness.regions import total_variation
from tests.helpers import scales as straight_scales
from tests.helpers.refusals import refuses
from tests.helpers.scale_laws import LAWS, enumerated, every_sequence, known_maps, parts, product_law
from tests.helpers.scales import (
    GUIDED,
    LABELS,
    SIDES,
    STARTS,
    TOKENIZER,
    chosen_places,
    decode,
    plain_loop,
    straight_logits,
)
from tests.helpers.tiny import seeded
from tests.helpers.tiny_infinity import captions, tiny_bits, tiny_infinity
from tests.helpers.tiny_scales import TableScaleModel, tiny_var, tiny_var_vq
from visual_spec.models.next_scale.scale_budget import ScaleBudget
from visual_spec.models.next_scale.scale_cache import CompressedVAR
from visual_spec.pipelines.sampler_text import make_sampler, parse_sampler, saved_sampler, write_sampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.schedule import SCHEDULES, ScaleSchedule
from visual_spec.samplers.scales.stages import Stage, code_stages

ROWS = torch.arange(3)
WHOLE = (1, 4, 9, 16)
LAYERS = 2


def unguided(law: TokenLaw) -> TokenLaw:
    return TokenLaw(1.0, law.temperature, law.top_k, law.top_p)


def straight_decode(
    model: Any,
    condition: Any,
    tokenizer: Any,
    law: TokenLaw,
    *,
    stop: int,
    guided_until: int = 4,
    kept: tuple[int, ...] = WHOLE,
    layers: Any = (),
    ramp: bool = True,
) -> tuple[Tensor, list[Tensor], list[float]]:
    """Tokens, canvases and divergences of each scale of a decode that computes everything again for every scale."""
    noise = CounterNoise(draw_keys(seeded(*(100 + row for row in range(3))), 3), "cpu")
    bits = getattr(tokenizer, "tokens_per_place", 1)
    canvas = torch.zeros(3, tokenizer.begin(1, torch.device("cpu"), torch.float64).shape[1], 4, 4).double()
    maps: list[Tensor] = []
    tokens, canvases, moved = [], [], []

    def law_of(kept: Any, guided: bool) -> Tensor:
        logits = straight_logits(model, maps, condition, kept, layers)
        ratio = len(maps) / 3 if ramp else 1
        if guided:
            null = straight_logits(model, maps, condition, kept, layers, null=True)
            logits = logits + (law.guidance_scale - 1) * ratio * (logits - null)
        return unguided(law)(logits, False)

    for scale in range(stop + 1):
        log_probs = law_of(kept, scale < guided_until)
        first = STARTS[scale] * bits
        slots = torch.arange(first, first + log_probs.shape[1]).expand(3, -1)
        tokens.append(noise.categorical(log_probs, slots, TOKEN))
        moved.append(float((log_probs.exp() - law_of(WHOLE, True).exp()).abs().sum() / 2))
        canvas = tokenizer.accumulate(canvas, scale, tokens[-1])
        canvases.append(canvas)
        if scale < 3:
            maps.append(tokenizer.next_map(canvas, scale + 1))
    return torch.cat(tokens, 1), canvases, moved


# -- each part, and all together -------------------------------------------------------------------------------------

PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stop": ({"stop_after": 1}, {"stop": 1}),
    "guidance": ({"guided_until": 2}, {"stop": 3, "guided_until": 2}),
    "never guided": ({"guided_until": 0}, {"stop": 3, "guided_until": 0}),
    "places": ({"keep_share": [0.5, 0.3]}, {"stop": 3, "kept": (1, 4, 5, 5), "layers": range(2)}),
    "all": (
        {"stop_after": -2, "guided_until": -2, "keep_share": 0.5, "pruned_layers": [0.5, 1.0]},
        {"stop": 2, "guided_until": 2, "kept": (1, 4, 5), "layers": [1]},
    ),
    "all to the end": (
        {"guided_until": 3, "keep_share": [0.4, 1, 0.7], "pruned_layers": [0, 0.5]},
        {"stop": 3, "guided_until": 3, "kept": (1, 2, 9, 12), "layers": [0]},
    ),
}


def uneven_bits() -> Any:
    """Infinity's tokenizer, with maps in which no two places are equal.

    Places of equal bits are equal up to the first attention, which alone knows positions. Their scores tie, and which
    of them is left out depends on the rounding of a processor.
    """
    tokenizer: Any = tiny_bits()
    plain, generator = tokenizer.next_map, torch.Generator().manual_seed(4)
    small = [0.2 * torch.randn(n, n, generator=generator, dtype=torch.float64) for n in SIDES]
    tokenizer.next_map = lambda canvas, scale: plain(canvas, scale) + small[scale]
    return tokenizer


def watch_gaps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collects how far the last place kept is from the first one left out, relative to the farthest."""
    gaps: list[float] = []

    def watched(x: Tensor, count: int) -> list[int]:
        scores = (x - x.mean(0)).square().sum(-1).sort(descending=True).values
        gaps.append(float((scores[count - 1] - scores[count]) / scores[0]))
        return chosen_places(x, count)

    monkeypatch.setattr(straight_scales, "chosen_places", watched)
    return gaps


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kind", ["var", "infinity"])
def test_draws_what_a_decode_from_scratch_draws(kind, name, monkeypatch):
    schedule, want = PARTS[name]
    model, tokenizer, condition, law = tiny_var(), TOKENIZER, LABELS[ROWS], GUIDED
    if kind == "infinity":
        model, tokenizer, condition = tiny_infinity(), uneven_bits(), captions()
        law = TokenLaw(guidance_scale=3.0, temperature=0.8, top_p=0.97)
    ramp = kind == "var"
    gaps = watch_gaps(monkeypatch)
    tokens, canvases, moved = straight_decode(model, condition, tokenizer, law, ramp=ramp, **want)
    assert min(gaps, default=1.0) > 1e-6  # else rounding chooses the places, and both are right
    sampler = ScaleWiseSampler(ramp=ramp, schedule=schedule, measure=True)
    request: dict[str, Any] = dict(law=law, generator=seeded(100, 101, 102), batch_size=3)
    result = sampler(model, condition, tokenizer=tokenizer, **request)
    assert torch.equal(result.tokens, tokens)
    assert (result.canvas - canvases[-1]).abs().max() < 1e-10
    trace = result.trace
    assert not (trace.lossless or trace.identical or sampler.lossless or sampler.identical)
    assert trace.target_calls.tolist() == [want["stop"] + 1] * 3 == [trace.model_calls[0]] * 3
    assert trace.commit_call.shape == tokens.shape
    # The divergence is the distance to the guided law of whole maps, from the first scale on that is changed.
    changed = [scale for scale, kept in enumerate(want.get("kept", WHOLE)) if kept < WHOLE[scale]]
    first = min([want.get("guided_until", 4), *changed])
    if first > want["stop"]:
        assert trace.divergence is None and "lossy" in trace.summary()
    else:
        slots = (STARTS[want["stop"] + 1] - STARTS[first]) * getattr(tokenizer, "tokens_per_place", 1)
        assert trace.divergence == pytest.approx(sum(moved[first:]) / 3 / slots, abs=1e-10)
        assert (trace.divergence or 0) > 1e-3 and all(part < 1e-10 for part in moved[:first])
    quiet = ScaleWiseSampler(ramp=ramp, schedule=schedule)
    assert torch.equal(
        quiet(
            model, condition, tokenizer=tokenizer, **{**request, "generator": seeded(100, 101, 102)}
        ).tokens,
        tokens,
    )


def test_stopping_is_the_beginning_of_plain_decoding():
    """The control: what the callback of plain decoding sees after that scale, decoded as it stands."""
    model, tokenizer, seen = tiny_var(), tiny_var_vq().double(), []
    request: dict[str, Any] = dict(law=GUIDED, batch_size=3)
    plain = ScaleWiseSampler()(
        model,
        LABELS[:3],
        tokenizer=tokenizer,
        generator=seeded(1, 2, 3),
        callback=lambda scale, canvas: seen.append(canvas),
        **request,
    )
    for stop in range(4):
        sampler = ScaleWiseSampler(schedule={"stop_after": stop})
        result = sampler(model, LABELS[:3], tokenizer=tokenizer, generator=seeded(1, 2, 3), **request)
        assert torch.equal(result.tokens, plain.tokens[:, : STARTS[stop + 1]])
        assert torch.equal(result.canvas, seen[stop])
        assert result.trace.lossless == (stop == 3) and not result.trace.stopped


def test_the_last_scale_that_is_drawn_is_not_cached():
    slot = 2 * 16 * 8 * 6 * LAYERS  # keys and values, width, bytes, rows, layers
    for stop, places in ((3, 14), (2, 5), (1, 1), (0, 0)):
        trace = decode(tiny_var(), ROWS, schedule={"stop_after": stop}).trace
        assert trace.cache_bytes == (slot * places,)


EMPTY = [
    {"stop_after": 3, "guided_until": 4, "keep_share": [1, 1.0, 1, 1]},
    {"stop_after": -1},
    {"keep_share": [], "pruned_layers": [0.2, 0.7]},
    {},
]


@pytest.mark.parametrize("schedule", EMPTY)
@pytest.mark.parametrize("smooth", [False, True])
def test_a_schedule_that_leaves_nothing_out_changes_no_bit(schedule, smooth):
    for model in (tiny_var(), code_stages(tiny_var(), tiny_var(7, num_layers=1), 2)):
        for measure in (False, True):
            plain = decode(model, ROWS, smooth=smooth, measure=measure)
            result = decode(model, ROWS, smooth=smooth, measure=measure, schedule=schedule)
            assert torch.equal(result.tokens, plain.tokens) and torch.equal(result.canvas, plain.canvas)
            assert (result.trace.lossless, result.trace.identical) == (
                plain.trace.lossless,
                plain.trace.identical,
            )
            assert result.trace.divergence == plain.trace.divergence
            assert result.trace.layer_places == plain.trace.layer_places


@pytest.mark.parametrize(
    ("schedule", "split", "want"),
    [
        (None, None, (4 * 30,)),
        ({"stop_after": 2}, None, (4 * 14,)),
        ({"guided_until": 2}, None, (4 * 5 + 2 * 25,)),
        ({"keep_share": [0.5, 0.3]}, None, (4 * (5 + 5 + 5),)),
        ({"keep_share": [0.5, 0.3], "pruned_layers": [0.5, 1]}, None, (2 * 30 + 2 * 15,)),
        ({"guided_until": 3}, 2, (4 * 5, 2 * 14 + 16)),
        ({"guided_until": 2}, 2, (4 * 5, 14 + 16)),
        ({"stop_after": 1}, 2, (4 * 5,)),
    ],
)
def test_the_places_that_went_through_layers_are_counted(schedule, split, want):
    models = [tiny_var(), tiny_var(7, num_layers=1)]
    seen: list[int] = []
    for model in models:
        blocks: Any = model.blocks
        for block in blocks:
            block.ffn.register_forward_hook(
                lambda module, inputs, output: seen.append(inputs[0][..., 0].numel())
            )
    model = models[0] if split is None else code_stages(models[0], models[1], split)
    trace = decode(model, ROWS, schedule=schedule).trace
    assert trace.layer_places == want and 3 * sum(want) == sum(seen)


def test_two_models_and_compressed_caches_go_on_without_the_unconditional_rows():
    large, small = tiny_var(), tiny_var(7, num_layers=1)
    for split in (1, 2, 3):
        laws = [GUIDED if scale < 2 else unguided(GUIDED) for scale in range(4)]
        models = [large] * split + [small] * (4 - split)
        result = decode(code_stages(large, small, split), ROWS, schedule={"guided_until": 2})
        assert torch.equal(result.tokens, plain_loop(models, laws, ROWS, TOKENIZER))
    tight = CompressedVAR(large, ScaleBudget(SIDES, ((0, 0), (1, 1), (4, 5), (9, 11))))
    # With these laws the rows stay to the end.
    stages = [Stage(tight, range(2), GUIDED), Stage(tight, range(2, 4), unguided(GUIDED))]
    result = decode(tight, ROWS, schedule={"guided_until": 2})
    assert torch.equal(result.tokens, decode(stages, ROWS).tokens)
    assert result.trace.layer_places == (4 * 5 + 2 * 25,)


@pytest.mark.parametrize("name", ["guidance", "all"])
def test_the_law_without_late_guidance_by_enumeration(name):
    tokenizer, [model] = parts("2 ** 9")
    law = LAWS[name]
    found = enumerated(model, tokenizer, law, ScaleWiseSampler(measure=True, schedule={"guided_until": 2}))
    laws = [law, law, unguided(law)]
    assert total_variation(found.law, product_law(tokenizer, [model] * 3, laws)) < 1e-10
    plain = product_law(tokenizer, [model] * 3, [law] * 3)
    assert 1e-3 < total_variation(found.law, plain) <= found.moved
    # The measure is the expected distance of the laws of the last scale.
    maps = known_maps(tokenizer, every_sequence(tokenizer))[2]
    rows = torch.arange(2).repeat_interleave(len(maps[0]))
    logits = model.logits(rows, maps)
    two = [law(logits, True).exp(), unguided(law)(logits[: len(maps[0])], False).exp()]
    want = float(found.law @ (two[0] - two[1]).abs().sum((1, 2))) / 2
    assert found.moved == pytest.approx(want, abs=1e-10)


# -- the record ------------------------------------------------------------------------------------------------------


def test_presets_are_plain_data_and_fit_the_published_model():
    assert json.loads(json.dumps(SCHEDULES)) == SCHEDULES
    plans = {name: ScaleSchedule.of(name).at(13) for name in SCHEDULES}
    assert [plans[name].stop_after for name in ("just-stop", "skipvar", "fastvar", "stagevar")] == [
        10,
        9,
        10,
        12,
    ]
    assert plans["stagevar"].guided_until == 10 and plans["skipvar"].guided_until == 13
    assert plans["fastvar"].keep_share == (1.0,) * 9 + (0.6, 0.5)
    pruning = plans["fastvar"].pruning
    assert pruning is not None
    sides = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
    assert pruning.sources(sides) == {9: 8, 10: 8}  # both are restored from the map of side 24
    kept = pruning.kept(sides)
    assert (kept[9], kept[10]) == (1024 - int(1024 * 0.4), 1600 - int(1600 * 0.5))
    assert [plan.prunes for plan in plans.values()] == [False, False, False, True]


def test_the_record_as_a_setting_and_as_text(tmp_path):
    schedule = {"stop_after": 2, "guided_until": -3, "keep_share": [0.5, 0.25], "pruned_layers": [0.1, 0.9]}
    sampler = ScaleWiseSampler(schedule=schedule)
    sampler.save_pretrained(tmp_path)
    again: Any = ScaleWiseSampler.from_pretrained(tmp_path)
    assert again.schedule == sampler.schedule == ScaleSchedule(2, -3, (0.5, 0.25), (0.1, 0.9))
    text = "scale-wise:stop_after=2,guided_until=-3,keep_share=0.5/0.25,pruned_layers=0.1/0.9"
    assert saved_sampler("scale-wise", sampler.config) == text
    assert parse_sampler(saved_sampler("scale-wise", again.config)) == parse_sampler(text)
    name, settings = parse_sampler(text)
    assert make_sampler(name, **settings).schedule == sampler.schedule
    name, settings = parse_sampler("scale-wise:schedule=fastvar,stop_after=2,ramp=false")
    mixed = make_sampler(name, **settings)
    assert (
        mixed.schedule == ScaleSchedule(2, None, (0.6, 0.5), (3 / 32, 28 / 32)) and not mixed.config["ramp"]
    )
    written = write_sampler(name, {"schedule": mixed.config["schedule"]})
    name, settings = parse_sampler(written)
    assert make_sampler(name, **settings).schedule == mixed.schedule
    assert make_sampler("scale-wise", schedule="just-stop").schedule == ScaleSchedule(-3)
    assert make_sampler("scale-wise", keep_share=0.5).schedule.keep_share == (0.5,)
    # Another word of the same name.
    assert make_sampler("masked", schedule="cosine").config["schedule"] == "cosine"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("slow", "schedule='slow'; pass"),
        (3, "schedule=3"),
        ({"stop": 3}, "'stop'.*stop_after, guided_until, keep_share"),
        ({"stop_after": 2.0}, "stop_after=2.0; pass"),
        ({"guided_until": True}, "guided_until=True; pass"),
        ({"keep_share": [0.5, 0]}, r"keep_share=\[0\.5, 0\].*0.*1"),
        ({"keep_share": "half"}, "keep_share='half'; pass"),
        ({"keep_share": 1.5}, "keep_share=1.5; pass"),
        ({"pruned_layers": [0.5, 0.5]}, r"pruned_layers=\[0\.5, 0\.5\]"),
        ({"pruned_layers": 3}, "pruned_layers=3; pass"),
        ({"pruned_layers": [0, 1, 2]}, r"pruned_layers=\[0, 1, 2\]"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_where_they_are_given(schedule, message):
    refuses(ValueError, message, ScaleWiseSampler, schedule=schedule)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"stop_after": 4}, "stop_after=4; pass"),
        ({"stop_after": -5}, "stop_after=-5; pass"),
        ({"guided_until": 5}, "guided_until=5; pass"),
        ({"guided_until": -5}, "guided_until=-5; pass"),
        ({"stop_after": 1, "keep_share": [1, 1, 0.5]}, "keep_share.*3.*2"),
        ({"keep_share": [0.5, 1, 1, 1]}, r"keep_share=0\.5.*0"),
        ({"keep_share": 0.5, "pruned_layers": [0.6, 0.9]}, "2 layers"),
    ],
)  # fmt: skip
def test_schedules_that_do_not_fit_are_refused_before_compute(monkeypatch, schedule, message):
    model = tiny_var()
    monkeypatch.setattr(type(model), "prefill", None)
    refuses(ValueError, message, decode, model, ROWS, schedule=schedule)


def test_models_that_cannot_be_pruned_are_refused_before_compute():
    half = {"keep_share": 0.5}
    tables = TableScaleModel(SIDES, 12)
    with pytest.raises(ValueError, match="TableScaleModel.*keep_share"):
        ScaleWiseSampler(schedule=half)(tables, None, tokenizer=TOKENIZER, law=GUIDED)
    assert tables.prefills == 0
    compressed = CompressedVAR(tiny_var(), ScaleBudget.full(SIDES, 2))
    refuses(ValueError, "CompressedVAR", decode, compressed, ROWS, schedule=half)
    pair = code_stages(tiny_var(), tiny_var(7, num_layers=1), 3)
    refuses(ValueError, r"keep_share=0\.5.*3", decode, pair, ROWS, schedule=half)
    # What the first model prunes, the second one reads as input maps only.
    result = decode(pair, ROWS, schedule={"keep_share": [0.5, 1]})
    assert result.trace.layer_places == (4 * (1 + 4 + 5), 2 * 30)
