"""The command line on a tiny next-scale model: class names, who draws which scales, and what is promised."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.command import check_refused, generate, last_line, pixels
from tests.helpers.tiny import tiny_pipeline
from tests.helpers.tiny_scales import tiny_scale_pipeline, tiny_var
from visual_spec import cli
from visual_spec.pipelines import embedded
from visual_spec.samplers.scales.scales import ScaleWiseSampler

NAMES = ["red circle", "blue square", "green star", "white cross", "black diamond"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_scale_pipeline(id2label=NAMES).save_pretrained(folder)
    return str(folder)


def test_pictures_of_classes_by_name_and_number(model, tmp_path, capsys):
    assert generate(model, tmp_path, "red circle", "3", "--seed", "5", "--json") == 0
    document = last_line(capsys)
    assert document["sampler"]["name"] == "scale-wise" and [one["calls"] for one in document["images"]] == [
        4,
        4,
    ]
    pipe = tiny_scale_pipeline()
    for image, label in zip(document["images"], (0, 3), strict=True):
        want = pipe(label, generator=torch.Generator().manual_seed(image["seed"])).images[0]
        assert np.array_equal(pixels(image["file"]), np.asarray(want))
    assert generate(model, tmp_path, "red cirkle") == 2
    assert "unknown class 'red cirkle'; close names are 'red circle'" in capsys.readouterr().err


def test_the_plan_arrives(model, tmp_path, capsys):
    tiny_var(9, torch.float32, num_layers=1).save_pretrained(tmp_path / "other")
    row = f"scale-wise:num_draft_scales=3,cache_share=0.7,refiner={tmp_path / 'other'}"
    assert generate(model, tmp_path / "out", "red circle", "--sampler", row, "--json") == 0
    document = last_line(capsys)
    settings = {"num_draft_scales": 3, "cache_share": 0.7, "refiner": str(tmp_path / "other"), "ramp": True}
    assert settings.items() <= document["sampler"].items()
    other = tiny_scale_pipeline(refiner=tiny_var(9, torch.float32, num_layers=1))
    other.compress(
        *other.calibrate(range(5), 0.7, generator=[torch.Generator().manual_seed(i) for i in range(5)])
    )
    want = other(0, generator=torch.Generator().manual_seed(0), num_draft_scales=3).images[0]
    assert np.array_equal(pixels(document["images"][0]["file"]), np.asarray(want))


def test_the_sampler_is_the_saved_one_unless_another_is_named(tmp_path, capsys):
    pipe = tiny_scale_pipeline(sampler=ScaleWiseSampler(ramp=False))
    pipe.save_pretrained(tmp_path / "flat")
    assert generate(str(tmp_path / "flat"), tmp_path / "own", "0", "--json") == 0
    own = last_line(capsys)
    want = pipe(0, generator=torch.Generator().manual_seed(0)).images[0]
    assert np.array_equal(pixels(own["images"][0]["file"]), np.asarray(want)) and not own["sampler"]["ramp"]
    assert generate(str(tmp_path / "flat"), tmp_path / "other", "0", "--sampler", "scale-wise", "--json") == 0
    assert last_line(capsys)["sampler"]["ramp"]


def test_two_models_are_compared_with_one(model, tmp_path, capsys):
    assert generate(model, tmp_path, "red circle", "3", "--compare") == 0
    out = capsys.readouterr().out
    assert "Not what plain decoding draws with these seeds. The output is: lossy." in out and " no" in out
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["identical"] for row in document["comparison"]] == [False, False]
    pipe = tiny_scale_pipeline()
    want = pipe(0, generator=torch.Generator().manual_seed(0), num_draft_scales=2).images[0]
    assert np.array_equal(pixels(document["comparison"][0]["file"]), np.asarray(want))
    page = (tmp_path / "comparison.html").read_text()
    assert "who drew which scale" in page and "2 of 4 scales" in page and "paid" not in page
    assert pixels(tmp_path / "comparison.png").shape[1] == 1000


def test_one_model_is_the_same_pixel_for_pixel(model, tmp_path, capsys):
    row = "scale-wise:num_draft_scales=all"
    assert generate(model, tmp_path, "red circle", "--compare", "--sampler", row) == 0
    assert "Every picture is the same, pixel for pixel." in capsys.readouterr().out
    whole = f"{row},cache_share=1"
    assert generate(model, tmp_path / "whole", "red circle", "--compare", "--sampler", whole) == 0
    assert "Every picture is the same, pixel for pixel." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampler", "autoregressive"], "AutoregressiveSampler, which does not fit a next-scale model"),
        (
            ["--window", "8"],
            "the scale-wise sampler has no setting window; it takes cache_share: ",
        ),
        (["--guidance-until", "3"], "--guidance-until counts the tokens of a next-token model"),
        (["--sampler", "scale-wise:num_draft_scales=9"], "num_draft_scales=9; pass an integer from 0 to 4"),
        (["--sampler", "scale-wise:cache_share=0.2"], "pass a share of at least 0.6429"),
        (["--sampler", "scale-wise:refiner=nowhere"], "no refiner 'nowhere'"),
    ],
)
def test_what_does_not_fit_is_one_line_and_writes_nothing(model, tmp_path, capsys, arguments, message):
    check_refused(
        generate(model, tmp_path / "out", "red circle", *arguments), message, capsys, tmp_path / "out"
    )


def test_next_token_models_are_told_too(tmp_path, capsys):
    tiny_pipeline().save_pretrained(tmp_path / "next")
    for text in ("scale-wise", "scale-wise:num_draft_scales=2"):
        assert generate(str(tmp_path / "next"), tmp_path / "out", "a red circle", "--sampler", text) == 2
        error = capsys.readouterr().err
        assert (
            "ScaleWiseSampler, which does not fit a next-token model; those that fit: Autoregressive" in error
        )


def test_models_lists_it_with_its_pixels(model, capsys, monkeypatch):
    monkeypatch.setattr(embedded, "weights_folder", lambda: Path(model).parent)
    assert cli.main(["models", "--json"]) == 0
    document = last_line(capsys)
    (fact,) = document["embedded"]
    var = next(known for known in document["models"] if known["name"] == "VAR-d16 class 256")["samplers"]
    assert (var["ScaleWiseSampler"], var["AutoregressiveSampler"]) == ("yes", "-")
    assert (fact["pipeline"], fact["image_size"]) == ("ScaleImagePipeline", 8)
    assert cli.main(["models"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (d30,) = (line for line in lines if line[:3] == ["VAR-d30", "class", "256"])
    # 2.01 billion numbers, and two rows of keys and values over 424 slots of 30 layers.
    assert d30[3:] == ["256", "680", "2010M", "8.4", "4.2", "official", "layout"]
    assert cli.main(["models", "tiny"]) == 0
    takes, refuses = capsys.readouterr().out.split("It does not take")
    assert "scale-wise" in takes and "autoregressive" not in takes and "autoregressive" in refuses
