"""What is measured of a model when no settings are named: read off its folder."""

import pytest

from tests.helpers.evaluation import KINDS
from tests.helpers.evaluation import SCALES as PLAIN
from tests.helpers.music_settings import MASKED, MASKED_LAW, masked_pipeline
from tests.helpers.refusals import refuses
from tests.helpers.sampler_settings import settings_of
from tests.helpers.tiny import tiny_pipeline
from tests.helpers.tiny_audio import tiny_audio_pipeline
from tests.helpers.tiny_continuous import tiny_latent_pipeline
from tests.helpers.tiny_scales import SIDES, tiny_scale_pipeline
from visual_spec.eval.defaults import scale_settings, settings_of_model
from visual_spec.eval.settings import check_samplers, parse_setting

LAW = KINDS["scales"].law


def test_the_rows_of_a_model_follow_from_what_it_has(tmp_path):
    pipe = tiny_scale_pipeline(default_guidance_scale=2.0, default_top_k=5)
    pipe.save_pretrained(tmp_path / "pair")
    rows = settings_of_model(str(tmp_path / "pair"))
    assert rows.facts.unit == "scales" and rows.plain == PLAIN
    assert rows.controls == (f"{PLAIN},temperature=0.9", f"{PLAIN},seed=1000000")
    assert rows.law == {"guidance_scale": 2.0, "temperature": 1.0, "top_k": 5, "top_p": 0.96}
    # Shares below 9 of 14 tokens do not hold the observation window.
    splits = [f"scale-wise:num_draft_scales={split}" for split in (0, 1, 2, 3)]
    both = [f"{split},cache_share=1.0" for split in splits[2:]]
    assert rows.others == (*splits, f"{PLAIN},cache_share=1.0", *both)
    sides = (1, 2, 3, 4, 6, 8, 12, 16)
    alone = scale_settings(pipe.facts, tiny_scale_pipeline(pair=False).config, lambda part: {"scales": sides})
    assert alone.others == tuple(f"{PLAIN},cache_share={share}" for share in (0.1, 0.2, 0.5, 1.0))
    paired = scale_settings(pipe.facts, {"refiner": ["a", "b"]}, lambda part: {"scales": sides}).others
    assert paired[:5] == tuple(f"scale-wise:num_draft_scales={split}" for split in (0, 4, 5, 6, 7))
    assert paired[-2:] == tuple(f"scale-wise:num_draft_scales={split},cache_share=0.1" for split in (5, 6))
    compressed = pipe.facts_of({**pipe.config, "budget": {"scales": SIDES}}, {})
    plain = scale_settings(compressed, pipe.config, lambda part: {"scales": SIDES}).plain
    assert plain == f"{PLAIN},cache_share=off"
    tiny_pipeline().save_pretrained(tmp_path / "next")
    other = settings_of_model(str(tmp_path / "next"))
    exact = [f"coupling={one},acceptance=exact" for one in ("gumbel", "maximal", "independent")]
    assert other.plain == "autoregressive" and other.facts.unit == "tokens"
    assert other.others == ("speculative-jacobi", *(f"speculative-jacobi:{text}" for text in exact))
    assert other.controls == ("autoregressive:temperature=0.9", "autoregressive:seed=1000000")
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    refuses(ValueError, "holds a FluxPipeline", settings_of_model, str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scale-wise:guidance_until=3", "'scale-wise:guidance_until=3'"),
        ("autoregressive", "AutoregressiveSampler"),
        ("scale-wise:num_draft_scales=7", "num_draft_scales=7.*0.*4"),
    ],
)
def test_rows_that_do_not_fit(text, message):
    with pytest.raises(ValueError, match=message):
        check_samplers(tiny_scale_pipeline(), [parse_setting(text, LAW, 0)])
    with pytest.raises(ValueError, match="ScaleWiseSampler"):
        check_samplers(tiny_pipeline(), [parse_setting("scale-wise", LAW, 0)])


@pytest.mark.parametrize("kind", ["mar", "causal"])
def test_settings_of_a_folder_are_read_without_loading_it(tmp_path, kind):
    pipe = tiny_latent_pipeline(kind, final_noise=0.1)
    pipe.save_pretrained(tmp_path)
    known = settings_of_model(str(tmp_path))
    assert known.plain == "continuous" and known.law["guidance_scale"] == 2.0
    assert (
        "continuous:head_steps=6,last_head_steps=5" in known.others
    ) and "head-speculation:levels=8" in known.others
    assert "speculative-continuous:rule=chain" in known.others  # the model has noise in the last level
    assert ("speculative-continuous:rule=cspd-release" in known.others) == (kind == "mar")
    settings = [
        parse_setting(text, known.law_with(), 0) for text in (known.plain, *known.controls, *known.others)
    ]
    loaded = type(pipe).from_pretrained(tmp_path)
    check_samplers(loaded, settings)


def test_the_rows_of_a_model_follow_from_what_it_is(tmp_path):
    tiny_audio_pipeline(default_guidance_scale=2.0, default_temperature=0.8).save_pretrained(tmp_path / "a")
    masked_pipeline().save_pretrained(tmp_path / "m")
    rows, masked = settings_of_model(str(tmp_path / "a")), settings_of_model(str(tmp_path / "m"))
    assert rows.facts.unit == "columns" and not rows.masked and rows.plain == "columns"
    assert rows.controls == ("columns:temperature=0.72", "columns:seed=1000000")
    hotter = settings_of_model(str(tmp_path / "a"), 1.1)
    assert (hotter.controls[0], hotter.law["temperature"]) == ("columns:temperature=0.99", 1.1)
    assert rows.law == {"guidance_scale": 2.0, "temperature": 0.8, "top_k": 0, "top_p": 1.0}
    found = [parse_setting(text, LAW, 0) for text in rows.others]
    assert [(one.sampler.identical, one.sampler.lossless) for one in found] == [
        (True, True),
        *[(False, True)] * 3,
        *[(False, False)] * 2,
    ]
    assert masked.plain == MASKED and masked.law["temperature"] == 1.7 and masked.masked
    assert masked.others == (MASKED.replace("4/2/2", "2/1/1"),)
    saved = parse_setting(masked.plain, MASKED_LAW, 0)
    assert saved.law == MASKED_LAW
    ours, theirs = (settings_of(one) for one in (saved.sampler, masked_pipeline().sampler))
    assert list(ours.pop("steps")) == list(theirs.pop("steps"))
    assert ours == theirs
