"""An evaluation of a tiny next-scale pipeline: its rows, its figures against plain counts, its charts."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.scale_judge import make_judge, score
from tests.tiny import seeded, tiny_pipeline
from tests.tiny_scales import SIDES, tiny_scale_pipeline
from visual_spec.eval.defaults import scale_settings, settings_of_model
from visual_spec.eval.draws import draw
from visual_spec.eval.media import pictures_of
from visual_spec.eval.quality import command, figures, tasks
from visual_spec.eval.quality.evaluate import evaluate, folder_name
from visual_spec.eval.quality.figures import quality_table
from visual_spec.eval.quality.tasks import Task, classes_task, task_of
from visual_spec.eval.report import frontier
from visual_spec.eval.settings import check_samplers, parse_setting
from visual_spec.models.next_scale.scale_budget import cache_bytes
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales import ScaleWiseSampler

LABELS = ["0", "1", "2", "3", "4"] * 2
LAW = TokenLaw(guidance_scale=2.5, top_k=9)
PLAIN = "scale-wise:num_draft_scales=all"
ROWS = (
    PLAIN,
    f"{PLAIN},temperature=0.5",
    "scale-wise:num_draft_scales=0",
    "scale-wise:num_draft_scales=2",
    f"{PLAIN},cache_share=0.7",
    f"{PLAIN},cache_share=1.0",
    "scale-wise:num_draft_scales=2,measure=true",
)
KINDS = ["plain", "control", "lossy", "lossy", "lossy", "lossless", "lossy"]


def run(folder, rows=ROWS, pipe=None, **changes):
    task = Task(LABELS, np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3), np.uint8))
    settings = [parse_setting(text, LAW, 0) for text in rows]
    options = {"samples": 7, "batch_size": 3, **changes}
    return evaluate(pipe or tiny_scale_pipeline(), settings, task, make_judge(), folder, **options)


@pytest.fixture(autouse=True, scope="module")
def few_resamples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_RESAMPLES", 5)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scales")
    return folder, run(folder, alone=1)


def test_the_figures_are_plain_counts(whole):
    _, document = whole
    pipe: Any = tiny_scale_pipeline()
    assert [row["kind"] for row in document["rows"]] == KINDS
    config = dict(pipe.transformer.config)
    full = cache_bytes(config, None, 1, True, torch.float32)
    plain = None
    for row, text in zip(document["rows"], ROWS, strict=True):
        drawn = draw(pipe, parse_setting(text, LAW, 0), LABELS[:7], 0)
        plain = plain or drawn
        hits = [
            score(label, one) for label, one in zip(LABELS, pictures_of(pipe, drawn["tokens"]), strict=False)
        ]
        assert row["accuracy"]["all_correct"]["hits"] == sum(all(found.values()) for found in hits)
        assert row["accuracy"]["attributes"]["shape"]["hits"] == sum(found["shape"] for found in hits)
        assert row["tokens_per_call"]["value"] == 30 / 4
        with parse_setting(text, LAW, 0).on(pipe):  # the trace tells the same
            sizes = pipe(LABELS[:7], generator=seeded(*range(7))).trace.cache_bytes
        held = sum(sizes) if "measure" in text else max(sizes)
        assert row["cache"]["held"] == drawn["cache_held"] / 7 == held / 7
        assert row["cache"]["share"] == pytest.approx(drawn["cache_held"] / 7 / full.held)
        same = int((drawn["tokens"] == plain["tokens"]).all(1).sum())
        assert row["identical_samples"] == (same if text in (PLAIN, f"{PLAIN},cache_share=1.0") else None)
        assert row["peak_memory"] is None and row["wall_clock"]["alone_seconds"]["p50"] > 0
    first, *_, small_cache, whole_cache, measured = (row["cache"] for row in document["rows"])
    assert (first["held"], first["peak"]) == (full.held, full.peak) and whole_cache["share"] == 1
    assert small_cache["share"] == pytest.approx(19 / 28)  # 0.7 of the 28 tokens of two layers
    assert document["rows"][5]["identical_samples"] == 7
    # The large model's cache stays while it measures what the small one draws.
    small = cache_bytes({**config, "num_layers": 1}, None, 1, True, torch.float32, known=2)
    assert measured["held"] == full.held + small.held
    assert measured["peak"] == max(full.held + small.peak, full.peak + small.held)
    assert document["rows"][6]["divergence"]["value"] > 0 and document["rows"][3]["divergence"] is None
    assert document["rows"][6]["accuracy"] == document["rows"][3]["accuracy"]


def test_what_is_drawn_is_what_the_pipeline_draws():
    pipe = tiny_scale_pipeline()
    arrays = draw(pipe, parse_setting("scale-wise:num_draft_scales=1,top_k=3", LAW, 40), LABELS[2:6], 2)
    for place, label in enumerate(LABELS[2:6]):
        alone = pipe(
            label, generator=seeded(42 + place), num_draft_scales=1, guidance_scale=2.5, top_k=3, top_p=1.0
        )
        assert np.array_equal(alone.tokens[0].numpy(), arrays["tokens"][place])
        shown = pictures_of(pipe, arrays["tokens"][place : place + 1])[0]
        assert np.array_equal(shown, np.asarray(alone.images[0]))
    assert not arrays["lossless"] and pipe.config["num_draft_scales"] is None


def test_smooth_pictures_are_kept_as_canvases(tmp_path):
    """Their ids do not tell them."""
    smooth = f"{PLAIN},smooth=true"
    document = run(tmp_path, [PLAIN, smooth], samples=4, batch_size=2)
    assert document is not None and [row["kind"] for row in document["rows"]] == ["plain", "lossy"]
    pipe = tiny_scale_pipeline(sampler=ScaleWiseSampler(smooth=True))
    for first in (0, 2):
        kept = np.load(tmp_path / folder_name(smooth) / f"draws-00000{first}-00000{first + 2}.npz")
        assert "tokens" not in kept and kept["canvas"].dtype == np.float32 and int(kept["length"]) == 30
        want = pipe(
            LABELS[first : first + 2], generator=seeded(first, first + 1), num_draft_scales=4,
            guidance_scale=2.5, top_k=9, top_p=1.0,
        ).images  # fmt: skip
        assert np.array_equal(pictures_of(tiny_scale_pipeline(), kept["canvas"]), np.stack(want))
        assert "tokens" in np.load(tmp_path / folder_name(PLAIN) / f"draws-00000{first}-00000{first + 2}.npz")


def test_a_run_goes_on_and_rows_are_added(whole, tmp_path):
    run(tmp_path, ROWS[:2], samples=4)
    grown = run(tmp_path, ROWS[:4])
    assert grown is not None
    for row, want in zip(grown["rows"], whole[1]["rows"], strict=False):
        assert row["accuracy"] == want["accuracy"] and row["cache"] == want["cache"]
    drawn = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/draws-*")}
    run(tmp_path, ROWS[:4])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/draws-*")} == drawn
    with pytest.raises(ValueError, match="weights: [0-9a-f]{12} there"):
        run(tmp_path, ROWS[:2], pipe=tiny_scale_pipeline(pair=False))


def test_the_table_tells_the_caches(whole):
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in quality_table(whole[1]).splitlines()
    ]
    assert lines[0][2] == "cache KiB" and "class %" in lines[0]
    shown = {line[0]: line[2] for line in lines[2:]}
    held = whole[1]["rows"][4]["cache"]["held"]
    assert shown[ROWS[4]] == f"{held / 1024:.0f} (68 %)" and shown[PLAIN].endswith("(100 %)")


def test_the_charts_have_cache_and_speed_against_quality(whole, tmp_path):
    pytest.importorskip("matplotlib")
    document = json.loads((whole[0] / "results.json").read_text())
    for place, row in enumerate(document["rows"]):  # tiny models are right by chance only
        row["accuracy"]["all_correct"] = {"value": 0.9 - 0.1 * place, "low": 0.1, "high": 0.95}
    cache_accuracy, clock_accuracy, cache_distance, _ = frontier.draw_frontier(document).axes[:4]
    assert cache_accuracy.get_xlabel() == "times less cache" == cache_distance.get_xlabel()
    assert cache_accuracy.get_ylabel() == "class accuracy, plain = 1"
    assert "processor time" in clock_accuracy.get_xlabel()
    found = [
        (float(bar[0].get_xdata()[0]), float(bar[0].get_ydata()[0])) for bar in cache_accuracy.containers
    ]
    shares = [row["cache"]["share"] for row in document["rows"]]
    assert found == [pytest.approx((1 / share, 1 - 0.1 / 0.9 * place)) for place, share in enumerate(shares)]
    page = tmp_path / "page.html"
    assert frontier.main([str(whole[0] / "results.json"), "--out", str(page)]) == 0
    text = page.read_text()
    assert "cache a picture, KiB" in text and "class right" in text and "speed-up in calls" not in text
    assert f"{100 * shares[4]:.1f} %" in text and "http" not in text.replace("http://www.w3.org", "")


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
    assert (
        scale_settings(compressed, pipe.config, lambda part: {"scales": SIDES}).plain
        == f"{PLAIN},cache_share=off"
    )
    tiny_pipeline().save_pretrained(tmp_path / "next")
    other = settings_of_model(str(tmp_path / "next"))
    exact = [f"coupling={one},acceptance=exact" for one in ("gumbel", "maximal", "independent")]
    assert other.plain == "autoregressive" and other.facts.unit == "tokens"
    assert other.others == ("speculative-jacobi", *(f"speculative-jacobi:{text}" for text in exact))
    assert other.controls == ("autoregressive:temperature=0.9", "autoregressive:seed=1000000")
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ValueError, match="holds a FluxPipeline"):
        settings_of_model(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scale-wise:guidance_until=3", "guidance of a next-scale model grows from scale to scale"),
        (
            "autoregressive",
            "autoregressive: sampler is AutoregressiveSampler, which does not fit a next-scale",
        ),
        ("scale-wise:num_draft_scales=7", "num_draft_scales=7; pass an integer from 1 to 4"),
    ],
)
def test_rows_that_do_not_fit(text, message):
    with pytest.raises(ValueError, match=message):
        check_samplers(tiny_scale_pipeline(), [parse_setting(text, LAW, 0)])
    with pytest.raises(
        ValueError, match="scale-wise: sampler is ScaleWiseSampler, which does not fit a next-token"
    ):
        check_samplers(tiny_pipeline(), [parse_setting("scale-wise", LAW, 0)])


def test_the_task_of_a_class_model_is_its_classes():
    from visual_spec.data import shapes_classes

    task = classes_task(50, 128)
    assert task.prompts == [*shapes_classes.CLASS_NAMES, *shapes_classes.CLASS_NAMES[:2]]
    for prompt, picture in zip(task.prompts[::7], task.pictures[::7], strict=True):
        assert all(shapes_classes.score_class(prompt, picture).values())
    pipe = tiny_scale_pipeline(num_classes=48, id2label=list(shapes_classes.CLASS_NAMES))
    found, scorer = task_of(pipe, 3)
    assert found.prompts == task.prompts[:3] and scorer is shapes_classes.score_class
    assert found.pictures.shape == (3, 8, 8, 3)
    with pytest.raises(ValueError, match="draws other classes than those of `shapes`, which no parser reads"):
        task_of(tiny_scale_pipeline(), 3)


def test_the_command(tmp_path, monkeypatch, capsys):
    names = ["zero", "one", "two", "three", "four"]
    tiny_scale_pipeline(id2label=names).save_pretrained(tmp_path / "model")
    monkeypatch.setattr("visual_spec.data.shapes_classes.CLASS_NAMES", tuple(names))
    pictures = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3), np.uint8)
    monkeypatch.setattr(
        tasks, "classes_task", lambda count, size: Task((names * 2)[:count], pictures[:count])
    )
    monkeypatch.setattr(
        "visual_spec.data.shapes_classes.score_class", lambda name, one: score(names.index(name), one)
    )
    monkeypatch.setattr(
        "visual_spec.eval.quality.features.load_shapes_features", lambda: make_judge().extractors["shapes"]
    )
    arguments = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    arguments += ["--batch-size", "5", "--samples", "5", "--alone", "0", "--controls"]
    arguments += ["--top-k", "9", "--top-p", "1"]
    assert command.main([*arguments, "--json"]) == 0
    captured = capsys.readouterr().out
    document = json.loads(captured.splitlines()[-1])
    rows = settings_of_model(str(tmp_path / "model"))
    assert [row["name"] for row in document["rows"]] == [rows.plain, *rows.others]
    assert document["settings"]["law"]["guidance_scale"] == 2.5 and document["settings"]["law"]["top_k"] == 9
    again = run(tmp_path / "again", rows=[PLAIN, "scale-wise:num_draft_scales=2"], samples=5, batch_size=5)
    assert again is not None
    assert document["rows"][0]["accuracy"] == again["rows"][0]["accuracy"]
    assert "| cache KiB |" in captured
