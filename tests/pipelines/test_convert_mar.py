"""Official files of MAR and FlowAR to folders, through the command line: published keys with random weights, small."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import visual_spec
from tests.helpers.mar import ldm_shapes, random_weights
from tests.helpers.official import write_tokenizer
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from tests.models.continuous.tiny import released_flowar, tiny_flowar
from visual_spec import cli
from visual_spec.models.continuous import mar_checkpoint
from visual_spec.models.continuous.mar import PRESETS, MARTransformer
from visual_spec.pipelines.continuous_image import ContinuousImagePipeline
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.prototype.flowar import model as flowar
from visual_spec.prototype.flowar.model import FlowARTransformer
from visual_spec.prototype.flowar.sampler import FlowScaleSampler

LARGE = {"dim": 16, "num_layers": 2, "num_heads": 2, "head_width": 12, "head_depth": 2}
SMALL = {"dim": 8, "num_layers": 1, "num_heads": 2, "head_width": 8, "head_depth": 1}


def mar_shapes(size: dict[str, int], side: int = 2, classes: int = 7, buffer: int = 3) -> dict[str, tuple]:
    """Keys and shapes of a released MAR, written from their description."""
    c, w, length = size["dim"], size["head_width"], side * side
    found: dict[str, tuple] = {
        "class_emb.weight": (classes, c),
        "fake_latent": (1, c),
        "mask_token": (1, 1, c),
        "encoder_pos_embed_learned": (1, buffer + length, c),
        "decoder_pos_embed_learned": (1, buffer + length, c),
        "diffusion_pos_embed_learned": (1, length, c),
    }

    def linear(name: str, inward: int, outward: int) -> None:
        found.update({f"{name}.weight": (outward, inward), f"{name}.bias": (outward,)})

    def norm(name: str, width: int) -> None:
        found.update({f"{name}.weight": (width,), f"{name}.bias": (width,)})

    linear("z_proj", 16, c)
    norm("z_proj_ln", c)
    linear("decoder_embed", c, c)
    for part in ("encoder", "decoder"):
        norm(f"{part}_norm", c)
        for layer in range(size["num_layers"]):
            block = f"{part}_blocks.{layer}"
            norm(f"{block}.norm1", c)
            linear(f"{block}.attn.qkv", c, 3 * c)
            linear(f"{block}.attn.proj", c, c)
            norm(f"{block}.norm2", c)
            linear(f"{block}.mlp.fc1", c, 4 * c)
            linear(f"{block}.mlp.fc2", 4 * c, c)
    net = "diffloss.net"
    linear(f"{net}.time_embed.mlp.0", 256, w)
    linear(f"{net}.time_embed.mlp.2", w, w)
    linear(f"{net}.cond_embed", c, w)
    linear(f"{net}.input_proj", 16, w)
    for layer in range(size["head_depth"]):
        norm(f"{net}.res_blocks.{layer}.in_ln", w)
        linear(f"{net}.res_blocks.{layer}.mlp.0", w, w)
        linear(f"{net}.res_blocks.{layer}.mlp.2", w, w)
        linear(f"{net}.res_blocks.{layer}.adaLN_modulation.1", w, 3 * w)
    linear(f"{net}.final_layer.adaLN_modulation.1", w, 2 * w)
    linear(f"{net}.final_layer.linear", w, 32)
    return found


def weights_of(shapes: dict[str, tuple], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: 0.3 * torch.randn(shape, generator=generator) / max(1, math.prod(shape[1:])) ** 0.5
        for key, shape in shapes.items()
    }


@pytest.fixture
def files(tmp_path, monkeypatch) -> dict[str, Path]:
    """A MAR and a smaller one as a training run saves them, and their tokenizer."""
    monkeypatch.setattr(mar_checkpoint, "PRESETS", {**PRESETS, "tiny": LARGE, "less": SMALL})
    monkeypatch.setitem(mar_checkpoint.KL16, "block_out_channels", (32, 32, 64, 64, 128))
    for name, size in (("large", LARGE), ("small", SMALL)):
        shapes = mar_shapes(size)
        content = {"model": weights_of(shapes, 1), "model_ema": weights_of(shapes), "epoch": 799}
        torch.save(content, tmp_path / f"{name}.pth")
    tokenizer = random_weights(ldm_shapes(32, (1, 1, 2, 2, 4), 16, attention_at=4))
    torch.save({"model": {**tokenizer, "loss.logvar": torch.zeros(1)}}, tmp_path / "kl16.ckpt")
    return {"large": tmp_path / "large.pth", "small": tmp_path / "small.pth", "vae": tmp_path / "kl16.ckpt"}


def convert(out: Path, *files: Path | str) -> int:
    return cli.main(["convert", *map(str, files), "--out", str(out), "--json"])


def told(capsys: Any) -> Any:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_files_become_a_pipeline_that_draws(files, tmp_path, capsys):
    out = tmp_path / "out"
    assert convert(out, files["vae"], files["small"], files["large"]) == 0
    facts = told(capsys)
    assert facts["class"] == "ContinuousImagePipeline" and facts["files"][str(files["vae"])] == "KL-16"
    pipe: Any = load_pipeline(out)
    # The averaged weights, of the larger one as the model and of the smaller one as its drafter.
    for part, size in ((pipe.transformer, LARGE), (pipe.drafter, SMALL)):
        held = part.state_dict()
        for key, value in weights_of(mar_shapes(size)).items():
            assert torch.equal(held[key], value), key
    found = pipe(3, generator=seeded(1)[0], output_type="np")
    direct: Any = ContinuousImagePipeline.from_official(files["large"], files["vae"])
    assert found.tokens.equal(direct(3, generator=seeded(1)[0], output_type="np").tokens)
    assert found.images[0].shape == (32, 32, 3)
    drawn = ["generate", "3", "--model", str(out), "--out", str(tmp_path / "drawn"), "--device", "cpu"]
    assert cli.main(drawn) == 0 and len(list((tmp_path / "drawn").glob("*.png"))) == 1


def test_one_file_becomes_a_model(files, tmp_path, capsys):
    assert convert(tmp_path / "mar", files["large"]) == 0
    assert told(capsys)["class"] == "MARTransformer"
    loaded: Any = MARTransformer.from_pretrained(tmp_path / "mar")
    assert all(loaded.config[name] == value for name, value in LARGE.items())
    assert convert(tmp_path / "kl", files["vae"]) == 0
    assert told(capsys)["class"] == "AutoencoderKL"


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        (["large", "large", "vae"], [], "large.pth are both of one kind .MAR.; .* drafter"),
        (["vae", "vae"], [], "are both of one kind"),
        (["large", "small"], [], "given without their tokenizer; pass kl16.ckpt too"),
        (["large", "vae"], ["--image-size", "64"], "image_size=64 given, but .* draws 32 pixels"),
        (["vae"], ["--image-size", "64"], "image_size=64 given, but .*kl16.ckpt takes pictures of any size"),
        (["large", "vae"], ["--text-encoder", "t5"], "text_encoder=t5 given for .*large.pth, MAR"),
    ],
)  # fmt: skip
def test_files_that_make_no_pipeline_are_refused(files, tmp_path, capsys, names, more, message):
    out = tmp_path / "out"
    assert convert(out, *(files[name] for name in names), *more) == 2
    assert re.search(message, capsys.readouterr().err) and not out.exists()


def test_other_files_and_other_keys_are_refused(files, tmp_path, capsys):
    shapes = mar_shapes(LARGE)
    shapes.pop("mask_token")
    torch.save({"model_ema": weights_of(shapes)}, tmp_path / "odd.pth")
    assert convert(tmp_path / "out", tmp_path / "odd.pth", files["vae"]) == 2
    assert "1 missing: mask_token" in capsys.readouterr().err
    assert convert(tmp_path / "out", files["large"], write_tokenizer(tmp_path)) == 2
    assert "is not of MAR, and other files are" in capsys.readouterr().err


TINY = {"dim": 16, "num_layers": 2, "num_heads": 2}


@pytest.fixture
def flowar_files(tmp_path, monkeypatch) -> dict[str, Path]:
    """A tiny FlowAR as it is released, the same from a training run, and their tokenizer."""
    monkeypatch.setattr(flowar, "PRESETS", {"tiny": TINY})
    monkeypatch.setitem(mar_checkpoint.KL16, "block_out_channels", (32, 32, 64, 64, 128))
    weights = released_flowar(tiny_flowar(token_dim=16))
    other = {key: torch.zeros_like(value) for key, value in weights.items()}
    torch.save(weights, tmp_path / "flowar.pth")
    torch.save({"model": other, "model_ema": weights, "epoch": 399}, tmp_path / "checkpoint-last.pth")
    tokenizer = random_weights(ldm_shapes(32, (1, 1, 2, 2, 4), 16, attention_at=4))
    torch.save({"model": tokenizer}, tmp_path / "kl16.ckpt")
    names = {"released": "flowar.pth", "trained": "checkpoint-last.pth", "vae": "kl16.ckpt"}
    return {role: tmp_path / name for role, name in names.items()}


@pytest.mark.parametrize("role", ["released", "trained"])
def test_files_of_flowar_become_a_pipeline_that_draws(flowar_files, role, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        cli.main(["convert", str(flowar_files["vae"]), str(flowar_files[role]), "--out", str(out), "--json"])
        == 0
    )
    facts = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert facts["files"] == {str(flowar_files[role]): "FlowAR", str(flowar_files["vae"]): "KL-16"}
    pipe: Any = quiet(load_pipeline(out))
    assert type(pipe) is ContinuousImagePipeline and type(pipe.transformer) is FlowARTransformer
    expected = tiny_flowar(token_dim=16).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in pipe.transformer.state_dict().items())
    drawn = pipe(3, generator=seeded(1)[0], output_type="np")
    direct: Any = quiet(ContinuousImagePipeline.from_official(flowar_files[role], flowar_files["vae"]))
    assert drawn.tokens.equal(direct(3, generator=seeded(1)[0], output_type="np").tokens)
    assert drawn.images[0].shape == (64, 64, 3)
    latents = drawn.tokens.mT.reshape(1, 16, 4, 4)
    with torch.no_grad():
        pixels = pipe.vae.decode(latents / 0.2325).sample / 2 + 0.5
    shown = torch.tensor(drawn.images[0]).permute(2, 0, 1)[None]
    torch.testing.assert_close(shown, pixels.clamp(0, 1), rtol=1e-5, atol=1e-5)
    told = ["generate", "3", "--model", str(out), "--out", str(tmp_path / "drawn"), "--device", "cpu"]
    assert cli.main([*told, "--sampler", "flow-scales:levels=4,last_levels=2"]) == 0
    assert len(list((tmp_path / "drawn").glob("*.png"))) == 1


def test_a_pipeline_says_what_it_is_and_keeps_its_sampler(flowar_files, tmp_path):
    pipe: Any = ContinuousImagePipeline.from_official(
        flowar_files["released"], flowar_files["vae"], sampler=FlowScaleSampler(6, 4, guided_from=0.7)
    )
    assert pipe.default_settings()["guidance_scale"] == 4.3  # published for S, the smallest size
    pipe.save_pretrained(tmp_path / "saved")
    loaded: Any = quiet(load_pipeline(tmp_path / "saved"))
    assert loaded.facts == pipe.facts and loaded.facts.stored_as == "canvas" and not loaded.comparable
    assert loaded.plain_sampler == "flow-scales:levels=6,last_levels=4,guided_from=0.7"
    one, two = (quiet(each)("0", generator=seeded(1)[0], output_type="latent") for each in (pipe, loaded))
    assert torch.equal(one.images, two.images) and one.trace.levels == (6, 4, 4)
    refuses(TypeError, "ContinuousSampler", visual_spec.accelerate, loaded, "continuous")


def test_pictures_grow_from_map_to_map(flowar_files):
    pipe: Any = quiet(ContinuousImagePipeline.from_official(flowar_files["released"], flowar_files["vae"]))
    outputs = list(pipe.stream("0", generator=seeded(1)[0], output_type="latent"))
    whole = pipe("0", generator=seeded(1)[0], output_type="latent").images
    assert torch.equal(outputs[-1].images, whole) and len(outputs) >= 3
    first = outputs[0].images  # one place, enlarged
    assert first.shape == whole.shape and torch.allclose(
        first, first[..., :1, :1].expand_as(first), atol=1e-5
    )
