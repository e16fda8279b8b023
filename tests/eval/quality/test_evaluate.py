"""An evaluation of a tiny pipeline: interrupted, shared, extended, refused, and its figures against plain counts."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.evaluation import LAW, PROMPTS, ROWS, evaluate_tiny, make_judge, make_task, score, timeless
from tests.tiny import tiny_pipeline
from visual_spec.eval.draws import draw
from visual_spec.eval.media import pictures_of
from visual_spec.eval.quality import command, figures, tasks
from visual_spec.eval.quality.figures import clock_figures, quality_table
from visual_spec.eval.quality.metrics import frechet_distance
from visual_spec.eval.settings import parse_setting
from visual_spec.samplers.core.law import TokenLaw


@pytest.fixture(autouse=True, scope="module")
def few_resamples():
    """Intervals of the distance are tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_RESAMPLES", 5)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, evaluate_tiny(folder)


class Stop(Exception):
    pass


def test_an_interrupted_run_goes_on_and_ends_as_if_it_had_not_been(whole, tmp_path, monkeypatch):
    calls = []

    def stopping(pipe, setting, prompts, first):
        calls.append(setting.text)
        pipe = pipe if len(calls) != 6 else Interrupted(pipe)
        return draw(pipe, setting, prompts, first)

    monkeypatch.setattr("visual_spec.eval.draws.draw", stopping)
    with pytest.raises(Stop):
        evaluate_tiny(tmp_path)
    assert (
        not (tmp_path / "results.json").exists() and len(list(tmp_path.glob("*/draws-*"))) == 6
    )  # 5, tokenizer
    one_judged = next(iter(sorted(tmp_path.glob("*/judged-*"))))
    one_judged.unlink()  # the machine stopped between drawing and judging
    calls.clear()
    calls += ["counted"] * 100
    assert timeless(evaluate_tiny(tmp_path)) == timeless(whole[1])
    assert len(calls) - 100 == 4 * 3 - 5  # what was there is not drawn again
    calls.clear()
    calls += ["counted"] * 100
    assert timeless(evaluate_tiny(tmp_path)) == timeless(whole[1]) and len(calls) == 100


def test_damaged_files_are_named_set_aside_and_made_again(whole, tmp_path, monkeypatch):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    draws, judged = (sorted(tmp_path.glob(f"speculative-jacobi*/{kind}-*")) for kind in ("draws", "judged"))
    one, two, three = draws[0], draws[1], draws[4]
    one.write_bytes(b"")
    two.write_bytes(two.read_bytes()[:-100])
    with np.load(three) as file:
        np.savez(three, **{name: file[name] for name in file.files if name != "calls"})
    content = bytearray(judged[0].read_bytes())
    content[len(content) // 2] ^= 255
    judged[0].write_bytes(content)
    (tmp_path / "alone.json").write_text("{")
    drawn = []

    def counting(pipe, setting, prompts, first):
        drawn.append(first)
        return draw(pipe, setting, prompts, first)

    monkeypatch.setattr("visual_spec.eval.draws.draw", counting)
    with pytest.warns(UserWarning) as found:
        assert timeless(evaluate_tiny(tmp_path)) == timeless(whole[1])
    said = " ".join(str(warning.message) for warning in found)
    assert all(f"{path} is damaged" in said for path in (one, two, three, judged[0]))
    assert "it lacks calls" in said and len(drawn) == 3
    aside = sorted(tmp_path.glob("*/*.damaged"))
    assert aside == sorted(path.with_name(f"{path.name}.damaged") for path in (one, two, three, judged[0]))


def test_damaged_settings_are_named(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "autoregressive" / "settings.json").write_text('{"model"')
    with pytest.raises(ValueError, match="settings.json is damaged .* pass another folder"):
        evaluate_tiny(tmp_path)


class Interrupted:
    """A pipeline that is stopped at the fifth target call of a batch."""

    def __init__(self, pipe):
        self.__dict__["pipe"] = pipe

    def __getattr__(self, name):
        return getattr(self.pipe, name)

    def __setattr__(self, name, value):
        setattr(self.pipe, name, value)

    def __call__(self, *args, **kwargs):
        def stop(pipe, step, *_):
            if step == 4:
                raise Stop

        return self.pipe(*args, callback_on_step_end=stop, **kwargs)


def test_processes_share_the_blocks(whole, tmp_path):
    assert evaluate_tiny(tmp_path, rank=1, shards=2) is None
    assert sorted(path.name for path in tmp_path.glob("autoregressive/draws-*")) == [
        "draws-000003-000006.npz"
    ]
    assert timeless(evaluate_tiny(tmp_path, rank=0, shards=2)) == timeless(whole[1])
    assert timeless(json.loads((tmp_path / "results.json").read_text())) == timeless(whole[1])


def test_a_run_can_be_extended_and_shortened(whole, tmp_path):
    evaluate_tiny(tmp_path, samples=4)
    grown = evaluate_tiny(tmp_path)
    assert timeless(grown)["rows"][0]["accuracy"] == whole[1]["rows"][0]["accuracy"]
    assert [path.name for path in sorted(tmp_path.glob("autoregressive/draws-*"))] == [
        "draws-000000-000003.npz",
        "draws-000003-000004.npz",
        "draws-000004-000006.npz",
        "draws-000006-000007.npz",
    ]
    tokens = [
        np.concatenate(
            [np.load(path)["tokens"] for path in sorted((folder / "autoregressive").glob("draws-*"))]
        )
        for folder in (tmp_path, whole[0])
    ]
    assert np.array_equal(tokens[0], tokens[1])
    shorter = evaluate_tiny(tmp_path, samples=4)
    assert shorter is not None and shorter["rows"][0]["samples"] == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "other settings .seed: 0 there, 1 here.; pass another folder"),
        ({"law": TokenLaw(guidance_scale=3.0)}, "law: .*2.0.* there, .*3.0.* here"),
        ({"batch_size": 4}, "batch_size: 3 there, 4 here"),
        ({"model": "other"}, "model:  there, other here"),
    ],
)
def test_a_folder_holds_one_setting(whole, changes, message):
    with pytest.raises(ValueError, match=message):
        evaluate_tiny(whole[0], **changes)


