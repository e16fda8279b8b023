"""ScaleImagePipeline on tiny real networks: what is drawn is what the sampler draws; saving; bad input."""

import functools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from tests.helpers.tiny_scales import TINY_VQ, tiny_var, tiny_var_vq
from visual_spec.models.next_scale.scale_budget import ScaleBudget
from visual_spec.models.next_scale.scale_cache import CompressedVAR, calibrate
from visual_spec.pipelines import scale_image
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.scale_image import ScaleImagePipeline
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.stages import CODE_LAW, Stage, code_stages

SIDES = (1, 2, 3, 4)
NAMES = ["cat, tabby", "dog", "crane", "crane, machine", "bee"]
TIGHT = ScaleBudget(SIDES, ((0, 0), (1, 1), (4, 4), (9, 9)))


def var(seed: int = 0, **changes: Any):
    return tiny_var(seed, torch.float32, **changes)


def make(**parts: Any) -> Any:
    usual = {"transformer": var(), "vq_model": tiny_var_vq(), "sampler": ScaleWiseSampler()}
    return quiet(ScaleImagePipeline(**usual | parts))


def make_pair(**parts: Any) -> Any:
    return make(refiner=var(7, num_layers=1), **parts)


@pytest.fixture
def pipe() -> Any:
    return make(id2label=NAMES)


def straight(model: Any, labels: list[int], seeds: list[int], **law: Any):
    settings = TokenLaw(**{"guidance_scale": 2.5, "top_k": 900, "top_p": 0.96, **law})
    return ScaleWiseSampler()(
        model,
        torch.tensor(labels),
        tokenizer=tiny_var_vq(),
        law=settings,
        generator=seeded(*seeds),
        batch_size=len(labels),
    )


# -- drawing --


def test_pictures_are_those_of_the_straight_path(pipe):
    want = straight(pipe.transformer, [3, 1], [7, 8])
    pixels = tiny_var_vq().decode_canvas(want.canvas)

    def draw(kind: str) -> Any:
        output = pipe([3, 1], generator=seeded(7, 8), output_type=kind)
        assert output.tokens.equal(want.tokens)
        return output.images

    pil, np_, pt, latent = map(draw, ("pil", "np", "pt", "latent"))
    assert pt.equal((pixels / 2 + 0.5).clamp(0, 1)) and pt.shape == (2, 3, 8, 8)
    np.testing.assert_allclose(np_, pt.permute(0, 2, 3, 1).numpy())
    assert isinstance(pil[0], PIL.Image.Image) and pil[0].size == (8, 8) == pipe.image_size
    np.testing.assert_array_equal(np.asarray(pil[1]), (np_[1] * 255).round().astype(np.uint8))
    assert latent.equal(want.canvas) and latent.shape == (2, 2, 4, 4)
    images, tokens, trace = pipe(
        [3, 1], generator=seeded(7, 8), return_dict=False, guidance_scale=1.0, top_k=3, top_p=1, temperature=0.5
    )  # fmt: skip
    law = dict(guidance_scale=1.0, top_k=3, top_p=1, temperature=0.5)
    assert tokens.equal(straight(pipe.transformer, [3, 1], [7, 8], **law).tokens)
    assert len(images) == 2 and trace is pipe.last_trace and trace.model_calls == (4,)


def test_labels_by_name_and_number(pipe):
    assert pipe.label_ids(["tabby", "crane", "machine", 4, "1"]) == [0, 2, 3, 4, 1]
    arrays = [
        torch.tensor([2, 0]),
        np.array([2, 0]),
        np.array(["crane", "0"]),
        [torch.tensor(2), np.int64(0)],
    ]
    arrays += [torch.tensor([2, 0], dtype=torch.uint8), (np.str_("2"), np.uint8(0))]
    assert [pipe.label_ids(array) for array in arrays] == [[2, 0]] * len(arrays)
    assert (
        pipe.label_ids(torch.tensor(2)) == pipe.label_ids(np.array("2")) == pipe.label_ids(np.int32(2)) == [2]
    )
    assert pipe.label_ids(range(3)) == [0, 1, 2]
    assert pipe(range(2), height=8, width=8, generator=seeded(1, 2)).tokens.shape == (2, 30)


