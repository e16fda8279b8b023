"""How rows are written on the command line, and how samples are drawn."""

import json
import time

import numpy as np
import pytest
import torch

from tests.helpers.evaluation import KINDS
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_pipeline
from tests.helpers.tiny_audio import HOP, tiny_audio_pipeline
from tests.helpers.tiny_scales import tiny_scale_pipeline
from visual_spec.eval.draws import draw, small_tokens, stored_name, through_tokenizer
from visual_spec.eval.media import codes_of, pictures_of, show
from visual_spec.eval.settings import check_samplers, parse_setting
from visual_spec.models.columns.encodec import encode_waves
from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

LAW = TokenLaw(guidance_scale=2.0, top_k=5)
PROMPTS = [f"a {colour} {shape}" for colour in ("red", "blue") for shape in ("circle", "square")] * 3


def test_a_row_as_it_is_written():
    setting = parse_setting(" speculative-jacobi: window=8 ,coupling=independent,acceptance=exact", LAW, 7)
    assert isinstance(setting.sampler, SpeculativeJacobiSampler)
    assert (setting.sampler.config["window"], setting.sampler.config["coupling"]) == (8, "independent")
    assert (setting.law, setting.seed) == (LAW, 7)
    other = parse_setting("autoregressive:temperature=0.5,top_k=0,seed=100", LAW, 7)
    assert other.law == TokenLaw(guidance_scale=2.0, temperature=0.5) and other.seed == 100
    law = dict(guidance_scale=2.0, guidance_until=None, temperature=0.5, top_k=0, top_p=1.0)
    assert other.pipeline_law == law
    assert json.loads(json.dumps(other.describe())) == other.describe()
    assert parse_setting("autoregressive", LAW, 0).text == "autoregressive"


def test_values_of_all_kinds(monkeypatch):
    found = {}
    monkeypatch.setattr(
        "visual_spec.eval.settings.make_sampler", lambda name, **settings: found.update(settings)
    )
    parse_setting("x:a=3,b=-0.5,c=true,d=None,e=word,f=4/2/2,g=4/,h=1e-3,i=a/2.5", LAW, 0)
    assert found == dict(a=3, b=-0.5, c=True, d=None, e="word", f=[4, 2, 2], g=[4], h=1e-3, i=["a", 2.5])
    assert isinstance(found["a"], int)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("autoregressive:window", "'window'.*setting=value"),
        ("autoregressive:", "write name:setting=value"),
        ("autoregressive:temperature=0.5,temperature=1", r"'autoregressive:temperature=0\.5,temperature=1'"),
        ("autoregressiv", "'autoregressiv'"),
        ("autoregressive:window=3", "exact_width"),
        ("speculative-jacobi:window=0", "window=0.*1"),
        ("autoregressive:temperature=-1", "temperature=-1"),
        ("autoregressive:temperature=warm", "temperature='warm'; pass"),
        ("autoregressive:seed=-4", "seed=-4"),
    ],
)
def test_rows_that_cannot_be_read(text, message):
    refuses(ValueError, message, parse_setting, text, LAW, 0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokens", "speculative-jacobi:window=4"),
        ("scales", "scale-wise:num_draft_scales=1,top_k=3"),
        ("vectors", "continuous:steps=5"),
        ("columns", "column-jacobi:window=4"),
    ],
)
def test_samples_are_those_of_drawing_each_alone(name, text):
    pipe, setting = KINDS[name].pipe(), parse_setting(text, KINDS[name].law, 40)
    prompts, before = KINDS[name].task().prompts[2:5], pipe.sampler
    arrays = draw(pipe, setting, prompts, 2)
    assert pipe.sampler is before and arrays["seconds"] > 0
    assert np.isnan(arrays["moved_mass"]).all() and np.isnan(arrays["divergence"])
    law = {name: value for name, value in setting.pipeline_law.items() if value is not None}
    stored = arrays[stored_name(arrays)]
    for place, prompt in enumerate(prompts):
        with setting.on(pipe):
            alone = pipe(prompt, generator=seeded(42 + place), **law)
        assert alone.trace.target_calls[0] == arrays["calls"][place]
        shown = show(pipe, stored[place : place + 1])[0]
        if name == "columns":
            assert np.array_equal(alone.codes[0].numpy(), arrays["tokens"][place])
            assert np.array_equal(alone.audios[0, 0], shown)
        elif name == "vectors":  # a batch rounds otherwise
            assert np.abs(shown.astype(int) - np.asarray(alone.images[0]).astype(int)).max() <= 1
        else:
            assert np.array_equal(alone.tokens[0].numpy(), arrays["tokens"][place])
            assert arrays["tokens"].dtype == np.int16 and np.array_equal(shown, np.asarray(alone.images[0]))


