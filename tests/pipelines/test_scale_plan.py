"""Who draws which scales, and with which cache: as words of the command line, on a pipeline and off again."""

import pytest
import torch

from tests.helpers.tiny_scales import SIDES, tiny_scale_pipeline, tiny_var
from tests.tiny import seeded, tiny_pipeline
from visual_spec.eval.defaults import scale_settings
from visual_spec.models.next_scale import scale_cache
from visual_spec.models.next_scale.scale_budget import ScaleBudget
from visual_spec.models.next_scale.scale_cache import CompressedVAR, calibrate
from visual_spec.pipelines import loading
from visual_spec.pipelines.accelerate import accelerate
from visual_spec.pipelines.sampler_text import make_sampler, parse_sampler
from visual_spec.pipelines.scale_plan import ScalePlan, make_row
from visual_spec.samplers.scales.scales import ScaleWiseSampler


@pytest.fixture
def pipe():
    return tiny_scale_pipeline()


def read(text: str):
    name, settings = parse_sampler(text)
    return make_row(name, **settings)


def drawn(pipe, plan: ScalePlan, **settings):
    with plan.on(pipe):
        return pipe([3, 1], generator=seeded(7, 8), output_type="latent", **settings)


def test_a_row_is_a_sampler_and_a_plan():
    sampler, plan = read("scale-wise:num_draft_scales=3,cache_share=0.7,measure=true,refiner=folder")
    assert isinstance(sampler, ScaleWiseSampler) and sampler.config["measure"]
    assert plan == ScalePlan(3, 0.7, "folder")
    assert plan.describe() == {"num_draft_scales": 3, "cache_share": 0.7, "refiner": "folder"}
    assert read("scale-wise:refiner=/some/folder")[1] == ScalePlan(refiner="/some/folder")
    with pytest.raises(ValueError, match="refiner=3; pass"):
        ScalePlan(refiner=3)  # pyright: ignore[reportArgumentType]
    assert read("scale-wise")[1] == ScalePlan() and ScalePlan().describe() == {}
    assert read("scale-wise:num_draft_scales=all,cache_share=off")[1] == ScalePlan("all", "off")
    assert read("speculative-jacobi:window=4")[1] == ScalePlan()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scale-wise:num_draft_scales=-1", "num_draft_scales=-1; pass"),
        ("scale-wise:num_draft_scales=half", "num_draft_scales='half'; pass"),
        ("scale-wise:num_draft_scales=true", "num_draft_scales=True; pass"),
        (
            "scale-wise:cache_share=0",
            "cache_share=0; pass",
        ),
        ("scale-wise:cache_share=1.5", "cache_share=1.5; pass"),
        ("scale-wise:cache_share=little", "cache_share='little'; pass"),
        (
            "scale-wise:window=3",
            "has no setting window; it takes cache_share; guided_until",
        ),
        ("columns:num_draft_scales=3", "has no setting num_draft_scales; it takes exact_width: "),
        ("autoregressive:num_draft_scales=3", "has no setting num_draft_scales; it takes exact_width: "),
    ],
)
def test_rows_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message):
        read(text)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_number_of_scales_is_that_of_the_call(pipe, split):
    want = pipe([3, 1], generator=seeded(7, 8), num_draft_scales=split)
    found = drawn(pipe, ScalePlan(split))
    assert found.tokens.equal(want.tokens) and found.trace.model_calls == (split, 4 - split)


def test_one_model_alone(pipe):
    alone = tiny_scale_pipeline(pair=False)
    want = alone([3, 1], generator=seeded(7, 8))
    assert drawn(pipe, ScalePlan("all")).tokens.equal(want.tokens)
    small = drawn(pipe, ScalePlan(0))
    alone.transformer = pipe.refiner
    assert small.tokens.equal(alone([3, 1], generator=seeded(7, 8)).tokens)
    assert small.trace.model_calls == (4,) and small.trace.lossless  # of its own law
    assert not ScalePlan(0).same_model and ScalePlan("all").same_model
    assert not small.tokens.equal(want.tokens)


