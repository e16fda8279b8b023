"""Who draws which scales, and with which cache: as words of the command line, on a pipeline and off again."""

import pytest
import torch

from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_pipeline
from tests.helpers.tiny_scales import SIDES, tiny_scale_pipeline, tiny_var
from visual_spec.eval.defaults import scale_settings
from visual_spec.eval.report.comparison import plain_decoding
from visual_spec.eval.settings import Setting, parse_setting
from visual_spec.models.next_scale.scale_budget import ScaleBudget
from visual_spec.models.next_scale.scale_cache import CompressedVAR, calibrate
from visual_spec.pipelines import loading, scale_image
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales.scales import ScaleWiseSampler


@pytest.fixture
def pipe():
    return tiny_scale_pipeline()


def read(text: str) -> Setting:
    return parse_setting(text, TokenLaw(), 0)


def row(num_draft_scales=None, cache_share=None, refiner=None, **settings) -> Setting:
    """The setting whose sampler says this."""
    own = {"num_draft_scales": num_draft_scales, "cache_share": cache_share, **settings}
    return Setting("scale-wise", ScaleWiseSampler(**own), TokenLaw(), 0, refiner=refiner)


def drawn(pipe, setting: Setting, **settings):
    with setting.on(pipe):
        return pipe([3, 1], generator=seeded(7, 8), output_type="latent", **settings)


def test_one_text_says_who_draws_which_scales():
    setting = read("scale-wise:num_draft_scales=3,cache_share=0.7,measure=true,refiner=folder")
    config = setting.sampler.config
    assert isinstance(setting.sampler, ScaleWiseSampler) and config["measure"]
    assert (config["num_draft_scales"], config["cache_share"], setting.refiner) == (3, 0.7, "folder")
    assert setting.describe()["refiner"] == "folder" and "refiner" not in read("scale-wise").describe()
    assert read("scale-wise:refiner=/some/folder").refiner == "/some/folder"
    assert read("scale-wise:num_draft_scales=all,cache_share=off").same_models(row("all", "off"))
    for other in (row(3, 0.7), row(2, 0.7, "folder"), row(3, 0.6, "folder")):
        assert not setting.same_models(other)


@pytest.mark.parametrize("changed", [{"num_draft_scales": 2}, {"cache_share": 0.7}])
def test_one_model_cannot_be_divided(pipe, changed):
    sampler = ScaleWiseSampler(**changed)
    with pytest.raises(ValueError, match=f"{next(iter(changed))} given, but one model draws"):
        sampler(pipe.transformer, torch.tensor([1]), tokenizer=pipe.vq_model, law=TokenLaw())


def test_the_sampler_says_it_in_a_call_and_saved(pipe, tmp_path):
    pipe.sampler = ScaleWiseSampler(num_draft_scales=3, refiner_guidance_scale=1.0)
    output = pipe([3, 1], generator=seeded(7, 8))
    assert output.trace.model_calls == (3, 1)
    pipe.save_pretrained(tmp_path)
    assert loading.load_pipeline(tmp_path)([3, 1], generator=seeded(7, 8)).tokens.equal(output.tokens)
    # As earlier versions saved it.
    former = tiny_scale_pipeline(num_draft_scales=3, refiner_guidance_scale=1.0)
    assert former.sampler.config["num_draft_scales"] == 3
    assert former([3, 1], generator=seeded(7, 8)).tokens.equal(output.tokens)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scale-wise:num_draft_scales=-1", "num_draft_scales=-1; pass"),
        ("scale-wise:num_draft_scales=half", "num_draft_scales='half'; pass"),
        ("scale-wise:num_draft_scales=true", "num_draft_scales=True; pass"),
        ("scale-wise:cache_share=0", "cache_share=0; pass"),
        ("scale-wise:cache_share=1.5", "cache_share=1.5; pass"),
        ("scale-wise:cache_share=little", "cache_share='little'; pass"),
        ("scale-wise:window=3", "cache_share.*0.*1.*'off'"),
        ("columns:num_draft_scales=3", "num_draft_scales.*exact_width"),
        ("autoregressive:num_draft_scales=3", "num_draft_scales.*exact_width"),
    ],
)
def test_rows_that_cannot_be_read(text, message):
    refuses(ValueError, message, read, text)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_number_of_scales_is_that_of_the_call(pipe, split):
    want = pipe([3, 1], generator=seeded(7, 8), num_draft_scales=split)
    found = drawn(pipe, row(split))
    assert found.tokens.equal(want.tokens) and found.trace.model_calls == (split, 4 - split)