def test_what_a_lossy_sampler_measures_is_kept(monkeypatch):
    pipe, setting = tiny_pipeline(), parse_setting("autoregressive", LAW, 0)
    decode = type(setting.sampler).__call__

    def lossy(self, *args, **kwargs):
        result = decode(self, *args, **kwargs)
        result.trace.divergence, result.trace.moved_mass = 0.25, torch.tensor([0.5, 0.75])
        result.trace.seconds, result.trace.phase_seconds = 6.0, {"model": 4.0, "measure": 2.0}
        return result

    monkeypatch.setattr(type(setting.sampler), "__call__", lossy)
    monkeypatch.setattr("time.process_time", iter([100.0, 116.0]).__next__)
    arrays = draw(pipe, setting, PROMPTS[:2], 0)
    assert arrays["divergence"] == 0.25 and arrays["moved_mass"].tolist() == [0.5, 0.75]
    # What only measures is no part of decoding: 2 of 8 seconds.
    assert arrays["seconds"] == 6 and arrays["processor_seconds"] == pytest.approx(12)


def test_what_a_call_does_beside_decoding_takes_its_share_of_the_processor(monkeypatch):
    """Such as encoding the prompts."""
    pipe, setting = tiny_pipeline(), parse_setting("autoregressive", LAW, 0)
    decode = type(setting.sampler).__call__

    def slow(self, *args, **kwargs):
        result = decode(self, *args, **kwargs)
        time.sleep(0.1)
        result.trace.seconds = 0.05
        return result

    monkeypatch.setattr(type(setting.sampler), "__call__", slow)
    monkeypatch.setattr("time.process_time", iter([100.0, 140.0]).__next__)
    assert 0 < draw(pipe, setting, PROMPTS[:2], 0)["processor_seconds"] <= 20


@pytest.mark.parametrize("text", ["zipar:window=2", "parallel-jacobi:rows=2"])
def test_rows_in_parallel_measure_themselves_where_they_are_told(text):
    pipe = tiny_pipeline()
    plain = draw(pipe, parse_setting(text, LAW, 0), PROMPTS[:3], 0)
    measured = draw(pipe, parse_setting(f"{text},measure=true", LAW, 0), PROMPTS[:3], 0)
    assert np.array_equal(measured["tokens"], plain["tokens"]) and np.isnan(plain["divergence"])
    assert 0 < measured["divergence"] < 1 and (measured["moved_mass"] > 0).all()
    length = measured["tokens"].shape[-1]
    assert measured["moved_mass"].mean() / length == pytest.approx(float(measured["divergence"]))


def test_large_vocabularies_get_larger_numbers():
    assert small_tokens(torch.tensor([[0, 32767]])).dtype == np.int16
    assert small_tokens(torch.tensor([[0, 32768]])).tolist() == [[0, 32768]]


def test_true_pictures_as_the_tokenizer_sees_them():
    pipe = tiny_pipeline()
    tokens = torch.randint(12, (3, 16), generator=torch.Generator().manual_seed(0))
    pictures = pictures_of(pipe, tokens.numpy())
    signed = torch.from_numpy(pictures).permute(0, 3, 1, 2) / 127.5 - 1
    expected = pictures_of(pipe, pipe.vq_model.encode_tokens(signed).numpy())
    assert np.array_equal(through_tokenizer(pipe, pictures), expected)


def test_a_row_with_a_drafter_of_its_own(tmp_path):
    pipe = tiny_pipeline()
    EagleDrafter.for_target(pipe.transformer).save_pretrained(tmp_path / "head")
    text = f"tree:drafter={tmp_path / 'head'},depth=2,width=2"
    setting = parse_setting(text, LAW, 40)
    assert setting.drafter == str(tmp_path / "head") and setting.describe()["drafter"] == setting.drafter
    assert "drafter" not in parse_setting("tree", LAW, 40).describe()
    refuses(ValueError, "TreeSampler", check_samplers, pipe, [parse_setting("tree", LAW, 40)])
    check_samplers(pipe, [setting])
    arrays = draw(pipe, setting, PROMPTS[:2], 0)
    assert pipe.drafter is None
    pipe.drafter, pipe.sampler = EagleDrafter.from_pretrained(tmp_path / "head").eval(), setting.sampler
    again = pipe(PROMPTS[:2], generator=seeded(40, 41), guidance_scale=2.0, top_k=5)
    assert np.array_equal(again.tokens.numpy(), arrays["tokens"])


def test_unknown_drafters(tmp_path):
    pipe = tiny_pipeline()
    with pytest.raises(ValueError, match="'nothing'"):
        draw(pipe, parse_setting("tree:drafter=nothing", LAW, 0), PROMPTS[:1], 0)
    pipe.vq_model.save_pretrained(tmp_path / "vq")
    with pytest.raises(ValueError, match="VQModel.*EagleDrafter"):
        draw(pipe, parse_setting(f"tree:drafter={tmp_path / 'vq'}", LAW, 0), PROMPTS[:1], 0)
    assert pipe.drafter is None


def test_the_plan_of_a_row_holds_for_its_draws():
    pipe = tiny_scale_pipeline()
    arrays = draw(pipe, parse_setting("scale-wise:num_draft_scales=1", KINDS["scales"].law, 0), ["2"], 0)
    assert not arrays["lossless"] and pipe.sampler.config["num_draft_scales"] is None


def test_codes_of_clips_are_those_of_the_codec():
    pipe = tiny_audio_pipeline()
    waves = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 20 * HOP)).astype(np.float32)
    assert codes_of(pipe, waves).equal(encode_waves(pipe.codec, torch.from_numpy(waves)[:, None]))
