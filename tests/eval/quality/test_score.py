"""The scores of a set: torch-fidelity's for the same files, the same for any number of processes, refused otherwise."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.command import check_refused
from tests.helpers.evaluation import tiny_network
from tests.helpers.networks import exact_distance, make_pictures, mean_colours, with_manifest
from tests.helpers.refusals import refuses
from tests.helpers.sample_sets import work_in
from tests.helpers.tiny_continuous import tiny_latent_pipeline
from visual_spec.cli import main
from visual_spec.commands import score as score_command
from visual_spec.eval.quality import extractors, feature_sets, features, statistics
from visual_spec.eval.quality import score as scoring
from visual_spec.eval.quality.beside import compared
from visual_spec.eval.quality.extractors import Setup
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.metric_table import EXTRACTORS, METRICS
from visual_spec.eval.quality.neighbours import precision_recall
from visual_spec.eval.quality.prompt_files import PromptSet
from visual_spec.eval.quality.published import frechet_distance
from visual_spec.eval.quality.sample_set import sample
from visual_spec.eval.quality.score import Scoring
from visual_spec.files.reading import read_object

score: Any = scoring.score  # one process finds a document, never None


def work_of(drawn: Path, true: Path, metrics: tuple[str, ...], out: Path, beside=None, **networks) -> Scoring:
    beside = beside and SampleFiles.open(beside)
    return Scoring(SampleFiles.open(drawn), SampleFiles.open(true), beside, metrics, out, Setup(networks))


@pytest.fixture
def small_network(monkeypatch):
    """In place of the embedded network a small one, which takes pictures of any size."""
    network = tiny_network()
    monkeypatch.setattr(extractors, "load_shapes_features", lambda: network)
    return network


@pytest.mark.slow
def test_the_figures_are_torch_fidelitys_for_the_same_files(tmp_path, inception):
    fidelity = pytest.importorskip("torch_fidelity")
    drawn, true = make_pictures(tmp_path / "drawn", 20, 0), make_pictures(tmp_path / "true", 24, 1)
    metrics = ("fid", "kid", "is", "prc")
    work = work_of(drawn, true, metrics, tmp_path / "s", feature_weights=inception)
    figures = score(work)["figures"]
    asked = dict.fromkeys(("fid", "kid", "isc", "prc"), True) | dict.fromkeys(
        ("cuda", "cache", "verbose"), False
    )
    theirs = fidelity.calculate_metrics(
        **asked, input1=str(drawn), input2=str(true), feature_extractor="inception-v3-compat", kid_subset_size=20,
        feature_layer_prc="2048", feature_extractor_weights_path=str(inception),
    )  # fmt: skip
    sets = [work.features("inception", samples) for samples in (work.drawn, SampleFiles.open(true))]
    # Of 2,048 eigenvalues 2,028 are 0 but for rounding. Ours leaves them out; torch-fidelity's sums up their roots.
    exact = exact_distance(*sets)
    assert figures["fid"]["value"] == pytest.approx(exact, rel=1e-8)
    assert theirs["frechet_inception_distance"] == pytest.approx(exact, abs=1e-5)
    assert figures["fid"]["value"] > 0.1
    assert figures["kid"]["value"] == pytest.approx(
        theirs["kernel_inception_distance_mean"], rel=1e-5, abs=1e-9
    )
    assert figures["inception_score"]["value"] == pytest.approx(theirs["inception_score_mean"], rel=1e-6)
    for name in ("precision", "recall"):
        assert figures[name]["value"] == pytest.approx(theirs[name], abs=1e-6)
    assert figures["fid"]["samples"] == 20 and figures["fid"]["reference_samples"] == 24


def test_any_number_of_processes_gives_the_same_document(tmp_path, small_network, monkeypatch):
    monkeypatch.setattr(feature_sets, "CHUNK", 4)
    drawn, true = make_pictures(tmp_path / "drawn", 10, 0), make_pictures(tmp_path / "true", 13, 1)
    documents = []
    for shards in (1, 2, 3):
        folder, found = tmp_path / str(shards), None
        for rank in range(shards):
            assert found is None
            found = score(work_of(drawn, true, ("shapes",), folder), rank=rank, shards=shards)
        documents.append(json.dumps(found))
    assert len(set(documents)) == 1
    figures = json.loads(documents[0])["figures"]
    sets = [SampleFiles.open(path).pictures(0, 99) for path in (drawn, true)]
    one, other = (features.features_of(small_network, pictures) for pictures in sets)
    assert figures["frechet_shapes"]["value"] == pytest.approx(frechet_distance(one, other), rel=1e-6)
    assert figures["shapes_precision"]["value"] == precision_recall(other, one)["precision"]["value"]


def test_damaged_features_are_extracted_again_and_new_pictures_too(tmp_path, small_network):
    drawn, true = make_pictures(tmp_path / "drawn", 6, 0), make_pictures(tmp_path / "true", 6, 1)

    def run():
        return score(work_of(drawn, true, ("shapes",), tmp_path / "s"))

    before = run()
    kept = sorted((tmp_path / "s").glob("*.npz"))
    for path in kept:
        path.write_bytes(path.read_bytes()[:-30])
    assert run() == before
    for damage in (np.full((6, 4), np.nan, np.float32), np.zeros((6, 4, 1), np.float32)):
        np.savez(kept[0], features=damage)
        assert run() == before
    np.savez(kept[0], others=np.zeros((6, 4), np.float32))
    refuses(ValueError, "others without features; remove shapes-", run)
    kept[0].unlink()
    make_pictures(drawn, 6, 2)
    assert run()["figures"] != before["figures"]


def test_a_set_is_its_content_and_its_prompts(tmp_path, small_network):
    """Not names, sizes and times, in which these sets agree."""
    sets = []
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        folder = make_pictures(tmp_path / name, 6, seed)
        for path in folder.glob("*.png"):
            Image.open(path).save(path.with_suffix(".bmp"))
            path.unlink()
        for path in folder.iterdir():
            os.utime(path, (1, 1))
        sets.append(folder)
    one, two, three = (SampleFiles.open(folder) for folder in sets)
    assert one.fingerprint == three.fingerprint != two.fingerprint
    figure = score(work_of(sets[1], sets[0], ("shapes",), tmp_path / "s"))["figures"]["frechet_shapes"]
    assert figure["value"] > 1e-3
    for folder in sets:
        with_manifest(folder, ["a melody"] * 6, "bmp")  # of the same checksums
    assert SampleFiles.open(sets[0]).fingerprint != SampleFiles.open(sets[1]).fingerprint
    asked = SampleFiles.open(sets[2])
    with_manifest(sets[2], ["an organ"] * 6, "bmp")
    assert len({asked.fingerprint, SampleFiles.open(sets[2]).fingerprint, one.fingerprint}) == 3


def test_a_single_sample_has_a_mean_whose_interval_is_not_known(tmp_path, monkeypatch, capsys):
    drawn = with_manifest(make_pictures(tmp_path / "drawn", 1, 0), ["a melody"])
    monkeypatch.setattr(
        extractors, "clip_features", lambda setup: (lambda *of: {"scores": torch.tensor([7.0])}, [], "")
    )
    figure = score(work_of(drawn, drawn, ("clip",), tmp_path / "s", clip=tmp_path))["figures"]["clip_score"]
    assert (figure["value"], figure["low"], figure["high"]) == (7.0, -math.inf, math.inf)
    assert main(["score", str(drawn), "--metrics", "clip", "--clip", str(tmp_path), "--json"]) == 0
    table, printed = capsys.readouterr().out.split("\n{", 1)
    told = json.loads("{" + printed, parse_constant=pytest.fail)["figures"]["clip_score"]
    assert told["low"] is None and told["not_finite"] == {"low": "-inf", "high": "inf"}
    assert "7 (-inf to inf)" in table and SampleFiles.open(drawn).path == drawn
    assert read_object(drawn / "scores" / "scores.json")["figures"]["clip_score"] == figure


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_pictures_have_the_figures_that_they_are_enough_for(count, tmp_path, small_network):
    drawn, true = make_pictures(tmp_path / "drawn", count, 0), make_pictures(tmp_path / "true", 12, 1)
    needed = {name: metric.fewest for name, metric in METRICS.items() if metric.medium == "image"}
    assert needed["kid"] == 3 and needed["prc"] == 4 and needed["is"] == 10
    if count == 1:
        with pytest.raises(ValueError, match="shapes needs 2 pictures or more of each set.*drawn holds 1"):
            work_of(drawn, true, ("shapes",), tmp_path / "s").check()
        with pytest.raises(ValueError, match="drawn holds 1"):
            work_of(true, drawn, ("shapes",), tmp_path / "s").check()
        return
    figures = score(work_of(drawn, true, ("shapes",), tmp_path / "s"))["figures"]
    assert list(figures) == ["frechet_shapes"] and "need 4 pictures" in figures["frechet_shapes"]["note"]
    sets = [SampleFiles.open(path).pictures(0, 99) for path in (drawn, true)]
    one, other = (features.features_of(small_network, pictures) for pictures in sets)
    assert figures["frechet_shapes"]["value"] == pytest.approx(frechet_distance(one, other), rel=1e-6)
    with pytest.raises(ValueError, match="prc needs 4 pictures"):
        work_of(drawn, true, ("prc",), tmp_path / "s", feature_weights=Path("x")).check()


def test_adms_files_are_written_and_read(tmp_path, small_network):
    drawn, true = make_pictures(tmp_path / "drawn", 5, 0), make_pictures(tmp_path / "true", 6, 1)
    path = tmp_path / "drawn.npz"
    assert main(["score", str(drawn), "--reference", str(true), "--write-npz", str(path)]) == 0
    with np.load(path) as file:
        assert file.files == ["arr_0"] and file["arr_0"].dtype == np.uint8
        assert np.array_equal(file["arr_0"], SampleFiles.open(drawn).pictures(0, 5))
    folder = json.loads((drawn / "scores" / "scores.json").read_text())
    assert main(["score", str(path), "--reference", str(true), "--out", str(tmp_path / "again")]) == 0
    again = json.loads((tmp_path / "again" / "scores.json").read_text())
    assert again["figures"] == folder["figures"]


def test_a_reference_of_moments_alone_serves_fid(tmp_path, monkeypatch):
    drawn, true = make_pictures(tmp_path / "drawn", 8, 0), make_pictures(tmp_path / "true", 9, 1)

    monkeypatch.setattr(extractors, "inception_features", mean_colours)
    rows = SampleFiles.open(true).pictures(0, 9).astype(np.float64).mean((1, 2)) / 255
    stats = tmp_path / "stats.npz"
    np.savez(stats, mu=rows.mean(0), sigma=np.cov(rows, rowvar=False))
    expected, found = (
        score(work_of(drawn, reference, ("fid",), tmp_path / name))["figures"]["fid"]
        for name, reference in (("a", true), ("b", stats))
    )
    assert found["value"] == pytest.approx(expected["value"], rel=1e-10)
    assert found["reference_samples"] is None
    with pytest.raises(ValueError, match=r"stats\.npz.*arr_0 \(its arrays are mu, sigma\)"):
        score(work_of(drawn, stats, ("fid", "kid"), tmp_path))
    with pytest.raises(ValueError, match=r"stats\.npz holds 0 as arr_0 \(its arrays are mu, sigma\)"):
        score(work_of(stats, true, ("fid",), tmp_path))
    for wrong, said in ((-np.eye(3), "its eigenvalues go from -1 to -1"), (np.tri(3), "not symmetric")):
        np.savez(stats, mu=rows.mean(0), sigma=wrong)
        with pytest.raises(ValueError, match=rf"stats\.npz: sigma is no covariance \({said}"):
            score(work_of(drawn, stats, ("fid",), tmp_path))


def test_sets_for_the_same_seeds_are_compared_sample_by_sample(tmp_path, small_network):
    plain, fast, other = (tmp_path / name for name in ("plain", "fast", "other"))
    sample(work_in(plain, batch_size=4))
    sample(work_in(fast, batch_size=4, text="speculative-jacobi:window=4"))
    sample(work_in(other, batch_size=4, text="speculative-jacobi:window=4,acceptance=exact"))
    true = make_pictures(tmp_path / "true", 9, 1, size=8)

    def compared(folder):
        return score(work_of(folder, true, ("shapes",), tmp_path / "s", plain))

    same = compared(fast)
    assert same["comparison"]["same_samples"]["hits"] == 7 and same["comparison"]["kept"] is True
    assert same["comparison"]["promise"] == "identical" and same["comparison"]["differing"] == []
    assert same["figures"]["frechet_shapes_difference"]["value"] == 0.0
    differs = compared(other)
    found = differs["comparison"]
    assert found["same_samples"]["hits"] < 7
    assert found["promise"] == "lossless" and "tests/exactness" in found["statement"]
    assert found["kept"] is None and found["divergence"] is None
    assert differs["figures"]["frechet_shapes_difference"]["value"] != 0.0
    assert "byte for byte" in score_command.score_table(differs)
    grouped = "speculative-jacobi:window=4,coupling=maximal,acceptance=grouped"
    sample(work_in(tmp_path / "lossy", batch_size=4, text=grouped))
    lossy = compared(tmp_path / "lossy")
    lines = [json.loads(line) for line in (tmp_path / "lossy" / "manifest.jsonl").read_text().splitlines()]
    assert lossy["comparison"]["promise"] == "lossy"
    moved = sum(line["moved_mass"] for line in lines)
    assert lossy["comparison"]["moved_mass"]["value"] == pytest.approx(moved / 7, rel=1e-12) and moved > 0
    measured = f"{lossy['comparison']['divergence']['value']:.4f} of a tested token"
    assert measured in score_command.score_table(lossy)
    # Of plain decoding at another temperature nothing is promised.
    sample(work_in(tmp_path / "cool", batch_size=4, text="autoregressive:temperature=0.5"))
    cool = compared(tmp_path / "cool")["comparison"]
    assert cool["differing"] == ["law"] and cool["promise"] == "not known" and cool["kept"] is None
    sample(work_in(tmp_path / "seeds", batch_size=4, seed=1))
    refuses(ValueError, "plain", compared, tmp_path / "seeds")


@pytest.mark.parametrize("earlier", [False, True], ids=["", "without the law settings of earlier versions"])
def test_a_set_is_held_to_its_promise_beside_a_set_of_the_same_law(tmp_path, earlier):
    pipe = tiny_latent_pipeline()
    texts = {
        "plain": "continuous",
        "few": "continuous:steps=4",
        "few again": "continuous:steps=4,graph=false",
        "few exact": "head-speculation:steps=4",
        "exact": "head-speculation",
    }
    sets = {}
    for name, text in texts.items():
        work = work_in(
            tmp_path / name, num=2, batch_size=2, text=text, pipe=pipe, prompts=PromptSet(("3", "1"))
        )
        sample(work)
        path = tmp_path / name / "manifest.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        own = "identical" if text.startswith("continuous") else "lossless"
        assert {line["promise"] for line in lines} == {"another law" if "steps=4" in text else own}
        if earlier:
            lines = [
                {**line, "promise": line.pop("own_promise")} for line in lines if line.pop("law_settings")
            ]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        sets[name] = SampleFiles.open(tmp_path / name)

    def promise(drawn, other):
        found = compared(sets[drawn], sets[other])
        return found["promise"], found["kept"], found["statement"].endswith("plain decoding's (steps=4).")

    assert promise("few", "plain") == promise("few exact", "plain") == ("another law", None, True)
    assert promise("few again", "few") == ("identical", True, False)
    assert promise("few exact", "few") == promise("exact", "plain") == ("lossless", None, False)
    assert promise("plain", "few")[:2] == promise("exact", "few")[:2] == ("another law", None)


def test_a_broken_promise_is_told_and_fails(tmp_path, small_network, capsys):
    plain, fast = tmp_path / "plain", tmp_path / "fast"
    sample(work_in(plain, batch_size=4))
    sample(work_in(fast, batch_size=4, text="speculative-jacobi:window=4"))
    true = make_pictures(tmp_path / "true", 9, 1, size=8)
    asked = ["score", str(fast), "--reference", str(true), "--compare-to", str(plain)]
    assert main(asked) == 0
    make_pictures(tmp_path / "other", 1, 0, size=8)
    (tmp_path / "other" / "000.png").replace(fast / "000002.png")  # the manifest still says what it said
    assert main(asked) == 1
    assert "6 of 7 samples" in (printed := capsys.readouterr().out) and "promise is broken" in printed


def test_resizing_is_bicubic_in_floating_point(tmp_path):
    make_pictures(tmp_path / "a", 1, 0, size=31)
    make_pictures(tmp_path / "b", 1, 0, size=31)
    Image.fromarray(np.zeros((20, 20, 3), np.uint8)).save(tmp_path / "b" / "001.png")
    found = SampleFiles.open(tmp_path / "a").pictures(0, 1, 16)[0]
    picture = (
        torch.from_numpy(SampleFiles.open(tmp_path / "a").pictures(0, 1)[0]).permute(2, 0, 1)[None].double()
    )
    theirs = torch.nn.functional.interpolate(
        picture, (16, 16), mode="bicubic", antialias=True, align_corners=False
    )
    assert np.abs(found - theirs[0].permute(1, 2, 0).clamp(0, 255).numpy()).max() <= 0.51
    with pytest.raises(ValueError, match="001.*20 x 20.*31 x 31"):
        SampleFiles.open(tmp_path / "b").pictures(0, 2)


def test_bad_input_is_refused_before_a_network_is_loaded(tmp_path, capsys):
    drawn = make_pictures(tmp_path / "drawn", 3, 0)
    cases = [
        ([str(tmp_path / "none")], "no folder of samples and no .npz file at"),
        ([str(drawn)], "shapes compare with true samples; pass --reference"),
        ([str(drawn), "--metrics", "fad-clap"], "holds pictures; pass some of fid"),
        (
            [str(drawn), "--metrics", "clip", "--clip", "x"],
            "has no manifest.jsonl, so its prompts are unknown",
        ),
        (
            [str(drawn), "--reference", str(drawn), "--metrics", "fid", "--feature-weights", "x.pth"],
            "no Inception weights at",
        ),
        ([str(drawn), "--reference", str(drawn), "--size", "0"], "pass at least 1"),
    ]
    (tmp_path / "empty").mkdir()
    cases.append(([str(tmp_path / "empty")], "pass a folder of pictures, of clips, or of videos"))
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "run.json").write_text("{}")
    cases.append(([str(tmp_path / "part")], "is not complete"))
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 nothing")
    cases.append(([str(drawn), "--reference", str(tmp_path / "bad.npz")], "holds no whole arrays"))
    for arguments, message in cases:
        check_refused(main(["score", *arguments]), message, capsys)


def test_pictures_of_16_bits_are_refused_and_not_cut_off(tmp_path):
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a\.png.*16"):
        SampleFiles.open(tmp_path).pictures(0, 1)


def test_sizes_that_differ_are_told(tmp_path, small_network, capsys):
    drawn, true = (
        make_pictures(tmp_path / "drawn", 6, 0, size=24),
        make_pictures(tmp_path / "true", 6, 1, size=16),
    )
    asked = ["score", str(drawn), "--reference", str(true)]
    assert main(asked) == 0
    assert "24 x 24 pixels, pictures of" in (printed := capsys.readouterr().out) and "16 x 16" in printed
    assert main([*asked, "--size", "16"]) == 0 and "x 24 pixels" not in capsys.readouterr().out


def test_a_truncated_picture_is_named(tmp_path, small_network):
    drawn = make_pictures(tmp_path / "drawn", 3, 0)
    data = (drawn / "001.png").read_bytes()
    (drawn / "001.png").write_bytes(data[: len(data) // 2])
    refuses(ValueError, "png.*whole", score, work_of(drawn, drawn, ("shapes",), tmp_path / "s"))


def test_prompts_of_a_class_model_are_its_names():
    assert PromptSet(("crane", "crane"), labels=("0", "1")).asked(3) == "1"


def test_a_metric_is_one_entry_of_the_table():
    """Its functions, its options and its documentation are there, and no heavy library is read for `--help`."""
    for metric in METRICS.values():
        assert callable(getattr(statistics, metric.statistic)) and metric.label and metric.interval
        assert callable(getattr(extractors, EXTRACTORS[metric.features].make))
    guide = (Path(__file__).parents[3] / "docs" / "EVALUATION.md").read_text()
    assert [name for name in METRICS if f"`{name}`" not in guide] == []
    program = "import sys, visual_spec.eval.quality.metric_table; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_metric_of_inception_features_has_its_figures(tmp_path, monkeypatch):
    pytest.importorskip("torch_fidelity")
    drawn, true = make_pictures(tmp_path / "drawn", 12, 0), make_pictures(tmp_path / "true", 14, 1)

    monkeypatch.setattr(extractors, "inception_features", mean_colours)
    figures = score(work_of(drawn, true, ("fid", "kid", "is", "prc"), tmp_path / "s"))["figures"]
    assert list(figures) == ["fid", "kid", "inception_score", "precision", "recall"]
    for figure in figures.values():
        assert figure["low"] <= figure["value"] <= figure["high"] and figure["low"] < figure["high"]
        assert figure["interval"] and figure["samples"] == 12


def test_the_distance_of_few_pictures_says_what_it_is(tmp_path, small_network, capsys):
    drawn, true = make_pictures(tmp_path / "drawn", 8, 0), make_pictures(tmp_path / "true", 9, 1)
    assert main(["score", str(drawn), "--reference", str(true)]) == 0
    printed = capsys.readouterr().out
    assert "frechet shapes infinity" not in printed and "from 40 samples on" in printed
    make_pictures(drawn, 60, 0)
    assert main(["score", str(drawn), "--reference", str(true)]) == 0
    printed = capsys.readouterr().out
    figures = json.loads((drawn / "scores" / "scores.json").read_text())["figures"]
    assert figures["frechet_shapes_infinity"]["value"] < figures["frechet_shapes"]["value"]
    assert "frechet shapes infinity" in printed and "about the mean" in figures["frechet_shapes"]["interval"]
