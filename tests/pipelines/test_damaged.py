"""Pipelines whose folders were damaged: no picture and no clip is drawn from them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_pipeline
from tests.helpers.tiny_continuous import tiny_latent_pipeline
from visual_spec.pipelines.embedded import embedded_folder
from visual_spec.pipelines.loading import load_pipeline


def rewrite(folder: Path, change: Callable[[Tensor], Tensor]) -> str:
    """Change the first weight of a folder; its key."""
    path = next(folder.glob("*.safetensors"))
    weights = load_file(path)
    key = sorted(weights)[0]
    weights[key] = change(weights[key]).contiguous()
    save_file(weights, path, metadata={"format": "pt"})
    return key


def with_nan(weight: Tensor) -> Tensor:
    weight.view(-1)[0] = torch.nan
    return weight


@pytest.mark.parametrize("part", ["transformer", "vq_model", "text_encoder"])
def test_damaged_parts_of_our_own_are_named(tmp_path, part):
    """A tokenizer of nan used to draw black pictures, with exit status 0."""
    tiny_pipeline().save_pretrained(tmp_path / "pipe")
    load_pipeline(tmp_path / "pipe")
    key = rewrite(tmp_path / "pipe" / part, with_nan)
    refuses(ValueError, f"{part}.* 1 of .*{key} are nan", load_pipeline, tmp_path / "pipe")


@pytest.mark.parametrize("kind", ["mar", "causal"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weight: weight * torch.nan, "vae.*nan"),
        (lambda weight: weight + torch.inf, "vae.*nan"),
        (lambda weight: weight.to(torch.int8), r"torch\.int8"),
        (lambda weight: weight.bool(), r"torch\.bool"),
        (lambda weight: weight[1:], "another shape"),
    ],
    ids=["nan", "inf", "int8", "bool", "shape"],
)
def test_damaged_parts_of_diffusers_are_named(tmp_path, kind, change, said):
    """The autoencoder is diffusers' own class; its damage used to end in a black picture, with exit status 0."""
    tiny_latent_pipeline(kind).save_pretrained(tmp_path / "pipe")
    load_pipeline(tmp_path / "pipe")
    key = rewrite(tmp_path / "pipe" / "vae", change)
    with pytest.raises(ValueError, match=said) as caught:
        load_pipeline(tmp_path / "pipe")
    assert key in str(caught.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_pictures_that_are_none_are_not_shown(tmp_path, value):
    pipe: Any = tiny_latent_pipeline()
    with torch.no_grad():
        pipe.vae.decoder.conv_out.bias[0] = value
    refuses(ValueError, "64.*192.*nan.*float32", pipe, 1, generator=torch.Generator().manual_seed(0))
    assert pipe(1, generator=torch.Generator().manual_seed(0), output_type="latent").images.isfinite().all()


def test_damaged_parts_of_transformers_are_named(tmp_path):
    shutil.copytree(embedded_folder("tunes"), tmp_path / "tunes")
    load_pipeline(tmp_path / "tunes")
    key = rewrite(tmp_path / "tunes" / "codec", with_nan)
    refuses(ValueError, f"codec.* 1 of .*{key} are nan", load_pipeline, tmp_path / "tunes")


def test_layers_that_the_configuration_leaves_out_are_noticed(tmp_path):
    tiny_pipeline().save_pretrained(tmp_path / "pipe")
    path = tmp_path / "pipe" / "transformer" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_layers": config["num_layers"] - 1}))
    refuses(ValueError, r"transformer.*layers\.1", load_pipeline, tmp_path / "pipe")