# -- two models, compressed caches --


@pytest.mark.parametrize("split", [1, 2, 3])
def test_collaboration_draws_what_the_sampler_draws(split):
    pair = make_pair()
    want = straight(code_stages(pair.transformer, pair.refiner, split), [3, 1, 0], [7, 8, 9])
    output = pair([3, 1, 0], generator=seeded(7, 8, 9), num_draft_scales=split, output_type="latent")
    assert output.tokens.equal(want.tokens) and output.images.equal(want.canvas)
    assert output.trace.model_calls == (split, 4 - split)
    saved = make_pair(num_draft_scales=split)
    assert saved([3, 1, 0], generator=seeded(7, 8, 9)).tokens.equal(want.tokens)
    alone = pair([3, 1, 0], generator=seeded(7, 8, 9), num_draft_scales=4)
    assert alone.tokens.equal(straight(pair.transformer, [3, 1, 0], [7, 8, 9]).tokens)
    assert [stage.scales for stage in pair.stages()] == [range(2), range(2, 4)]


def test_a_refiner_may_draw_without_the_guidance_of_the_others(tmp_path):
    pair = make_pair(refiner_guidance_scale=1.0)
    for guidance, split in [(2.5, 2), (4.0, 3)]:
        law = pair.make_law(guidance_scale=guidance)
        stages = code_stages(
            pair.transformer, pair.refiner, split, small_law=replace(law, guidance_scale=1.0)
        )
        want = ScaleWiseSampler()(
            stages,
            torch.tensor([3, 1]),
            tokenizer=pair.vq_model,
            law=law,
            generator=seeded(7, 8),
            batch_size=2,
        )
        given = dict(guidance_scale=guidance, num_draft_scales=split)
        assert pair([3, 1], generator=seeded(7, 8), **given).tokens.equal(want.tokens)
        guided = make_pair()([3, 1], generator=seeded(7, 8), **given)
        assert not guided.tokens.equal(want.tokens)
        # Half of the rows, so half of the cache: of the refiner only.
        (first, second), (other, double) = want.trace.cache_bytes, guided.trace.cache_bytes
        assert first == other and 2 * second == double
    pair.save_pretrained(tmp_path / "saved")
    saved = quiet(ScaleImagePipeline.from_pretrained(tmp_path / "saved", torch_dtype=torch.float32))
    assert saved(3, generator=seeded(1)).tokens.equal(pair(3, generator=seeded(1)).tokens)
    refuses(ValueError, "guidance_scale=nan", make_pair, refiner_guidance_scale=float("nan"))


@pytest.mark.parametrize(("warm", "split"), [(0, 2), (1, 2), (2, 2), (3, 2), (7, 2), (3, 4)])
def test_the_first_scales_may_be_warmer(warm, split, tmp_path):
    pair = make_pair(warm_temperature=1.3, num_warm_scales=warm, num_draft_scales=split)
    models = [pair.transformer] * split + [pair.refiner] * (4 - split)
    stages = [
        Stage(model, range(scale, scale + 1), late_temperature=1.3 if scale < warm else 1.0)
        for scale, model in enumerate(models)
    ]
    want = straight(stages, [3, 1, 0], [7, 8, 9]).tokens
    assert pair([3, 1, 0], generator=seeded(7, 8, 9)).tokens.equal(want)
    cold = make_pair(num_draft_scales=split)([3, 1, 0], generator=seeded(7, 8, 9)).tokens
    assert warm == 1 or cold.equal(want) == (warm == 0)  # the one token of the first scale may be the same
    pair.save_pretrained(tmp_path)
    saved = ScaleImagePipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    assert saved([3, 1, 0], generator=seeded(7, 8, 9)).tokens.equal(want)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(warm_temperature=0.0), r"warm_temperature=0\.0.*0"),
        (dict(warm_temperature=float("nan")), "warm_temperature=nan"),
        (dict(num_warm_scales=-1), "num_warm_scales=-1.*0"),
    ],
)
def test_warm_scales_that_make_no_sense_are_refused(setting, message):
    refuses(ValueError, message, make_pair, **setting)