def test_a_folder_holds_one_model(whole):
    pipe = tiny_pipeline()
    with torch.no_grad():
        pipe.transformer.output.weight[0, 0] += 1e-3
    with pytest.raises(ValueError, match="weights: [0-9a-f]{12} there, [0-9a-f]{12} here"):
        evaluate_tiny(whole[0], pipe=pipe)


def test_the_figures_are_plain_counts(whole):
    folder, document = whole
    pipe, judge, task = tiny_pipeline(), make_judge(), make_task()
    features, plain = {}, None
    for row, text in zip(document["rows"], ROWS, strict=True):
        setting = parse_setting(text, LAW, 0)
        drawn = draw(pipe, setting, PROMPTS[:7], 0)  # in one batch: that changes nothing
        pictures = pictures_of(pipe, drawn["tokens"])
        hits = [score(prompt, picture) for prompt, picture in zip(PROMPTS, pictures, strict=False)]
        with torch.no_grad():
            features[text] = judge.extractors["shapes"](torch.from_numpy(pictures).permute(0, 3, 1, 2))
            real = judge.extractors["shapes"](torch.from_numpy(task.pictures[:7]).permute(0, 3, 1, 2))
        plain = plain or drawn
        assert row["samples"] == 7
        assert row["tokens_per_call"]["value"] == pytest.approx(7 * 16 / drawn["calls"].sum())
        assert row["speed_up_calls"]["value"] == pytest.approx(7 * 16 / drawn["calls"].sum())
        assert row["accuracy"]["all_correct"]["hits"] == sum(all(found.values()) for found in hits)
        assert row["accuracy"]["attributes"]["shape"]["total"] == sum(
            "red" in prompt for prompt in PROMPTS[:7]
        )
        far = row["features"]["shapes"]
        assert far["frechet_to_real"]["value"] == pytest.approx(
            frechet_distance(features[text], real), rel=1e-4
        )
        to_plain = frechet_distance(features[text], features[ROWS[0]])
        assert far["frechet_to_plain"]["value"] == pytest.approx(to_plain, rel=1e-4, abs=1e-6)
        same = int((drawn["tokens"] == plain["tokens"]).all(1).sum())
        assert row["identical_samples"] == (same if text in (ROWS[0], ROWS[2]) else None)
        assert row["divergence"] is None and math.isfinite(row["wall_clock"]["speed_up"]["p50"])
    assert [row["kind"] for row in document["rows"]] == ["plain", "control", "lossless", "lossless"]
    assert document["rows"][2]["identical_samples"] == 7
    assert document["rows"][2]["features"]["shapes"]["frechet_to_plain"]["value"] == pytest.approx(
        0, abs=1e-6
    )
    assert document["references"]["tokenizer"]["features"]["shapes"]["frechet_to_real"]["value"] > 0
    table = quality_table(document).splitlines()
    assert len(table) == 2 + 4 + 1 and "speculative-jacobi:window=4 " in table[4]
    assert Image.open(folder / "pictures.png").height > 6 * 96


