"""ADM's Inception score, CMMD, FD-DINOv2, PSNR, SSIM and LPIPS against their formulas; and the tables of scores."""

import csv
import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.networks import (
    exact_distance,
    make_pictures,
    mean_colours,
    scores,
    spread,
    with_manifest,
)
from visual_spec.cli import main
from visual_spec.eval.quality import published
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.score_tables import scores_latex

PROMPTS = ("a bell", "an organ", "a bell") * 2


def test_adms_inception_score_is_its_formula():
    logits = 3 * torch.randn(260, 7, generator=torch.Generator().manual_seed(0))
    probabilities = logits.double().softmax(1).numpy()
    expected = []
    for part in (probabilities[:100], probabilities[100:200], probabilities[200:]):
        gaps = part * (np.log(part) - np.log(part.mean(0, keepdims=True)))
        expected.append(math.exp(gaps.sum(1).mean()))
    found = published.inception_score_adm(logits, split=100)
    assert found["value"] == pytest.approx(np.mean(expected), rel=1e-9)
    values = [
        published.inception_score_adm(
            3 * torch.randn(260, 7, generator=torch.Generator().manual_seed(seed)), split=260
        )
        for seed in range(1, 80)
    ]
    reach = np.mean([one["high"] - one["value"] for one in values])
    assert reach == pytest.approx(1.96 * np.std([one["value"] for one in values]), rel=0.3)


def test_pairs_are_compared_picture_by_picture(tmp_path, capsys):
    functional = pytest.importorskip("torchmetrics.functional.image")
    plain = with_manifest(make_pictures(tmp_path / "plain", 6, 0), PROMPTS)
    fast = with_manifest(make_pictures(tmp_path / "fast", 6, 1), PROMPTS)
    (fast / "002.png").write_bytes((plain / "002.png").read_bytes())
    found = scores(capsys, fast, "--compare-to", plain, "--metrics", "psnr", "ssim", "--batch-size", 4)
    one, other = (SampleFiles.open(path).pictures(0, 6).astype(np.float64) for path in (fast, plain))
    errors = ((one - other) ** 2).mean((1, 2, 3))
    ratios = [10 * math.log10(255**2 / error) for error in errors if error]
    assert found["psnr"]["value"] == pytest.approx(np.mean(ratios), rel=1e-5)
    assert "of 5 pairs; 1 are equal" in found["psnr"]["note"]
    pictures = [torch.from_numpy(part).permute(0, 3, 1, 2).float() for part in (one, other)]
    each = [functional.structural_similarity_index_measure(a[None], b[None], data_range=255.0).item()
            for a, b in zip(*pictures, strict=True)]  # fmt: skip
    assert found["ssim"]["value"] == pytest.approx(np.mean(each), rel=1e-4) and each[2] == pytest.approx(1.0)
    with (fast / "scores" / "prompts.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["prompt"], row["samples"]) for row in rows] == [("a bell", "4"), ("an organ", "2")]
    assert float(rows[1]["ssim"]) == pytest.approx((each[1] + each[4]) / 2, rel=1e-4)
    with (fast / "scores" / "scores.csv").open() as file:
        lines = {row["figure"]: row for row in csv.DictReader(file)}
    assert (
        float(lines["ssim"]["value"]) == found["ssim"]["value"] and lines["psnr"]["interval"] == "normal law"
    )
    # Another set beside it has other features.
    again = scores(capsys, fast, "--compare-to", fast, "--metrics", "ssim", "--batch-size", 4)
    assert again["ssim"]["value"] == pytest.approx(1.0)
    assert main(["score", str(fast), "--metrics", "ssim"]) == 2
    assert "pass --compare-to" in capsys.readouterr().err


def test_lpips_is_torchmetrics_with_the_weights_that_are_passed(tmp_path, capsys):
    source = pytest.importorskip("torchmetrics.functional.image.lpips")
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    alexnet = models.alexnet(weights=None)
    torch.save(alexnet.state_dict(), tmp_path / "alexnet.pth")
    plain = with_manifest(make_pictures(tmp_path / "plain", 3, 0, size=64), PROMPTS[:3])
    fast = with_manifest(make_pictures(tmp_path / "fast", 3, 1, size=64), PROMPTS[:3])
    asked = (fast, "--compare-to", plain, "--metrics", "lpips", "--lpips")
    found = scores(capsys, *asked, tmp_path / "alexnet.pth")["lpips"]
    scorer = source._LPIPS(pretrained=True, net="alex", pnet_rand=True).eval()
    lines = [lin.model[-1].weight.flatten() for lin in scorer.lins]
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    ends, expected = (1, 4, 7, 9, 11), []
    for index in range(3):
        stages = []
        for folder in (fast, plain):
            picture = torch.from_numpy(SampleFiles.open(folder).pictures(index, index + 1)).float() / 255
            values, found_here = ((2 * picture - 1 - shift) / scale).permute(0, 3, 1, 2), []
            for place, layer in enumerate(alexnet.features):
                values = layer(values)
                if place in ends:
                    found_here.append(values / values.norm(dim=1, keepdim=True))
            stages.append(found_here)
        expected.append(
            sum(
                ((one - other) ** 2 * weight[None, :, None, None]).sum(1).mean().item()
                for one, other, weight in zip(*stages, lines, strict=True)
            )
        )
    assert found["value"] == pytest.approx(np.mean(expected), rel=1e-4) and found["value"] > 1e-4
    torch.save({"features.0.weight": torch.zeros(1)}, tmp_path / "other.pth")
    assert main(["score", *map(str, asked), str(tmp_path / "other.pth"), "--out", str(tmp_path / "s")]) == 2
    assert "AlexNet" in capsys.readouterr().err


def test_dino_distances_are_those_of_its_class_token(tmp_path, capsys):
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    model: Any = Dinov2Model(
        Dinov2Config(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            mlp_ratio=1,
            image_size=28,
            patch_size=14,
        )
    ).eval()
    spread(model)
    model.save_pretrained(tmp_path / "dino")
    mean, deviation = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    size: dict[str, Any] = dict(size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28})
    BitImageProcessor(**size, image_mean=mean, image_std=deviation).save_pretrained(tmp_path / "dino")
    drawn, true = make_pictures(tmp_path / "drawn", 8, 0), make_pictures(tmp_path / "true", 9, 1)
    found = scores(capsys, drawn, "--reference", true, "--metrics", "dino", "--dino", tmp_path / "dino")[
        "fd_dinov2"
    ]
    rows = []
    for folder, count in ((drawn, 8), (true, 9)):
        pictures = SampleFiles.open(folder).pictures(0, count, 28) / 255
        values = torch.from_numpy((pictures - mean) / deviation).permute(0, 3, 1, 2).float()
        with torch.no_grad():
            rows.append(model(pixel_values=values).last_hidden_state[:, 0])
    assert found["value"] == pytest.approx(exact_distance(*rows), rel=1e-4) and found["extractor"] == "dino"