def test_scales_that_a_refiner_never_learned_are_refused(tmp_path):
    pair = make_pair(refiner_first_scale=3)
    assert [stage.scales for stage in pair.stages()] == [range(3), range(3, 4)]
    assert pair([3, 1], num_draft_scales=3).trace.model_calls == (3, 1)
    assert pair([3, 1], num_draft_scales=4).trace.model_calls == (4,)
    for split in (1, 2):
        message = f"num_draft_scales={split}, but this refiner learned the scales from 3 on"
        refuses(ValueError, f"{message}.*3 to 4", pair, [3, 1], num_draft_scales=split)
    refuses(ValueError, "num_draft_scales=2.*3", make_pair, num_draft_scales=2, refiner_first_scale=3)
    for wrong in (0, 4, 2.0, True):
        refuses(ValueError, f"refiner_first_scale={wrong}.*1 to 3", make_pair, refiner_first_scale=wrong)
    pair.save_pretrained(tmp_path / "saved")
    assert ScaleImagePipeline.from_pretrained(tmp_path / "saved").config["refiner_first_scale"] == 3


def test_a_refiner_without_guidance_is_held_against_guided_laws():
    """The distance is to what the large model would have drawn from, not to its unguided laws."""
    pair = make_pair(refiner_guidance_scale=1.0, sampler=ScaleWiseSampler(measure=True))
    pair.refiner = tiny_var(0, torch.float32)  # the transformer's weights
    law = pair.make_law(guidance_scale=3.0)
    output = pair([3, 1], generator=seeded(7, 8), guidance_scale=3.0, num_draft_scales=3)
    model, labels = pair.transformer, torch.tensor([3, 1])
    canvas, maps = pair.vq_model.begin(2, torch.device("cpu"), torch.float32), []
    for scale, part in enumerate(output.tokens.split([1, 4, 9, 16], 1)[:3]):
        canvas = pair.vq_model.accumulate(canvas, scale, part)
        maps.append(pair.vq_model.next_map(canvas, scale + 1))
    plain = model.prefill(labels, batch_size=2, guided=True, maps=maps).logits
    conditional, null = plain.double().chunk(2)
    slots = torch.arange(14, 30).expand(2, -1)
    alone = replace(law, guidance_scale=1.0)(conditional, False, slots).exp()
    guided = law(torch.cat([conditional, null]), True, slots).exp()
    want = (alone - guided).abs().sum(-1).mean() / 2
    assert output.trace.divergence == pytest.approx(float(want), rel=1e-5) and want > 0.05


def test_compressed_caches_are_used_and_put_away():
    pair = make_pair()
    one = ScaleBudget(SIDES, ((0,), (1,), (4,), (9,)))
    plain = pair(3, generator=seeded(1), num_draft_scales=1)
    pair.compress(TIGHT, one)
    got = pair(3, generator=seeded(1), num_draft_scales=1)
    models = (CompressedVAR(pair.transformer, TIGHT), CompressedVAR(pair.refiner, one))
    assert got.tokens.equal(straight(code_stages(*models, 1), [3], [1]).tokens)
    assert got.trace.cache_bytes == (0, 2 * 2 * 16 * 4 * 9)
    assert plain.trace.cache_bytes == (0, 2 * 2 * 16 * 4 * 14)
    assert pair([3, 1], num_draft_scales=4).trace.lossless is False
    for split in (1, 2, 4):
        tokens = pair([3, 1], generator=seeded(1, 2), num_draft_scales=split).tokens
        pair.sampler = ScaleWiseSampler(measure=True)
        measured = pair([3, 1], generator=seeded(1, 2), num_draft_scales=split)
        assert measured.tokens.equal(tokens) and 0.001 < measured.trace.divergence < 1
        pair.sampler = ScaleWiseSampler()
    assert pair.compress().budget is None
    assert pair(3, generator=seeded(1), num_draft_scales=1).tokens.equal(plain.tokens)


