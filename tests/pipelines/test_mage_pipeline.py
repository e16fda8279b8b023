"""MAGE's tokenizer and pipeline: the official layout, against a straight-line computation, and converted files."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers import vqgan
from tests.helpers.mage import CODES, GROUPS, official_weights, tiny_mage, tokenizer_weights
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from tests.helpers.vqgan import conv
from visual_spec.models.masked.mage_vq import MageVQModel, load_mage_tokenizer
from visual_spec.pipelines.convert import convert
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.mage_image import MageImagePipeline
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice

MAGE: dict[str, Any] = dict(num_heads=3, decoder_heads=2, class_id=13, num_classes=6)


norm = partial(vqgan.norm, groups=GROUPS)


def residual(x: Tensor, w: dict[str, Tensor], at: str) -> Tensor:
    h = conv(F.silu(norm(x, w, f"{at}.norm1")), w, f"{at}.conv1")
    h = conv(F.silu(norm(h, w, f"{at}.norm2")), w, f"{at}.conv2")
    shortcut = f"{at}.nin_shortcut"
    return h + (conv(h, w, shortcut, padding=0) if f"{shortcut}.weight" in w else x)


def encoded(w: dict[str, Tensor], picture: Tensor) -> Tensor:
    """Token ids [h, w] of a picture [3, H, W] in [0, 1]."""
    x = conv(picture[None], w, "encoder.conv_in")
    for at in ("encoder.down.0.block.0", "encoder.down.0.block.1"):
        x = residual(x, w, at)
    x = (x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2]) / 4
    for at in ("down.1.block.0", "down.1.block.1", "mid.block_1", "mid.block_2"):
        x = residual(x, w, f"encoder.{at}")
    x = conv(F.silu(norm(x, w, "encoder.norm_out")), w, "encoder.conv_out", padding=0)
    return (x - w["quantize.embedding.weight"][:, :, None, None]).square().sum(1).argmin(0)


def decoded(w: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The picture [3, H, W] of token ids [h, w]."""
    x = conv(w["quantize.embedding.weight"][ids].permute(2, 0, 1)[None], w, "decoder.conv_in")
    for at in ("mid.block_1", "mid.block_2", "up.1.block.0", "up.1.block.1"):
        x = residual(x, w, f"decoder.{at}")
    x = conv(x.repeat_interleave(2, 2).repeat_interleave(2, 3), w, "decoder.up.1.upsample.conv")
    for at in ("up.0.block.0", "up.0.block.1"):
        x = residual(x, w, f"decoder.{at}")
    return conv(F.silu(norm(x, w, "decoder.norm_out")), w, "decoder.conv_out")[0]


def test_the_tokenizer_in_its_official_layout(tmp_path):
    weights, pictures = tokenizer_weights(), torch.rand(3, 3, 8, 8, dtype=torch.float64)
    latents = load_mage_tokenizer(weights, image_size=8, norm_groups=GROUPS).encoder(pictures).detach()
    # Codes among the latents, so that many of them are used.
    weights["quantize.embedding.weight"] = latents.movedim(1, -1).flatten(0, 2)[: 4 * CODES : 4].contiguous()
    path = tmp_path / "vqgan_jax_strongaug.ckpt"
    torch.save({"state_dict": weights}, path)
    model = load_mage_tokenizer(path, image_size=8, norm_groups=GROUPS)
    assert (model.patch_size, model.tokens_per_side, model.config["codebook_size"]) == (2, 4, CODES)
    tokens = model.encode_tokens(2 * pictures - 1)
    shown = model.decode_tokens(tokens)
    assert len(tokens.unique()) > 3
    for row in range(3):
        assert torch.equal(tokens[row].view(4, 4), encoded(weights, pictures[row]))
        wanted = (2 * decoded(weights, tokens[row].view(4, 4)) - 1).clamp(-1, 1)
        assert torch.allclose(shown[row], wanted, atol=1e-9)
    # The tokenizer of a file of MAGE is the same.
    inside = {f"vqgan.{key}": value for key, value in weights.items()}
    again = load_mage_tokenizer(inside, image_size=8, norm_groups=GROUPS)
    assert torch.equal(again.encode_tokens(2 * pictures - 1), tokens)
    refuses(ValueError, r"\(1, 3\).*\[B, 16\]", model.decode_tokens, tokens[:1, :3])
    with pytest.raises(ValueError, match="unexpected: decoder.up.9.x"):
        load_mage_tokenizer(weights | {"decoder.up.9.x": torch.zeros(1)}, norm_groups=GROUPS)
    refuses(ValueError, "MAGE", load_mage_tokenizer, {"a": torch.zeros(1)})


def test_the_official_size_has_the_released_keys():
    with torch.device("meta"):
        keys = MageVQModel().state_dict()
    assert keys["encoder.down.4.block.0.nin_shortcut.weight"].shape == (512, 512, 1, 1)
    assert keys["quantize.embedding.weight"].shape == (1024, 256)
    assert not any("attn" in key or "downsample" in key for key in keys)
    assert (
        load_mage_tokenizer({key: value.to("meta") for key, value in keys.items()}).config["image_size"]
        == 256
    )


