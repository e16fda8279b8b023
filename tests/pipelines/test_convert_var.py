"""Official VAR files to folders that `from_pretrained` loads."""

import functools
from typing import Any

import pytest
import torch

from tests.helpers.official import write_tokenizer
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.helpers.tiny_scales import SIDES, TINY_VQ, tiny_scale_pipeline
from visual_spec.models.core.checkpoints import read_checkpoint
from visual_spec.models.next_scale import var_vq
from visual_spec.models.next_scale.var import VARTransformer
from visual_spec.models.next_scale.var_vq import MultiscaleVQModel
from visual_spec.models.next_token.llamagen_checkpoint import recognise
from visual_spec.pipelines import scale_image
from visual_spec.pipelines.convert import convert
from visual_spec.pipelines.loading import load_pipeline


@pytest.fixture
def files(tmp_path, monkeypatch) -> dict[str, Any]:
    """A large and a small transformer and their tokenizer, with the constants that the official files carry."""
    pipe = tiny_scale_pipeline()
    levels = torch.cat([torch.full((side * side,), level) for level, side in enumerate(SIDES)])[None]
    for name, part in [("large", pipe.transformer), ("small", pipe.refiner)]:
        torch.save({**part.state_dict(), "lvl_1L": levels}, tmp_path / f"{name}.pth")
    usage = {"quantize.ema_vocab_hit_SV": torch.zeros(4, 12)}
    torch.save({**pipe.vq_model.state_dict(), **usage}, tmp_path / "vae.pth")

    def load(path, *, dtype=None, **settings):
        return real(path, dtype=dtype, **{**TINY_VQ, "scales": SIDES})

    real = scale_image.load_var_vq_checkpoint
    for place in (scale_image, var_vq):
        monkeypatch.setattr(place, "load_var_vq_checkpoint", functools.wraps(real)(load))
    return {name: tmp_path / f"{name}.pth" for name in ("large", "small", "vae")}


def test_three_files_become_a_pair_in_any_order(files, tmp_path):
    facts = convert([files["small"], files["vae"], files["large"]], tmp_path / "out")
    assert facts["class"] == "ScaleImagePipeline"
    assert facts["files"] == {
        str(files["large"]): "VAR-d2", str(files["small"]): "VAR-d1", str(files["vae"]): "VAR's tokenizer",
    }  # fmt: skip
    # An official pair draws with the published law, whose first scales are warmer.
    loaded, want = load_pipeline(tmp_path / "out"), tiny_scale_pipeline(warm_temperature=1.1)
    found = loaded([0, 3], generator=seeded(1, 2), top_k=5)
    assert found.tokens.equal(want([0, 3], generator=seeded(1, 2), top_k=5).tokens)
    assert loaded.config["default_top_k"] == 600
    alone = convert([files["vae"], files["large"]], tmp_path / "alone", dtype=torch.bfloat16)
    assert set(alone["parameters"]) == {"transformer", "vq_model"}
    one = load_pipeline(tmp_path / "alone")
    assert one.refiner is None and one.config["default_top_k"] == 900


def test_one_file_becomes_a_model(files, tmp_path):
    assert convert([files["large"]], tmp_path / "var")["class"] == "VARTransformer"
    model = VARTransformer.from_pretrained(tmp_path / "var")
    assert model.scales == SIDES and model.config["num_layers"] == 2
    assert convert([files["vae"]], tmp_path / "vq", image_size=256)["class"] == "MultiscaleVQModel"
    assert MultiscaleVQModel.from_pretrained(tmp_path / "vq").scales == SIDES


def test_files_that_make_no_pipeline_are_refused(files, tmp_path):
    out = tmp_path / "out"
    llamagen = write_tokenizer(tmp_path)
    for given, message in [
        ([files["large"], files["large"], files["vae"]], "both.*VAR"),
        ([files["vae"], files["vae"]], "both.*VAR"),
        ([files["large"], files["small"]], r"vae_ch160v4096z32\.pth"),
        ([files["large"], llamagen], r"vq_tiny\.pt.*VAR"),
    ]:
        refuses(ValueError, message, convert, given, out)
    with pytest.raises(ValueError, match=r"text_encoder=t5.*large\.pth"):
        convert([files["large"], files["vae"]], out, text_encoder="t5")
    with pytest.raises(ValueError, match=r"image_size=256.*large\.pth.*8"):
        convert([files["large"], files["vae"]], out, image_size=256)
    refuses(ValueError, "image_size=384; VAR.*256.*512", convert, [files["vae"]], out, image_size=384)
    assert not out.exists()


def test_the_reader_of_llamagen_says_where_var_belongs(files):
    for name, message in [
        ("large", r"VAR.*ScaleImagePipeline\.from_official.*load_var_checkpoint"),
        ("vae", r"VAR.*multi-scale.*ScaleImagePipeline\.from_official"),
    ]:
        refuses(ValueError, message, recognise, read_checkpoint(files[name]))