def test_calibration_finds_budgets_for_both_models():
    pair = make_pair()
    budget, refiner_budget = pair.calibrate([0, 1, 2], 0.7, num_drafters=1, generator=seeded(1, 2, 3))
    assert pair.budget is None
    assert [sum(row) for row in budget.tokens] == [0, 2, 10, 19]
    assert [sum(row) for row in refiner_budget.tokens] == [0, 1, 5, 9]
    pair.compress(budget, refiner_budget)
    assert pair.budget == budget and pair.refiner_budget == refiner_budget
    assert pair([0, 1]).tokens.shape == (2, 30)
    assert make().calibrate(2, 0.7, top_k=3)[1] is None


def test_calibration_draws_the_first_scales_at_their_own_temperature():
    pair = make_pair(transformer=var(5, num_layers=6), warm_temperature=50.0, num_warm_scales=3)
    labels = list(range(5))

    def warm(model: Any, *args: Any, **settings: Any) -> Any:
        stages = [Stage(model, range(3), late_temperature=50.0), Stage(model, range(3, 4))]
        return ScaleWiseSampler()(stages, *args, **settings)

    want, cold = (
        calibrate(
            pair.transformer,
            pair.vq_model,
            torch.tensor(labels),
            sampler=sampler,
            law=pair.make_law(),
            share=0.7,
            batch_size=5,
            generator=seeded(*labels),
            num_drafters=3,
        )
        for sampler in (warm, ScaleWiseSampler())
    )
    assert want != cold  # the temperature decides which layers draft
    assert pair.calibrate(labels, 0.7, num_drafters=3, generator=seeded(*labels))[0] == want
    pair.sampler = ScaleWiseSampler(num_draft_scales="all", cache_share=0.7, num_drafters=3)
    assert pair.stages()[0].model.budget == want
    pair.register_to_config(warm_temperature=1.0)
    assert pair.stages()[0].model.budget == cold


# -- saving, loading --


def test_round_trip(tmp_path):
    pair = make_pair(
        id2label=NAMES, num_draft_scales=1, default_top_k=5, sampler=ScaleWiseSampler(ramp=False)
    )
    pair.compress(TIGHT)
    pair.save_pretrained(tmp_path / "pair")
    again: Any = load_pipeline(tmp_path / "pair")
    assert isinstance(again, ScaleImagePipeline) and again.budget == TIGHT and again.refiner_budget is None
    assert not again.sampler.config["ramp"] and again.config["id2label"] == NAMES
    assert again("dog", generator=seeded(1)).tokens.equal(pair("dog", generator=seeded(1)).tokens)
    index = json.loads((tmp_path / "pair" / "model_index.json").read_text())
    assert index["refiner"] == ["visual_spec.pipelines.components", "VARTransformer"]
    half = ScaleImagePipeline.from_pretrained(tmp_path / "pair", dtype=torch.bfloat16, refiner=None,
                                              sampler=ScaleWiseSampler())  # fmt: skip
    assert half.refiner is None and np.isfinite(half(0, output_type="np").images).all()


def test_a_refiner_that_came_later_is_saved(tmp_path):
    pipe = make()
    pipe.refiner = var(7, num_layers=1)
    pipe.save_pretrained(tmp_path)
    again: Any = ScaleImagePipeline.from_pretrained(tmp_path)
    assert again(0, generator=seeded(1)).trace.model_calls == (2, 2)
    assert again(0, generator=seeded(1)).tokens.equal(make_pair()(0, generator=seeded(1)).tokens)
    assert isinstance(ScaleImagePipeline.from_pipe(again), ScaleImagePipeline)


