"""Official files of ACDiT: the weights under 'model', and sizes out of the arguments beside them."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from tests.models.continuous.tiny import Trap, tiny_mar
from visual_spec import cli
from visual_spec.models.core import checkpoints
from visual_spec.pipelines.continuous_image import ContinuousImagePipeline, _loaded
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.prototype.acdit.checkpoint import is_acdit, load_acdit_checkpoint
from visual_spec.prototype.acdit.model import ACDiTTransformer

SIZES: dict[str, Any] = dict(token_dim=4, block_size=4, dim=64, num_layers=2, num_heads=1, num_classes=7)
ARGUMENTS: dict[str, Any] = dict(
    block_size=4, image_size=32, vae_patch_pixels=8, patch_size=1, num_frames=1, nd_split="1_1", ar_len=4
)


def network(**changes: Any) -> ACDiTTransformer:
    torch.manual_seed(0)
    return ACDiTTransformer(**{**SIZES, "grid_size": 4, **changes}).eval()


def official(path: Path, model: ACDiTTransformer, **changes: Any) -> Path:
    """A file as the training script writes it."""
    others = {"ema": {key: value + 1 for key, value in model.state_dict().items()}, "lrs": {}}
    arguments = argparse.Namespace(model="ACDiT-XL", **{**ARGUMENTS, **changes})
    torch.save({"model": model.state_dict(), **others, "args": arguments}, path)
    return path


def autoencoder(folder: Path) -> Path:
    """A folder of diffusers' class, of tokens of 4 numbers and 8 pixels."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    torch.manual_seed(1)
    sizes: dict[str, Any] = dict(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, latent_channels=4, norm_num_groups=4,
    )  # fmt: skip
    AutoencoderKL(**sizes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({}, {}),
        ({"axis_shares": [1, 3], "block_size": 16}, {"nd_split": "1_3", "block_size": 16, "ar_len": 1}),
        ({"frames": 3, "block_size": 24}, {"num_frames": 3, "nd_split": None, "block_size": 24, "ar_len": 2}),
    ],
    ids=["picture", "shares", "clip"],
)
def test_a_file_and_the_arguments_in_it_make_the_model(tmp_path, made, said):
    model = network(**made)
    loaded = load_acdit_checkpoint(official(tmp_path / "ACDiT-XL-img.pt", model, **said))
    wanted = dict(model.config) | {"axis_shares": loaded.config["axis_shares"]}
    assert {k: v for k, v in loaded.config.items() if k[0] != "_"} == {
        k: v for k, v in wanted.items() if k[0] != "_"
    }
    assert torch.equal(loaded.rotary(), model.rotary()) and torch.equal(loaded.places, model.places)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


def test_a_state_dict_is_read_with_arguments_beside_it():
    model = network()
    loaded = load_acdit_checkpoint(model.state_dict(), arguments=ARGUMENTS, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16 and loaded.block_size == 4 and not loaded.training


def test_nothing_in_a_file_runs(tmp_path):
    path = official(tmp_path / "trap.pt", network(), results_dir=Trap())
    refuses(ValueError, r"refused.*c\[\"args\"\]", load_acdit_checkpoint, path)
    assert not Trap.ran


def test_files_that_make_no_model_are_refused(tmp_path):
    weights = network().state_dict()
    refuses(ValueError, "block_size, image_size", load_acdit_checkpoint, weights)
    with pytest.raises(ValueError, match=r"ACDiT.*y_embedder\.embedding_table\.weight"):
        load_acdit_checkpoint({"x_embedder.weight": torch.zeros(4, 4)}, arguments=ARGUMENTS)
    for changes, message in (
        ({"block_size": 8}, "block_size=8.*4 x 4"),
        ({"nd_split": "1,1"}, "nd_split='1,1'"),
        ({"patch_size": 0}, "patch_size=0"),
        ({"nd_split": "1_2"}, "axis_shares"),
    ):
        refuses(ValueError, message, load_acdit_checkpoint, weights, arguments=ARGUMENTS | changes)
    weights.pop("blocks.1.norm2.weight")
    with pytest.raises(ValueError, match="1 missing: blocks.1.norm2.weight"):
        load_acdit_checkpoint(weights, arguments=ARGUMENTS)


def test_an_acdit_is_told_from_a_mar_in_one_reading(tmp_path, monkeypatch):
    assert not is_acdit(tiny_mar().state_dict()) and is_acdit(network().state_dict())
    torch.save({"model_ema": tiny_mar().state_dict()}, tmp_path / "mar.pth")
    read: list[Path] = []
    content = checkpoints.read_content
    monkeypatch.setattr(
        checkpoints, "read_content", lambda path, *args: read.append(path) or content(path, *args)
    )
    refuses(ValueError, r"mar\.pth.*16.*num_heads", _loaded, tmp_path / "mar.pth", None)
    assert read == [tmp_path / "mar.pth"]
    path = official(tmp_path / "acdit.pt", network())
    assert type(_loaded(path, None)) is ACDiTTransformer and read == [tmp_path / "mar.pth", path]


# -- through the pipeline ---------------------------------------------------------------------------------------------


def test_a_file_becomes_a_pipeline_that_draws_and_is_saved(tmp_path, capsys):
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    path, vae = official(tmp_path / "ACDiT-XL-img.pt", model), autoencoder(tmp_path / "vae")
    direct: Any = quiet(ContinuousImagePipeline.from_official(path, vae))
    assert direct.config.default_guidance_scale == 1.5 and direct.sampler.config.levels == 25
    drawn = direct(3, generator=seeded(1)[0], output_type="np")
    assert drawn.images[0].shape == (32, 32, 3) and drawn.trace.target_calls.tolist() == [100]
    direct.save_pretrained(tmp_path / "saved")
    assert cli.main(["convert", str(vae), str(path), "--out", str(tmp_path / "out")]) == 0
    for folder in ("saved", "out"):
        again: Any = quiet(load_pipeline(tmp_path / folder))
        assert type(again.transformer) is ACDiTTransformer
        assert torch.equal(again(3, generator=seeded(1)[0], output_type="np").tokens, drawn.tokens)
    command = ["generate", "3", "--model", str(tmp_path / "out"), "--sampler", "block-diffusion:levels=2"]
    assert cli.main([*command, "--out", str(tmp_path / "drawn"), "--device", "cpu"]) == 0
    assert len(list((tmp_path / "drawn").glob("*.png"))) == 1


def test_clips_and_other_samplers_are_refused(tmp_path):
    from visual_spec.pipelines.accelerate import accelerate

    vae = autoencoder(tmp_path / "vae")
    with pytest.raises(ValueError, match="3 frames"):
        ContinuousImagePipeline.from_official(network(frames=3, block_size=24), vae)
    pipe: Any = ContinuousImagePipeline.from_official(network(), vae)
    refuses(TypeError, "BlockDiffusionSampler", accelerate, pipe, "continuous")
