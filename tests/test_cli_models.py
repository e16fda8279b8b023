"""`visual-spec models`, on a tiny real model and on the tables."""

import sys

import pytest

from tests.helpers.command import last_line
from tests.helpers.tiny import tiny_pipeline
from visual_spec import cli
from visual_spec.pipelines import embedded


def test_models_lists_the_embedded_ones(tmp_path, capsys, monkeypatch):
    tiny_pipeline().save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(embedded, "weights_folder", lambda: tmp_path)
    assert cli.main(["models"]) == 0
    out = capsys.readouterr().out
    assert "tiny" in out and "ImagePipeline" in out and "M" in out
    assert cli.main(["models", "--json"]) == 0
    (fact,) = last_line(capsys)["embedded"]
    assert fact["name"] == "tiny" and fact["image_size"] == 8 and fact["bytes"] > 0


def test_models_lists_sizes_samplers_and_what_was_verified(capsys):
    assert cli.main(["models"]) == 0
    out = capsys.readouterr().out
    (xxl,) = (line.split() for line in out.splitlines() if line.startswith("LlamaGen-XXL class 384"))
    assert xxl[3:] == ["384", "576", "1411M", "6.3", "3.2", "official", "layout"]
    assert max(map(len, out.splitlines())) <= 100
    (tree,) = (line for line in out.splitlines() if line.startswith("TreeSampler"))
    assert "+ drafter" in tree and "Emu3-Gen" in out and "Janus" in out
    assert "the released weights themselves were not run" in " ".join(out.split())
    assert cli.main(["models", "--json"]) == 0
    document = last_line(capsys)
    known = {model["name"]: model for model in document["models"]}
    # Weights, and two rows of keys and values over 1 + 576 positions of 48 layers.
    assert known["LlamaGen-XXL class 384"]["memory_bytes"]["bfloat16"] == 2 * (
        1_410_972_672 + 2 * 577 * 2 * 48 * 1536
    )
    assert known["Emu3-Gen"]["samplers"]["AutoregressiveSampler"] == "yes"


def test_models_names_the_samplers_of_one_model_and_the_settings_of_one_sampler(capsys):
    assert cli.main(["models", "tunes_masked"]) == 0
    takes, others = capsys.readouterr().out.split("It does not take")
    others = " ".join(others.split())
    assert "masked" in takes.split() or "masked." in takes.split() or "masked," in takes
    assert "speculative-masked" not in takes and "4 codebooks" in others and "autoregressive, " in others
    # Said once.
    assert others.count("does not decode several codebooks") + others.count("does not fill in") == 1
    assert cli.main(["models", "tree"]) == 0
    assert "depth: an integer of at least 1 (default: " in capsys.readouterr().out
    assert cli.main(["generate", "x", "--sampler", "tree:dept=3"]) == 2
    assert "depth: an integer of at least 1" in capsys.readouterr().err
    capsys.readouterr()
    for name, told in (
        ("janus", "accelerate(model)"),
        ("llamagen-xxl", "c2i_XXL_384.pt; ClassImage"),
        ("CSM", "same"),
        ("csm", "1553M"),
        ("moshi", "7688M"),
        ("vibevoice-7b", "8311M"),
        ("minimax", "9231M"),
        ("nextstep", "14954M"),
        ("par-3b", "3097M"),
    ):
        assert cli.main(["models", name]) == 0
        assert told in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120, 400])
def test_the_tables_of_models_fit_the_terminal(capsys, monkeypatch, width):
    cli.main(["models"])
    words = capsys.readouterr().out.split()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    cli.main(["models"])
    out = capsys.readouterr().out
    tables = out[: out.index("\nVerified")].splitlines()
    table_lines = [line for line in tables if not line.startswith(("On top", "Official"))]
    assert max(map(len, table_lines)) <= width
    assert {*words} - {*out.split()} <= {word for word in words if set(word) == {"-"}}  # rules alone differ
