"""Pipelines whose folders were damaged: no picture and no clip is drawn from them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_pipeline
from visual_spec.pipelines.embedded import embedded_folder
from visual_spec.pipelines.loading import load_pipeline


def spoil(folder: Path) -> str:
    """Put nan into the first weight of a folder; its key."""
    path = next(folder.glob("*.safetensors"))
    weights = load_file(path)
    key = sorted(weights)[0]
    weights[key].view(-1)[0] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    return key


@pytest.mark.parametrize("part", ["transformer", "vq_model", "text_encoder"])
def test_damaged_parts_of_our_own_are_named(tmp_path, part):
    """A tokenizer of nan used to draw black pictures, with exit status 0."""
    tiny_pipeline().save_pretrained(tmp_path / "pipe")
    load_pipeline(tmp_path / "pipe")
    key = spoil(tmp_path / "pipe" / part)
    with pytest.raises(ValueError, match=f"{part} is damaged: 1 of .* values of {key} are nan"):
        load_pipeline(tmp_path / "pipe")


def test_damaged_parts_of_transformers_are_named(tmp_path):
    shutil.copytree(embedded_folder("tunes"), tmp_path / "tunes")
    load_pipeline(tmp_path / "tunes")
    key = spoil(tmp_path / "tunes" / "codec")
    with pytest.raises(ValueError, match=f"codec is damaged: 1 of .* values of {key} are nan"):
        load_pipeline(tmp_path / "tunes")


def test_layers_that_the_configuration_leaves_out_are_noticed(tmp_path):
    tiny_pipeline().save_pretrained(tmp_path / "pipe")
    path = tmp_path / "pipe" / "transformer" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_layers": config["num_layers"] - 1}))
    with pytest.raises(ValueError, match="transformer does not hold .* unexpected: layers"):
        load_pipeline(tmp_path / "pipe")
