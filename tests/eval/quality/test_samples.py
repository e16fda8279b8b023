"""How rows are written on the command line, and how samples are drawn, kept and read again."""

import json

import numpy as np
import pytest
import torch

from tests.tiny import seeded, tiny_pipeline
from visual_spec.eval.draws import draw, encode, small_tokens
from visual_spec.eval.media import pictures_of
from visual_spec.eval.quality.samples import Judge, SampleFolder, judge_draws
from visual_spec.eval.settings import check_samplers, parse_setting
from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.models.shapes_features import ShapesFeatures
from visual_spec.pipelines.scale_plan import ScalePlan
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler

LAW = TokenLaw(guidance_scale=2.0, top_k=5)
PROMPTS = [f"a {colour} {shape}" for colour in ("red", "blue") for shape in ("circle", "square")] * 3


def test_a_row_as_it_is_written():
    setting = parse_setting(" speculative-jacobi: window=8 ,coupling=independent,acceptance=exact", LAW, 7)
    assert isinstance(setting.sampler, SpeculativeJacobiSampler)
    assert (setting.sampler.config["window"], setting.sampler.config["coupling"]) == (8, "independent")
    assert (setting.law, setting.seed) == (LAW, 7)
    other = parse_setting("autoregressive:temperature=0.5,top_k=0,seed=100", LAW, 7)
    assert other.law == TokenLaw(guidance_scale=2.0, temperature=0.5) and other.seed == 100
    assert other.pipeline_law == {
        "guidance_scale": 2.0,
        "guidance_until": None,
        "temperature": 0.5,
        "top_k": 0,
        "top_p": 1.0,
    }
    assert json.loads(json.dumps(other.describe())) == other.describe()
    assert parse_setting("autoregressive", LAW, 0).text == "autoregressive"


def test_values_of_all_kinds(monkeypatch):
    found = {}
    monkeypatch.setattr(
        "visual_spec.eval.settings.make_row",
        lambda name, **settings: (found.update(settings), ScalePlan()),
    )
    parse_setting("x:a=3,b=-0.5,c=true,d=None,e=word,f=4/2/2,g=4/,h=1e-3,i=a/2.5", LAW, 0)
    assert found == {
        "a": 3,
        "b": -0.5,
        "c": True,
        "d": None,
        "e": "word",
        "f": [4, 2, 2],
        "g": [4],
        "h": 1e-3,
        "i": ["a", 2.5],
    }
    assert isinstance(found["a"], int)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("autoregressive:window", "'window' in sampler .* write name:setting=value"),
        ("autoregressive:", "write name:setting=value"),
        ("autoregressive:temperature=0.5,temperature=1", "sets temperature twice"),
        ("autoregressiv", "unknown sampler 'autoregressiv'; pass one of autoregressive"),
        ("autoregressive:window=3", "has no setting window"),
        ("speculative-jacobi:window=0", "window=0; pass an integer of at least 1"),
        ("autoregressive:temperature=-1", "temperature=-1"),
        ("autoregressive:temperature=warm", "temperature='warm'; pass"),
        ("autoregressive:seed=-4", "seed=-4; pass .* in sampler"),
    ],
)
def test_rows_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message):
        parse_setting(text, LAW, 0)


def test_samples_are_those_of_drawing_each_alone():
    pipe = tiny_pipeline()
    before = pipe.sampler
    setting = parse_setting("speculative-jacobi:window=4", LAW, 40)
    arrays = draw(pipe, setting, PROMPTS[2:7], 2)
    assert pipe.sampler is before
    pipe.sampler = setting.sampler
    for place, prompt in enumerate(PROMPTS[2:7]):
        alone = pipe(prompt, generator=seeded(40 + 2 + place), guidance_scale=2.0, top_k=5)
        assert np.array_equal(alone.tokens[0].numpy(), arrays["tokens"][place])
        assert alone.trace.target_calls[0] == arrays["calls"][place]
        shown = pictures_of(pipe, arrays["tokens"][place : place + 1])[0]
        assert np.array_equal(shown, np.asarray(alone.images[0]))
    assert (
        arrays["tokens"].dtype == np.int16
        and np.isnan(arrays["moved_mass"]).all()
        and np.isnan(arrays["divergence"])
    )
    assert json.loads(str(arrays["prompts"])) == PROMPTS[2:7] and arrays["seconds"] > 0


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
    arrays = encode(pipe, PROMPTS[:3], pictures)
    signed = torch.from_numpy(pictures).permute(0, 3, 1, 2) / 127.5 - 1
    assert np.array_equal(arrays["tokens"], pipe.vq_model.encode_tokens(signed).numpy())


def make_draws(folder: SampleFolder, first: int, end: int) -> None:
    numbers = np.arange(first, end)
    folder.write(
        "draws",
        first,
        end,
        {
            "tokens": (numbers[:, None] + np.arange(16)).astype(np.int16) % 12,
            "calls": numbers,
            "moved_mass": numbers / 10,
            "divergence": np.array(first / 8),
            "seconds": np.array(1.5 * (end - first)),
            "processor_seconds": np.array(0.5 * (end - first)),
            "prompts": np.array(json.dumps(PROMPTS[first:end])),
        },
    )


def simple_score(prompt, picture):
    return {"red": "red" in prompt, "bright": bool(picture.astype(int).sum() % 2)}


