"""An evaluation of tiny pipelines of continuous tokens: settings read off their folders, figures against counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.scale_judge import make_judge, score
from tests.tiny import seeded
from tests.tiny_latents import tiny_latent_pipeline
from visual_spec.eval.defaults import settings_of_model
from visual_spec.eval.draws import draw
from visual_spec.eval.media import pictures_of
from visual_spec.eval.quality import figures
from visual_spec.eval.quality.evaluate import evaluate
from visual_spec.eval.quality.figures import quality_table
from visual_spec.eval.quality.tasks import Task
from visual_spec.eval.report import frontier
from visual_spec.eval.settings import check_samplers, parse_setting
from visual_spec.samplers.core.law import TokenLaw

LABELS = ["0", "1", "2", "3", "4"]
LAW = TokenLaw(guidance_scale=2.0)
# Plain decoding, rivals, and speculation that is exact and that is not.
ROWS = {
    "continuous": "plain",
    "continuous:temperature=0.9": "control",
    "continuous:steps=5": "lossy",
    "continuous:head_steps=3": "lossy",
    "continuous:head_steps=6,last_head_steps=2": "lossy",
    "head-speculation:levels=3": "lossless",
    "speculative-continuous:rule=aligned,tolerance=0.1": "lossy",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    task = Task(LABELS, np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), np.uint8))
    settings = [parse_setting(text, LAW, 0) for text in ROWS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_RESAMPLES", 5)
        folder = tmp_path_factory.mktemp("latents")
        return evaluate(
            tiny_latent_pipeline(), settings, task, make_judge(), folder, samples=4, batch_size=2, alone=1
        )


def test_the_figures_are_plain_counts(whole):
    pipe: Any = tiny_latent_pipeline()
    assert [row["kind"] for row in whole["rows"]] == list(ROWS.values())
    for row, text in zip(whole["rows"], ROWS, strict=True):
        setting = parse_setting(text, LAW, 0)
        parts = [draw(pipe, setting, LABELS[at : at + 2], at) for at in (0, 2)]
        pictures = np.concatenate([pictures_of(pipe, part["canvas"]) for part in parts])
        hits = [score(label, one) for label, one in zip(LABELS, pictures, strict=False)]
        assert row["accuracy"]["all_correct"]["hits"] == sum(all(found.values()) for found in hits)
        calls, heads = (np.concatenate([part[name] for part in parts]) for name in ("calls", "head_calls"))
        assert row["head_calls"]["value"] == pytest.approx(heads.mean())
        assert row["tokens_per_call"]["value"] == pytest.approx(16 * 4 / calls.sum())
        assert row["identical_samples"] == (4 if text == "continuous" else None)
        assert row["lossless"] == (row["kind"] in ("plain", "control", "lossless"))
    rows = {row["name"]: row for row in whole["rows"]}
    assert rows["continuous"]["head_calls"]["value"] == 16 * 6
    assert rows["continuous:steps=5"]["head_calls"]["value"] == 5 * 6
    falling = [round(6 - 4 * call / 15) for call in range(16)]
    assert rows["continuous:head_steps=6,last_head_steps=2"]["head_calls"]["value"] == sum(falling)
    assert rows["speculative-continuous:rule=aligned,tolerance=0.1"]["tokens_per_call"]["value"] >= 1


def test_what_is_drawn_is_what_the_pipeline_draws():
    pipe: Any = tiny_latent_pipeline()
    arrays = draw(pipe, parse_setting("continuous:steps=5", LAW, 40), LABELS[1:3], 1)
    with parse_setting("continuous:steps=5", LAW, 40).on(pipe):
        alone = pipe(LABELS[2], generator=seeded(42)[0], guidance_scale=2.0)
    shown = pictures_of(pipe, arrays["canvas"])[1].astype(int)
    assert np.abs(shown - np.asarray(alone.images[0]).astype(int)).max() <= 1  # a batch rounds otherwise


def test_tables_and_charts_show_calls_of_the_head(whole):
    table = quality_table(whole)
    assert "| head calls |" in " ".join(table.split()) and "| 96 |" in " ".join(table.split())
    assert len({line.count("|") for line in table.splitlines()}) == 1
    across, up = frontier.axes_of(whole, "shapes")
    assert [axis.title.partition(",")[0] for axis in across] == [
        "speed-up in model calls",
        "speed-up in processor time",
    ]
    plain, fewer = whole["rows"][0], whole["rows"][2]
    assert across[0].read(fewer, plain) == pytest.approx((16 / 5,) * 3) and len(up) == 2


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
