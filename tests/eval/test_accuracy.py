"""Prompt accuracy: resuming, splitting over processes, the interval, and the summary against a plain count."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tiny import tiny_pipeline
from visual_spec.data import shapes, shapes_parser
from visual_spec.eval import accuracy
from visual_spec.eval.accuracy import evaluate_accuracy, read_records, summarise, wilson_interval
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler

PROMPTS = [f"a {colour} {shape}" for colour in ("red", "blue") for shape in ("circle", "square")] * 2


def score(prompt: str, picture: Image.Image) -> dict[str, bool]:
    """Depends on the prompt and on every pixel; some prompts ask for less than others."""
    values = np.asarray(picture, np.int64)
    hits = {"colour": bool(values.sum() % 2), "shape": bool(values[::2].sum() % 3 == 0)}
    return hits if "red" in prompt else {"colour": hits["colour"]}


def evaluate(folder, pipe=None, **changes):
    settings = dict(samples=7, batch_size=3, prompts=PROMPTS, score=score, law={"guidance_scale": 2.0})
    return evaluate_accuracy(pipe or tiny_pipeline(), folder, **{**settings, **changes})


def test_records_are_those_of_drawing_each_sample_alone(tmp_path):
    records = evaluate(tmp_path, seed=40)
    assert [record["index"] for record in records] == list(range(7))
    pipe = tiny_pipeline()
    for record in records:
        generator = torch.Generator().manual_seed(40 + record["index"])
        output = pipe(PROMPTS[record["index"]], guidance_scale=2.0, generator=generator)
        assert record["hits"] == score(record["prompt"], output.images[0])
        assert (record["seed"], record["calls"], record["tokens"]) == (40 + record["index"], 16, 16)
    assert json.loads((tmp_path / "summary.json").read_text())["samples"] == 7


def test_an_interrupted_run_goes_on_and_ends_as_if_it_had_not_been(tmp_path):
    whole = evaluate(tmp_path / "whole")
    pipe, drawn = tiny_pipeline(), []
    decode_tokens = pipe.decode_tokens

    def failing(tokens, output_type="pil"):
        drawn.append(len(tokens))
        if len(drawn) == 2:
            raise KeyboardInterrupt
        return decode_tokens(tokens, output_type)

    pipe.decode_tokens = failing
    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        evaluate(folder, pipe)
    assert [record["index"] for record in read_records(folder)] == [0, 1, 2]
    assert not (folder / "summary.json").exists()
    shard = folder / "samples-00000.jsonl"
    with shard.open("a") as file:
        file.write('{"index": 3, "prompt": "a bl')  # the machine stopped within a line
    assert len(read_records(folder)) == 3

    drawn.clear()
    pipe.decode_tokens = lambda tokens, output_type="pil": (
        drawn.append(len(tokens)) or decode_tokens(tokens, output_type)
    )
    assert evaluate(folder, pipe) == whole
    assert sum(drawn) == 4  # the three samples that were there are not drawn again
    assert len(shard.read_text().splitlines()) == 7
    assert (folder / "summary.json").read_text() == (tmp_path / "whole" / "summary.json").read_text()
    drawn.clear()
    assert evaluate(folder, pipe) == whole and drawn == []


def test_processes_share_the_samples_and_any_batch_gives_the_same(tmp_path):
    whole = evaluate(tmp_path / "whole", batch_size=2)
    folder = tmp_path / "split"
    first = evaluate(folder, rank=1, world_size=3, batch_size=5)
    assert [record["index"] for record in first] == [1, 4]
    evaluate(folder, rank=2, world_size=3)
    assert not (folder / "summary.json").exists()
    assert evaluate(folder, rank=0, world_size=3, batch_size=1) == whole
    assert (folder / "summary.json").exists()
    more = evaluate(folder, samples=8)  # grown by one, with another number of processes
    assert more[:7] == whole and len(more) == 8


def test_accelerated_decoding_scores_the_same_in_fewer_calls(tmp_path):
    plain = evaluate(tmp_path / "plain")
    fast = evaluate(tmp_path / "fast", tiny_pipeline(SpeculativeJacobiSampler(window=4)))
    assert [r["hits"] for r in plain] == [r["hits"] for r in fast]
    assert sum(r["calls"] for r in fast) < sum(r["calls"] for r in plain)


def test_a_folder_holds_one_setting(tmp_path):
    evaluate(tmp_path)
    with pytest.raises(
        ValueError, match=r"other settings \(law: .*2\.0.* there, .*3\.0.* here\); pass another folder"
    ):
        evaluate(tmp_path, law={"guidance_scale": 3.0})
    with pytest.raises(ValueError, match="sampler: .*AutoregressiveSampler.* there, .*'window': 4.* here"):
        evaluate(tmp_path, tiny_pipeline(SpeculativeJacobiSampler(window=4)))
    with pytest.raises(ValueError, match="sample 0 .* has the prompt 'a red circle', not 'a blue circle'"):
        evaluate(tmp_path, prompts=["a blue circle"] * 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "at least 1 sample"),
        ({"batch_size": 0}, "batch of at least 1"),
        ({"rank": 2, "world_size": 2}, "rank from 0 to world_size - 1"),
        ({"samples": 9}, "8 prompts for 9 samples"),
    ],
)
def test_bad_input_is_refused_before_the_folder_is_made(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        evaluate(tmp_path / "new", **changes)
    assert not (tmp_path / "new").exists()


def test_pictures_are_kept_on_request(tmp_path):
    evaluate(tmp_path, samples=2, save_images=True)
    generator = torch.Generator().manual_seed(1)
    expected = tiny_pipeline()(PROMPTS[1], guidance_scale=2.0, generator=generator).images[0]
    assert Image.open(tmp_path / "images" / "00001.png").tobytes() == expected.tobytes()
    assert sorted(p.name for p in (tmp_path / "images").iterdir()) == ["00000.png", "00001.png"]


def test_the_summary_is_a_plain_count():
    hits = [{"a": True, "b": False}, {"a": True}, {"a": False, "b": True}, {"a": True, "b": True}]
    records = [{"hits": h, "calls": c, "tokens": 16} for h, c in zip(hits, (16, 8, 4, 4), strict=True)]
    summary = summarise(records)
    assert summary["samples"] == 4
    assert (summary["all_correct"]["hits"], summary["all_correct"]["rate"]) == (2, 0.5)
    assert summary["mean_attribute"] == (0.5 + 1 + 0.5 + 1) / 4
    counts = {name: (rate["hits"], rate["total"]) for name, rate in summary["attributes"].items()}
    assert counts == {"a": (3, 4), "b": (2, 3)}
    assert summary["tokens_per_call"] == 64 / 32
    table = accuracy.summary_table(summary)
    assert "50.0 %" in table and "2 of 3" in table and "75.0 %" in table
    with pytest.raises(ValueError, match="no samples"):
        summarise([])


@pytest.mark.parametrize(("hits", "total"), [(0, 10), (1, 10), (81, 200), (160, 200), (10, 10), (1, 1)])
def test_the_wilson_interval_solves_its_equation(hits, total):
    low, high = wilson_interval(hits, total)
    rate = hits / total
    assert 0 <= low <= rate <= high <= 1
    # The ends are the rates from which the observed one is z standard deviations away (Wilson 1927).
    for end in (low, high):
        if 0 < end < 1:
            assert abs(rate - end) / math.sqrt(end * (1 - end) / total) == pytest.approx(1.959964, rel=1e-5)
    assert (low == 0) == (hits == 0) and (high == 1) == (hits == total)


@pytest.mark.parametrize(("hits", "total"), [(0, 0), (-1, 5), (6, 5)])
def test_the_interval_of_nothing_is_refused(hits, total):
    with pytest.raises(ValueError, match="0 <= hits <= total"):
        wilson_interval(hits, total)


def test_the_default_score_is_the_parser_on_held_out_prompts(tmp_path):
    """A pipeline that paints the scene its prompt asks for, from the data's own renderer, is right every time."""
    scenes, pictures = shapes.sample_dataset(3, 5, held_out=True)
    prompts = [shapes.caption(scene) for scene in scenes]
    by_prompt = dict(zip(prompts, pictures, strict=True))
    pipe = tiny_pipeline()

    class Painter:
        sampler, transformer = pipe.sampler, pipe.transformer

        def __call__(self, batch, generator, output_type):
            images = [Image.fromarray(by_prompt[prompt]) for prompt in batch]
            tokens = torch.zeros(len(batch), 16, dtype=torch.long)
            trace = type("Trace", (), {"target_calls": torch.full((len(batch),), 16)})
            return type("Output", (), {"images": images, "tokens": tokens, "trace": trace})

    painter: object = Painter()
    records = evaluate_accuracy(painter, tmp_path, samples=3, prompts=prompts)  # pyright: ignore[reportArgumentType]
    for record, scene in zip(records, scenes, strict=True):
        expected = shapes_parser.score(shapes.caption(scene), by_prompt[record["prompt"]])
        assert record["hits"] == expected and all(expected.values())


def test_the_command_resumes_and_reports(tmp_path, monkeypatch, capsys):
    model = tmp_path / "tiny"
    tiny_pipeline().save_pretrained(model)
    monkeypatch.setattr(shapes, "held_out_prompts", lambda count: PROMPTS[:count])
    monkeypatch.setattr(shapes_parser, "score", score)
    arguments = ["--model", str(model), "--out", str(tmp_path / "out"), "--device", "cpu", "--sampler"]
    arguments += [
        "speculative-jacobi",
        "--window",
        "4",
        "--guidance-scale",
        "2",
        "--batch-size",
        "2",
        "--samples",
    ]
    assert accuracy.main([*arguments, "3"]) == 0
    capsys.readouterr()
    assert accuracy.main([*arguments, "5"]) == 0
    captured = capsys.readouterr()
    assert "3 samples there, 2 to draw" in captured.err
    summary = json.loads(captured.out.splitlines()[-1])
    records = evaluate(tmp_path / "again", tiny_pipeline(SpeculativeJacobiSampler(window=4)), samples=5)
    assert summary == summarise(records)
    assert accuracy.main([*arguments, "5", "--coupling", "maximal"]) == 2
    assert "coupling='gumbel'" in capsys.readouterr().err