def test_cmmd_is_its_formula(tmp_path, monkeypatch):
    from visual_spec.eval.quality import extractors
    from visual_spec.eval.quality.extractors import Setup
    from visual_spec.eval.quality.score import Scoring, score

    monkeypatch.setattr(extractors, "clip_features", mean_colours)
    sets = [SampleFiles.open(make_pictures(tmp_path / name, n, n)) for name, n in (("drawn", 9), ("true", 7))]
    work = Scoring(sets[0], sets[1], None, ("cmmd",), tmp_path / "s", Setup({"clip": tmp_path}))
    document = score(work)
    assert document is not None
    found = document["figures"]["cmmd"]
    one, other = (mean_colours(Setup())[0](files, 0, len(files))["features"].numpy() for files in sets)

    def kernel(a, b):
        return np.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / (2 * 10**2))

    expected = 1000 * (kernel(one, one).mean() + kernel(other, other).mean() - 2 * kernel(one, other).mean())
    assert found["value"] == pytest.approx(expected, rel=1e-6) and expected > 0
    assert found["low"] < expected < found["high"]


def test_latex_holds_values_to_the_digits_that_are_known():
    figures = {
        "fid": {"value": 12.3456, "low": 12.2456, "high": 12.4456, "samples": 50000},
        "whole": {"value": 1.0, "low": 0.862, "high": 1.0, "samples": 24},
        "a_b%": {"value": 0.5, "low": -math.inf, "high": math.inf, "samples": 3},
    }
    text = scores_latex(figures)
    assert r"whole & $1.000\ [0.862, 1.000]$ & 24 \\" in text  # Wilson's interval ends at the value
    assert r"fid & $12.35 \pm 0.10$ & 50000 \\" in text and r"a b\% & $0.5$ & 3 \\" in text


def test_score_says_where_networks_are(tmp_path, capsys):
    folder = with_manifest(make_pictures(tmp_path / "set", 6, 0), PROMPTS)
    assert main(["score", str(folder), "--metrics", "clip"]) == 2
    assert (
        "https://huggingface.co/openai/clip-vit-large-patch14; pass --clip FOLDER" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        main(["score", "--help"])
    told = "".join(capsys.readouterr().out.split())  # argparse breaks addresses at their hyphens
    for end in (
        "clip-vit-large-patch14",
        "weights-inception-2015-12-05-6726825d.pth)",
        "i3d_torchscript.pt?dl=1)",
    ):
        assert end in told