def test_one_model_alone(pipe):
    alone = tiny_scale_pipeline(pair=False)
    want = alone([3, 1], generator=seeded(7, 8))
    assert drawn(pipe, row("all")).tokens.equal(want.tokens)
    small = drawn(pipe, row(0))
    alone.transformer = pipe.refiner
    assert small.tokens.equal(alone([3, 1], generator=seeded(7, 8)).tokens)
    assert small.trace.model_calls == (4,) and small.trace.lossless  # of its own law
    assert not row(0).sampler.lossless and row("all").sampler.lossless
    assert not small.tokens.equal(want.tokens)


def test_the_pipeline_is_as_it_was_afterwards(pipe, tmp_path):
    tiny_var(9, torch.float32, num_layers=1).save_pretrained(tmp_path / "other")
    before = drawn(pipe, row())
    transformer, refiner = pipe.transformer, pipe.refiner
    for setting in (row(0), row("all", 0.7), row(3, 0.7, str(tmp_path / "other"))):
        other = drawn(pipe, setting)
        assert not other.tokens.equal(before.tokens)
        assert pipe.transformer is transformer and pipe.refiner is refiner
        assert pipe.budget is None and pipe.refiner_budget is None and pipe.config["num_draft_scales"] is None
        assert drawn(pipe, row()).tokens.equal(before.tokens)
    with pytest.raises(RuntimeError, match="stop"), row(0, 0.7).on(pipe):
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
    found = drawn(pipe, row(2, refiner=str(tmp_path / "other")))
    pipe.refiner = other
    assert found.tokens.equal(drawn(pipe, row(2)).tokens)
    alone = tiny_scale_pipeline(pair=False)
    assert drawn(alone, row(2, refiner=str(tmp_path / "other"))).tokens.equal(found.tokens)
    assert alone.refiner is None


def test_a_share_of_the_cache_is_calibrated_once(pipe, monkeypatch):
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs["share"])
        return calibrate(*args, **kwargs)

    monkeypatch.setattr(scale_image, "calibrate", counted)
    found = drawn(pipe, row(2, 0.7))
    assert calls == [0.7, 0.7] and drawn(pipe, row(2, 0.7)).tokens.equal(found.tokens)
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
    for setting, message in [(row(2), "from 3 on"), (row(0), "from 3 on")]:
        with pytest.raises(ValueError, match=message), setting.on(pipe):
            pytest.fail("accepted")
    assert drawn(pipe, row(3)).trace.model_calls == (3, 1)
    assert drawn(pipe, row(1, refiner=str(tmp_path / "other"))).trace.model_calls == (1, 3)
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


def test_the_number_of_drafters_is_that_of_the_setting(pipe):
    labels = list(range(5))
    for count in (0, 1, 2):
        budgets = pipe.calibrate(labels, 0.7, num_drafters=count, generator=seeded(*labels))
        with row(2, 0.7, num_drafters=count).on(pipe):
            kept = [stage.model.budget for stage in pipe.stages()]
            assert kept == list(budgets) and sum(map(len, kept[0].drafters)) == count
            assert pipe.budget is None and pipe.refiner_budget is None
    refuses(ValueError, "num_drafters=1.*cache_share", row, "all", num_drafters=1)


