"""FlowAR's released files to a pipeline, and the pipeline to a folder and to the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import visual_spec
from tests.helpers.mar import ldm_shapes, random_weights
from tests.helpers.tiny import quiet, seeded
from tests.models.continuous.tiny import released_flowar, tiny_flowar
from visual_spec import cli
from visual_spec.models.continuous import flowar, mar_checkpoint
from visual_spec.models.continuous.flowar import FlowARTransformer
from visual_spec.pipelines.continuous_image import ContinuousImagePipeline
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.continuous.flow_scales import FlowScaleSampler

TINY = {"dim": 16, "num_layers": 2, "num_heads": 2}


@pytest.fixture
def files(tmp_path, monkeypatch) -> dict[str, Path]:
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
def test_files_become_a_pipeline_that_draws(files, role, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["convert", str(files["vae"]), str(files[role]), "--out", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert facts["files"] == {str(files[role]): "FlowAR", str(files["vae"]): "KL-16"}
    pipe: Any = quiet(load_pipeline(out))
    assert type(pipe) is ContinuousImagePipeline and type(pipe.transformer) is FlowARTransformer
    expected = tiny_flowar(token_dim=16).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in pipe.transformer.state_dict().items())
    drawn = pipe(3, generator=seeded(1)[0], output_type="np")
    direct: Any = quiet(ContinuousImagePipeline.from_official(files[role], files["vae"]))
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


def test_a_pipeline_says_what_it_is_and_keeps_its_sampler(files, tmp_path):
    pipe: Any = ContinuousImagePipeline.from_official(
        files["released"], files["vae"], sampler=FlowScaleSampler(6, 4, guided_from=0.7)
    )
    assert pipe.default_settings()["guidance_scale"] == 4.3  # published for S, the smallest size
    pipe.save_pretrained(tmp_path / "saved")
    loaded: Any = quiet(load_pipeline(tmp_path / "saved"))
    assert loaded.facts == pipe.facts and loaded.facts.stored_as == "canvas" and not loaded.comparable
    assert loaded.plain_sampler == "flow-scales:levels=6,last_levels=4,guided_from=0.7"
    one, two = (quiet(each)("0", generator=seeded(1)[0], output_type="latent") for each in (pipe, loaded))
    assert torch.equal(one.images, two.images) and one.trace.levels == (6, 4, 4)
    with pytest.raises(TypeError, match="ContinuousSampler"):
        visual_spec.accelerate(loaded, "continuous")


def test_pictures_grow_from_map_to_map(files):
    pipe: Any = quiet(ContinuousImagePipeline.from_official(files["released"], files["vae"]))
    outputs = list(pipe.stream("0", generator=seeded(1)[0], output_type="latent"))
    whole = pipe("0", generator=seeded(1)[0], output_type="latent").images
    assert torch.equal(outputs[-1].images, whole) and len(outputs) >= 3
    first = outputs[0].images  # one place, enlarged
    assert first.shape == whole.shape and torch.allclose(
        first, first[..., :1, :1].expand_as(first), atol=1e-5
    )