def test_official_files(tmp_path, monkeypatch):
    large, small, tokenizer = var(), var(7, num_layers=1), tiny_var_vq()
    for model, name in [(large, "large.pth"), (small, "small.pth"), (tokenizer, "vae.pth")]:
        weights = model.state_dict()
        if name != "vae.pth":  # the official files tell the scale of each slot
            levels = [torch.full((side * side,), level) for level, side in enumerate(SIDES)]
            weights["lvl_1L"] = torch.cat(levels)[None]
        torch.save(weights, tmp_path / name)
    load = functools.partial(scale_image.load_var_vq_checkpoint, **TINY_VQ)
    monkeypatch.setattr(scale_image, "load_var_vq_checkpoint", load)
    paths = [tmp_path / name for name in ("large.pth", "vae.pth", "small.pth")]
    one = ScaleImagePipeline.from_official(*paths[:2])
    assert one(0, generator=seeded(1)).tokens.equal(make()(0, generator=seeded(1)).tokens)
    two = ScaleImagePipeline.from_official(*paths[:2], refiner=paths[2], num_draft_scales=3)
    published = [
        Stage(two.transformer if k < 3 else two.refiner, range(k, k + 1), CODE_LAW, 1.1 if k < 7 else 1.0)
        for k in range(len(SIDES))
    ]
    assert two([3, 1, 0], generator=seeded(1, 2, 3)).tokens.equal(
        straight(published, [3, 1, 0], [1, 2, 3]).tokens
    )
    assert one.config["warm_temperature"] == 1
    assert (one.config["default_top_k"], two.config["default_top_k"]) == (900, 600)
    assert one.config["default_guidance_scale"] == two.config["default_guidance_scale"] == 2.5
    refuses(ValueError, "small.pth", ScaleImagePipeline.from_official, paths[0], paths[2])


# -- bad input --

BAD_INPUT = {
    "unknown name": (dict(labels="dgo"), ValueError, "'dgo'.*'dog'"),
    "class out of range": (dict(labels=[0, 5]), ValueError, "class 5.*0.*4"),
    "no labels": (dict(labels=[]), ValueError, "labels.*empty"),
    "label of another type": (dict(labels=[True]), TypeError, "label True"),
    "height": (dict(height=512), ValueError, "height=512, width=None.*8 x 8"),
    "no refiner": (dict(num_draft_scales=2), ValueError, r"pipe\.refiner"),
    "split": (dict(num_draft_scales=5), ValueError, "num_draft_scales=5.*0.*4"),
    "no split": (dict(num_draft_scales=0), ValueError, "num_draft_scales=0.*no refiner"),
    "a whole number": (dict(num_draft_scales=True), ValueError, "num_draft_scales=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused_before_compute(pipe, monkeypatch, name):
    arguments, error, message = BAD_INPUT[name]
    for entry in ("prefill", "forward"):
        monkeypatch.setattr(
            pipe.transformer, entry, lambda *_, **__: pytest.fail("computed before the check")
        )
    refuses(error, message, pipe, **{"labels": 0, **arguments})


def test_parts_that_do_not_fit_are_refused(pipe):
    refuses(ValueError, "13 codes.*12", make, transformer=var(vocab_size=13))
    refuses(ValueError, r"\(1, 2, 3, 5\)", make, refiner=var(scales=(1, 2, 3, 5)))
    refuses(ValueError, "4 classes.*5", make, refiner=var(num_classes=4))
    refuses(ValueError, "2.*5 classes", make, id2label=["a", "b"])
    refuses(ValueError, "num_draft_scales=2.*no refiner", make, num_draft_scales=2)
    refuses(ValueError, r"\(1, 2, 3, 4\)", make_pair, refiner_budget=TIGHT)
    refuses(ValueError, "refiner_budget", pipe.compress, None, TIGHT)
    refuses(ValueError, "scales, tokens", pipe.compress, {})
    refuses(TypeError, "Linear", make, transformer=torch.nn.Linear(2, 2))