def test_a_whole_share_is_no_compression_but_off_undoes_one(pipe):
    plain = drawn(pipe, row("all"))
    whole = drawn(pipe, row("all", 1.0))
    assert whole.tokens.equal(plain.tokens) and whole.trace.cache_bytes == plain.trace.cache_bytes
    assert whole.trace.lossless
    pipe.compress(ScaleBudget(SIDES, ((0, 0), (1, 1), (4, 4), (9, 9))))
    assert drawn(pipe, row("all")).trace.cache_bytes < plain.trace.cache_bytes
    assert drawn(pipe, row("all", "off")).trace.cache_bytes == plain.trace.cache_bytes
    assert pipe.budget is not None
    plain = plain_decoding(pipe).config
    assert (plain["num_draft_scales"], plain["cache_share"]) == ("all", "off")
    pipe.sampler = ScaleWiseSampler(ramp=False, cache_share=0.7, num_drafters=1)
    plain = plain_decoding(pipe).config
    assert (plain["cache_share"], plain["ramp"]) == ("off", False)
    assert plain_decoding(tiny_scale_pipeline()).config["cache_share"] is None


def test_the_refiner_of_a_setting_draws_with_the_guidance_of_the_others_unless_told(pipe, tmp_path):
    other = tiny_var(3, torch.float32)
    other.save_pretrained(tmp_path / "other")
    own = tiny_scale_pipeline(refiner=other)
    want = {scale: own([3, 1], generator=seeded(7, 8), num_draft_scales=2) for scale in (None, 1.0)}
    own.register_to_config(refiner_guidance_scale=1.0)
    want[1.0] = own([3, 1], generator=seeded(7, 8), num_draft_scales=2)
    assert not want[1.0].tokens.equal(want[None].tokens)
    pipe.register_to_config(refiner_guidance_scale=1.0)
    for scale in (None, 1.0):
        setting = row(2, refiner=str(tmp_path / "other"), refiner_guidance_scale=scale)
        assert drawn(pipe, setting).tokens.equal(want[scale].tokens)
    assert pipe.config["refiner_guidance_scale"] == 1.0


def test_layers_share_alike_without_drafters(pipe, monkeypatch):
    monkeypatch.setattr(scale_image, "calibrate", lambda *_, **__: pytest.fail("drew pictures"))
    with row("all", 0.7, num_drafters=0).on(pipe):
        (stage,) = pipe.stages()
        assert isinstance(stage.model, CompressedVAR)
        assert stage.model.budget == ScaleBudget.from_share(SIDES, 2, 0.7)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (row(5), "num_draft_scales=5; pass"),
        (row("all", 0.1), r"share=0\.1.*0\.6429"),
        (row(refiner="nowhere"), "'nowhere'.*save_pretrained"),
    ],
)
def test_settings_that_do_not_fit(pipe, setting, message):
    transformer = pipe.transformer
    with pytest.raises(ValueError, match=message), setting.on(pipe):
        pytest.fail("accepted")
    assert pipe.transformer is transformer and pipe.config["num_draft_scales"] is None


def test_settings_for_pipelines_that_lack_what_they_ask_for(pipe, tmp_path):
    alone = tiny_scale_pipeline(pair=False)
    with pytest.raises(ValueError, match="num_draft_scales=0.*no refiner"), row(0).on(alone):
        pytest.fail("accepted")
    with pytest.raises(ValueError, match=r"pipe\.refiner"), row(2).on(alone):
        pytest.fail("accepted")
    next_token = tiny_pipeline()
    refuses(TypeError, "ScaleWiseSampler", row(2).on(next_token).__enter__)
    with pytest.raises(ValueError, match="refiner=folder.*ImagePipeline"):
        read("autoregressive:refiner=folder").on(next_token).__enter__()
    pipe.vq_model.save_pretrained(tmp_path / "vq")
    with pytest.raises(ValueError, match="MultiscaleVQModel.*FlexVARTransformer, VARTransformer"):
        loading.load_refiner(tmp_path / "vq")
