"""The folder of `shapes_mar` as its script assembles it, of random models: loaded, and its pictures."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scripts import assemble
from tests.helpers.continuous_image import generators, tiny_model, tiny_vae
from visual_spec.data.shapes_classes import CLASS_NAMES
from visual_spec.models.continuous.mar import MARTransformer
from visual_spec.pipelines.continuous_image import ContinuousImagePipeline
from visual_spec.pipelines.embedded import embedded_folder

EIGHT_BITS = re.compile(r"(encoder|decoder)\.\w+_blocks?\..*(conv|conv1|conv2|conv_shortcut)\.weight")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """What the script writes of a random autoencoder and a random model of 48 classes."""
    torch.manual_seed(0)
    model: Any = MARTransformer.from_config(
        dict(tiny_model("mar").config) | {"num_classes": len(CLASS_NAMES)}
    )
    for name, part in {"vae": tiny_vae(), "transformer": model}.items():
        part.save_pretrained(tmp_path / name)
        (tmp_path / name / "training.json").write_text(json.dumps({"part": name}))
    given = [f"{name}={tmp_path / name}" for name in ("vae", "transformer")]
    monkeypatch.setattr(sys, "argv", ["assemble.py", "shapes_mar", *given, "--out", str(tmp_path / "out")])
    assemble.main()
    return tmp_path


def test_the_autoencoder_is_stored_in_eight_bits_between_its_first_and_last_layers(folder):
    stored = load_file(next((folder / "out" / "vae").glob("*.safetensors")))
    pipe = ContinuousImagePipeline.from_pretrained(folder / "out")
    assert pipe.vae.dtype == torch.float32
    rounded = 0
    for key, value in tiny_vae().state_dict().items():
        kind = torch.float8_e4m3fn if EIGHT_BITS.fullmatch(key) else torch.float16
        assert stored[key].dtype == kind
        assert torch.equal(pipe.vae.state_dict()[key], value.half().to(kind).float())
        rounded += kind != torch.float16
    assert rounded > 20
    assert {json.loads(path.read_text())["part"] for path in folder.glob("out/*/training.json")} == {
        "vae",
        "transformer",
    }
    pipe.set_progress_bar_config(disable=True)
    out = pipe("red circle", generator=generators(1), output_type="pt")
    assert out.images.shape[-2:] == (16, 16) and out.images.isfinite().all()


def test_the_embedded_autoencoder_is_stored_so():
    stored = load_file(next((embedded_folder("shapes_mar") / "vae").glob("*.safetensors")))
    for key, value in stored.items():
        assert value.dtype == (torch.float8_e4m3fn if EIGHT_BITS.fullmatch(key) else torch.float16), key