def test_a_folder_gives_back_what_was_written(tmp_path):
    pipe, folder = tiny_pipeline(), SampleFolder(tmp_path / "x", {"seed": 1})
    judge = Judge(
        simple_score, {"net": ShapesFeatures({"a": 2}, num_features=5, image_size=16, channels=2).eval()}
    )
    assert folder.missing(0, 4) == (0, 4) and not folder.complete(4, judge.fingerprint)
    make_draws(folder, 0, 4)
    make_draws(folder, 4, 6)  # a run of 6 samples ended here
    assert (
        folder.missing(0, 4) is None and folder.missing(4, 8) == (6, 8) and folder.missing(8, 10) == (8, 10)
    )
    assert not folder.complete(6, judge.fingerprint)
    judge_draws(pipe, folder, PROMPTS, judge, (0, 4))
    assert not folder.complete(6, judge.fingerprint) and folder.complete(3, judge.fingerprint)
    judge_draws(pipe, folder, PROMPTS, judge, (4, 8))
    assert folder.complete(6, judge.fingerprint) and not folder.complete(7, judge.fingerprint)
    found = folder.samples(5)
    assert found.calls.tolist() == [0, 1, 2, 3, 4] and found.batch_sizes == [4, 2]
    assert (
        found.batch_seconds == [6.0, 3.0]
        and found.batch_processor_seconds == [2.0, 1.0]
        and found.moved_mass.tolist() == [0, 0.1, 0.2, 0.3, 0.4]
    )
    assert found.batch_divergence == [0, 0.5]
    pictures = pictures_of(pipe, found.stored)
    expected = judge(PROMPTS[:5], pictures)
    assert found.hits == json.loads(str(expected["hits"])) and len(found.hits) == 5
    assert torch.allclose(found.features["net"], torch.from_numpy(expected["net"]), atol=1e-5)


def test_another_judge_looks_again(tmp_path):
    pipe, folder = tiny_pipeline(), SampleFolder(tmp_path, {})
    make_draws(folder, 0, 2)
    networks = [ShapesFeatures({"a": 2}, num_features=5, image_size=16, channels=2).eval() for _ in range(2)]
    first, second = (Judge(simple_score, {"net": network}) for network in networks)
    assert first.fingerprint != second.fingerprint
    judge_draws(pipe, folder, PROMPTS, first, (0, 2))
    before = folder.samples(2).features["net"]
    judge_draws(pipe, folder, PROMPTS, second, (0, 2))
    assert folder.complete(2, second.fingerprint) and not folder.complete(2, first.fingerprint)
    assert not torch.allclose(before, folder.samples(2).features["net"])


def test_a_folder_holds_one_setting_and_one_list_of_prompts(tmp_path):
    folder = SampleFolder(tmp_path, {"seed": 1, "law": {"top_k": 2}})
    with pytest.raises(
        ValueError, match=r"other settings \(law: .*2.* there, .*3.* here\); pass another folder"
    ):
        SampleFolder(tmp_path, {"seed": 1, "law": {"top_k": 3}})
    make_draws(folder, 0, 2)
    with pytest.raises(ValueError, match="'a red circle' there, 'a blue circle' here.*; pass another folder"):
        judge_draws(tiny_pipeline(), folder, ["a blue circle"] * 2, Judge(simple_score), (0, 2))


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    folder = SampleFolder(tmp_path, {})
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        make_draws(folder, 0, 2)
    assert folder.draws() == [] and [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_a_row_with_a_drafter_of_its_own(tmp_path):
    pipe = tiny_pipeline()
    EagleDrafter.for_target(pipe.transformer).save_pretrained(tmp_path / "head")
    text = f"tree:drafter={tmp_path / 'head'},depth=2,width=2"
    setting = parse_setting(text, LAW, 40)
    assert setting.drafter == str(tmp_path / "head") and setting.describe()["drafter"] == setting.drafter
    assert "drafter" not in parse_setting("tree", LAW, 40).describe()
    with pytest.raises(ValueError, match="TreeSampler needs a drafter, and this pipeline has none"):
        check_samplers(pipe, [parse_setting("tree", LAW, 40)])
    check_samplers(pipe, [setting])
    arrays = draw(pipe, setting, PROMPTS[:2], 0)
    assert pipe.drafter is None
    pipe.drafter, pipe.sampler = EagleDrafter.from_pretrained(tmp_path / "head").eval(), setting.sampler
    again = pipe(PROMPTS[:2], generator=seeded(40, 41), guidance_scale=2.0, top_k=5)
    assert np.array_equal(again.tokens.numpy(), arrays["tokens"])


def test_unknown_drafters(tmp_path):
    pipe = tiny_pipeline()
    with pytest.raises(ValueError, match="no drafter 'nothing'; pass a folder"):
        draw(pipe, parse_setting("tree:drafter=nothing", LAW, 0), PROMPTS[:1], 0)
    pipe.vq_model.save_pretrained(tmp_path / "vq")
    with pytest.raises(ValueError, match="holds a VQModel; a drafter is one of .*, EagleDrafter"):
        draw(pipe, parse_setting(f"tree:drafter={tmp_path / 'vq'}", LAW, 0), PROMPTS[:1], 0)
    assert pipe.drafter is None