def test_a_lossy_sampler_is_called_so(whole, tmp_path, monkeypatch):
    from visual_spec.samplers.jacobi import SpeculativeJacobiSampler

    monkeypatch.setattr(SpeculativeJacobiSampler, "lossless", False)
    monkeypatch.setattr(SpeculativeJacobiSampler, "identical", False)
    document = evaluate_tiny(tmp_path, rows=ROWS[::2], samples=3)
    assert document is not None
    assert [row["kind"] for row in document["rows"]] == ["plain", "lossy"]


def test_clocks_by_hand():
    found = clock_figures(([4, 2], [4, 2]), ([2.0, 3.0], [4.0, 1.5]), ([1.0, 2.0, 4.0], [3.0, 3.0, 3.0]))
    assert found["seconds_per_picture"]["p50"] == 1.0  # of 0.5 and 1.5
    assert found["speed_up"]["p50"] == pytest.approx((2.0 + 0.5) / 2)
    assert found["alone_seconds"]["p50"] == 2.0 and found["alone_speed_up"]["p50"] == 1.5
    apart = clock_figures(([4, 2], [6]), ([2.0, 3.0], [12.0]), None)
    assert apart["speed_up"] == {"p20": 2.0, "p50": 2.0, "p80": 2.0} and apart["alone_speed_up"] is None


def test_pictures_are_timed_alone_once(tmp_path):
    document = evaluate_tiny(tmp_path, rows=ROWS[::2], samples=3, alone=2)
    assert document is not None
    for row in document["rows"]:
        for clock in ("wall_clock", "processor_time"):
            assert 0 < row[clock]["alone_seconds"]["p50"]
    assert document["rows"][0]["wall_clock"]["alone_speed_up"] == {"p20": 1.0, "p50": 1.0, "p80": 1.0}
    again = evaluate_tiny(tmp_path, rows=ROWS[::2], samples=3, alone=2)
    assert again is not None and again["rows"] == document["rows"]  # to the last digit: not measured anew


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 1}, "at least 2 samples"),
        ({"batch_size": 0}, "batch of at least 1"),
        ({"rank": 2, "shards": 2}, "rank from 0 to shards - 1"),
        ({"samples": 17}, "16 prompts for 17 samples in batches of 3; pass 18"),
    ],
)
def test_bad_input_is_refused_before_a_folder_is_made(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        evaluate_tiny(tmp_path / "new", **changes)
    assert not (tmp_path / "new").exists()


def test_the_command(tmp_path, monkeypatch, capsys):
    model = tmp_path / "tiny"
    tiny_pipeline().save_pretrained(model)
    monkeypatch.setattr(tasks, "shapes_task", lambda count, size: make_task(count))
    monkeypatch.setattr("visual_spec.data.shapes_parser.score", score)
    monkeypatch.setattr(
        "visual_spec.eval.quality.features.load_shapes_features", lambda: make_judge().extractors["shapes"]
    )
    arguments = ["--model", str(model), "--out", str(tmp_path / "out"), "--device", "cpu", "--alone", "0"]
    arguments += ["--samplers", *ROWS[2:], ROWS[0], "--controls", ROWS[1], "--guidance-scale", "2"]
    arguments += ["--batch-size", "3", "--samples", "7"]
    assert command.main([*arguments, "--rank", "0", "--shards", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "other processes have samples to draw" in captured.err
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command.main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out.splitlines()[-1])
    assert document == json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["name"] for row in document["rows"]] == list(ROWS)  # plain decoding first, and once
    expected = evaluate_tiny(tmp_path / "again")
    assert expected is not None
    assert timeless(document)["rows"] == timeless(expected)["rows"]
    assert "block 1 of 1" in captured.err and "| autoregressive " in captured.out
    assert command.main(arguments) == 0  # everything is there already
    shown = capsys.readouterr().out
    assert "| autoregressive " in shown and "{" not in shown
    with pytest.raises(ValueError, match="unknown sampler 'jacobi'"):
        command.main([*arguments, "--samplers", "jacobi"])


def test_the_task_is_the_held_out_prompts_and_their_scenes():
    from visual_spec.data import shapes, shapes_parser

    task = tasks.shapes_task(3, 128)
    assert task.prompts == shapes.held_out_prompts(3)
    for prompt, picture in zip(task.prompts, task.pictures, strict=True):
        assert all(shapes_parser.score(prompt, picture).values())