def official_file(folder: Path) -> Path:
    weights = {key: value.clone() for key, value in tiny_mage().state_dict().items()}
    weights |= {f"vqgan.{key}": value for key, value in tokenizer_weights().items()}
    path = folder / "mage-vitb-1600.pth"
    torch.save({"model": weights, "epoch": 1599}, path)
    return path


def test_mage_draws_pictures_and_into_pictures(tmp_path):
    pipe = quiet(MageImagePipeline.from_official(official_file(tmp_path), norm_groups=GROUPS, **MAGE))
    assert pipe.sampler.config.steps == 20 and pipe.image_size == (8, 8)
    pipe.sampler = MaskedSampler(steps=4, choice=Choice(choice_temperature=6.0))
    found = pipe(num_images=2, generator=seeded(0, 1), output_type="np")
    assert found.images.shape == (2, 8, 8, 3) and found.trace.target_calls.tolist() == [4, 4]
    with torch.no_grad():
        wanted = pipe.vq_model.decode_tokens(found.tokens).permute(0, 2, 3, 1)
    assert np.allclose(found.images, (wanted / 2 + 0.5).numpy(), atol=1e-6)
    mask = np.zeros((8, 8), dtype=np.uint8)
    mask[:4] = 255
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    painted = pipe(num_images=3, image=picture, mask=mask, generator=seeded(0, 1, 2))
    signed = torch.from_numpy(picture).permute(2, 0, 1)[None].double() / 127.5 - 1
    known = pipe.vq_model.encode_tokens(signed)[0]
    assert all(torch.equal(row[8:], known[8:]) for row in painted.tokens)
    pipe.save_pretrained(tmp_path / "saved")
    again = quiet(load_pipeline(tmp_path / "saved", dtype=torch.float64))
    assert type(again) is MageImagePipeline
    assert torch.equal(again(num_images=2, generator=seeded(0, 1)).tokens, found.tokens)
    refuses(ValueError, "num_images=0", pipe, num_images=0)


def test_files_of_masked_models_are_converted(tmp_path, monkeypatch):
    from tests.helpers.official import TINY_VQ
    from visual_spec.models.masked import mage_vq, maskgit
    from visual_spec.models.next_token import llamagen_vq

    # The head counts of official sizes are known; those of these small ones are told.
    monkeypatch.setitem(maskgit.PRESETS, "test", {"num_layers": 2, "num_heads": 3, "dim": 12})
    monkeypatch.setitem(llamagen_vq.PRESETS, "vq-16", TINY_VQ)
    files = [tmp_path / "ImageNet_256_base.pth", tmp_path / "vq_ds16_c2i.pt"]
    torch.save({"model_state_dict": {k: v.float() for k, v in official_weights().items()}}, files[0])
    codes = llamagen_vq.VQModel(**{**TINY_VQ, "codebook_size": CODES})
    monkeypatch.setitem(llamagen_vq.PRESETS, "vq-16", {**TINY_VQ, "codebook_size": CODES})
    torch.save({"model": codes.state_dict()}, files[1])
    found = convert(files, tmp_path / "halton")
    assert found["class"] == "MaskedClassImagePipeline"
    assert set(found["files"].values()) == {"Halton-MaskGIT", "LlamaGen's tokenizer vq-16"}
    pipe = quiet(load_pipeline(tmp_path / "halton"))
    assert pipe(2, generator=seeded(0), output_type="np").images.shape[0] == 1
    assert convert(files[:1], tmp_path / "alone")["class"] == "MaskedImageTransformer"
    refuses(ValueError, "text_encoder=t5 given", convert, files, tmp_path / "x", text_encoder="t5")
    with pytest.raises(ValueError, match=r"mage-vitb-1600\.pth.*MaskGIT"):
        convert([files[0], official_file(tmp_path)], tmp_path / "x")
    real = MageImagePipeline.from_official
    monkeypatch.setattr(
        MageImagePipeline,
        "from_official",
        lambda *args, **options: real(*args, norm_groups=GROUPS, **MAGE, **options),
    )
    found = convert([official_file(tmp_path)], tmp_path / "mage")
    assert found["class"] == "MageImagePipeline" and set(found["files"].values()) == {"MAGE"}
    alone = tmp_path / "vqgan_jax_strongaug.ckpt"
    torch.save({"state_dict": tokenizer_weights()}, alone)
    monkeypatch.setattr(mage_vq, "load_mage_tokenizer", partial(load_mage_tokenizer, norm_groups=GROUPS))
    assert convert([alone], tmp_path / "vq", image_size=8)["class"] == "MageVQModel"
    with pytest.raises(ValueError, match="image_size=256.*8"):
        convert([official_file(tmp_path)], tmp_path / "y", image_size=256)
    with pytest.raises(ValueError, match=r"vq_ds16_c2i\.pt.*MAGE"):
        convert([official_file(tmp_path), files[1]], tmp_path / "y")
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()