def test_the_pipeline_is_as_it_was_afterwards(pipe, tmp_path):
    tiny_var(9, torch.float32, num_layers=1).save_pretrained(tmp_path / "other")
    before = drawn(pipe, ScalePlan())
    transformer, refiner = pipe.transformer, pipe.refiner
    for plan in (ScalePlan(0), ScalePlan("all", 0.7), ScalePlan(3, 0.7, str(tmp_path / "other"))):
        other = drawn(pipe, plan)
        assert not other.tokens.equal(before.tokens)
        assert pipe.transformer is transformer and pipe.refiner is refiner
        assert pipe.budget is None and pipe.refiner_budget is None and pipe.config["num_draft_scales"] is None
        assert drawn(pipe, ScalePlan()).tokens.equal(before.tokens)
    with pytest.raises(RuntimeError, match="stop"), ScalePlan(0, 0.7).on(pipe):
        raise RuntimeError("stop")
    assert pipe.transformer is transformer and pipe.budget is None
    pipe.save_pretrained(tmp_path / "saved")
    assert loading.read_index(tmp_path / "saved")["refiner"] == [
        "visual_spec.pipelines.components",
        "VARTransformer",
    ]


def test_another_refiner_by_its_folder(pipe, tmp_path):
    other = tiny_var(9, torch.float32, num_layers=1)
    other.save_pretrained(tmp_path / "other")
    found = drawn(pipe, ScalePlan(2, refiner=str(tmp_path / "other")))
    pipe.refiner = other
    assert found.tokens.equal(drawn(pipe, ScalePlan(2)).tokens)
    alone = tiny_scale_pipeline(pair=False)
    assert drawn(alone, ScalePlan(2, refiner=str(tmp_path / "other"))).tokens.equal(found.tokens)
    assert alone.refiner is None


def test_a_share_of_the_cache_is_calibrated_once(pipe, monkeypatch):
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs["share"])
        return calibrate(*args, **kwargs)

    monkeypatch.setattr(scale_cache, "calibrate", counted)
    found = drawn(pipe, ScalePlan(2, 0.7))
    assert calls == [0.7, 0.7] and drawn(pipe, ScalePlan(2, 0.7)).tokens.equal(found.tokens)
    assert calls == [0.7, 0.7]  # once a model
    labels = list(range(5))
    budgets = pipe.calibrate(labels, 0.7, generator=seeded(*labels))
    pipe.compress(*budgets)
    want = pipe([3, 1], generator=seeded(7, 8), num_draft_scales=2)
    assert found.tokens.equal(want.tokens) and found.trace.cache_bytes == want.trace.cache_bytes
    assert not found.trace.lossless


def test_a_refiner_of_some_scales_draws_no_others(pipe, tmp_path):
    tiny_var(3, torch.float32).save_pretrained(tmp_path / "other")
    pipe.register_to_config(refiner_first_scale=3)
    for plan, message in [(ScalePlan(2), "from 3 on"), (ScalePlan(0), "cannot draw alone")]:
        with pytest.raises(ValueError, match=message), plan.on(pipe):
            pytest.fail("accepted")
    assert drawn(pipe, ScalePlan(3)).trace.model_calls == (3, 1)
    assert drawn(pipe, ScalePlan(1, refiner=str(tmp_path / "other"))).trace.model_calls == (1, 3)
    assert pipe.config["refiner_first_scale"] == 3

    def scales(part):
        return {"scales": SIDES}

    texts = scale_settings(pipe.facts, {"refiner": ["a", "b"], "refiner_first_scale": 3}, scales).others
    splits = {text.split("num_draft_scales=")[1].split(",")[0] for text in texts}
    assert splits == {"3", "all"}
    free = scale_settings(pipe.facts, {"refiner": ["a", "b"]}, scales).others
    assert any("num_draft_scales=0" in text for text in free) and any(
        "num_draft_scales=2" in text for text in free
    )


def test_the_number_of_drafters_is_that_of_the_plan(pipe):
    labels = list(range(5))
    for count in (0, 1, 2):
        budgets = pipe.calibrate(labels, 0.7, num_drafters=count, generator=seeded(*labels))
        with ScalePlan("all", 0.7, num_drafters=count).on(pipe):
            assert pipe.budget == budgets[0] and pipe.refiner_budget == budgets[1]
            assert sum(map(len, pipe.budget.drafters)) == count
    with pytest.raises(ValueError, match="num_drafters=1 without a cache_share"):
        ScalePlan("all", num_drafters=1)


def test_a_whole_share_is_no_compression_but_off_undoes_one(pipe):
    plain = drawn(pipe, ScalePlan("all"))
    whole = drawn(pipe, ScalePlan("all", 1.0))
    assert whole.tokens.equal(plain.tokens) and whole.trace.cache_bytes == plain.trace.cache_bytes
    assert whole.trace.lossless
    pipe.compress(ScaleBudget(SIDES, ((0, 0), (1, 1), (4, 4), (9, 9))))
    assert drawn(pipe, ScalePlan("all")).trace.cache_bytes < plain.trace.cache_bytes
    assert drawn(pipe, ScalePlan("all", "off")).trace.cache_bytes == plain.trace.cache_bytes
    assert pipe.budget is not None
    assert ScalePlan.plain(pipe.config) == ScalePlan("all", "off")
    assert ScalePlan.plain(tiny_scale_pipeline().config) == ScalePlan("all")


def test_the_refiner_of_a_plan_draws_with_the_guidance_of_the_others_unless_told(pipe, tmp_path):
    other = tiny_var(3, torch.float32)
    other.save_pretrained(tmp_path / "other")
    own = tiny_scale_pipeline(refiner=other)
    want = {scale: own([3, 1], generator=seeded(7, 8), num_draft_scales=2) for scale in (None, 1.0)}
    own.register_to_config(refiner_guidance_scale=1.0)
    want[1.0] = own([3, 1], generator=seeded(7, 8), num_draft_scales=2)
    assert not want[1.0].tokens.equal(want[None].tokens)
    pipe.register_to_config(refiner_guidance_scale=1.0)
    for scale in (None, 1.0):
        plan = ScalePlan(2, refiner=str(tmp_path / "other"), refiner_guidance_scale=scale)
        assert drawn(pipe, plan).tokens.equal(want[scale].tokens)
    assert pipe.config["refiner_guidance_scale"] == 1.0


def test_layers_share_alike_where_there_is_nothing_to_calibrate_on(pipe, monkeypatch):
    monkeypatch.setattr(scale_cache, "calibrate", lambda *_, **__: pytest.fail("drew pictures"))
    with ScalePlan("all", 0.7).on(pipe, calibrated=False):
        (stage,) = pipe.stages()
        assert isinstance(stage.model, CompressedVAR)
        assert stage.model.budget == ScaleBudget.from_share(SIDES, 2, 0.7)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ScalePlan(5), "num_draft_scales=5; pass"),
        (ScalePlan("all", 0.1), "share=0.1 leaves .* pass a share of at least 0.6429"),
        (ScalePlan(refiner="nowhere"), "no refiner 'nowhere'; pass a folder written by save_pretrained"),
    ],
)
def test_plans_that_do_not_fit(pipe, plan, message):
    transformer = pipe.transformer
    with pytest.raises(ValueError, match=message), plan.on(pipe):
        pytest.fail("accepted")
    assert pipe.transformer is transformer and pipe.config["num_draft_scales"] is None


def test_plans_for_pipelines_that_lack_what_they_ask_for(pipe, tmp_path):
    alone = tiny_scale_pipeline(pair=False)
    with (
        pytest.raises(ValueError, match="num_draft_scales=0, but this .* has no refiner"),
        ScalePlan(0).on(alone),
    ):
        pytest.fail("accepted")
    with pytest.raises(ValueError, match="no refiner to draw the other scales"), ScalePlan(2).on(alone):
        pytest.fail("accepted")
    next_token = tiny_pipeline()
    with pytest.raises(ValueError, match="num_draft_scales given, which a ImagePipeline does not have"):
        ScalePlan(2).on(next_token).__enter__()
    with ScalePlan().on(next_token):
        pass
    pipe.vq_model.save_pretrained(tmp_path / "vq")
    with pytest.raises(ValueError, match="holds a MultiscaleVQModel; a refiner is one of VARTransformer"):
        loading.load_refiner(tmp_path / "vq")


def test_samplers_of_the_other_kind_of_model_are_refused(pipe):
    with pytest.raises(
        TypeError, match="AutoregressiveSampler, which does not fit a next-scale model; pass a Scale"
    ):
        accelerate(pipe, "autoregressive")
    assert isinstance(pipe.sampler, ScaleWiseSampler)
    assert isinstance(accelerate(pipe, pipe.fast_sampler).sampler, ScaleWiseSampler)
    next_token = tiny_pipeline()
    with pytest.raises(
        TypeError, match="ScaleWiseSampler, which does not fit a next-token model; those that fit: Au"
    ):
        accelerate(next_token, make_sampler("scale-wise"))


def test_pictures_of_tokens(pipe):
    output = pipe([3, 1], generator=seeded(7, 8), output_type="pt")
    assert pipe.decode_tokens(output.tokens, "pt").equal(output.images)
