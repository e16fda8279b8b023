"""A tiny random `ContinuousImagePipeline`: 4 x 4 tokens of 4 numbers, 5 classes, pictures of 8 x 8 pixels."""

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from scripts.train.kl_tokenizer import class_pictures, initialise, new_tokenizer, normalise
from tests.models.continuous.tiny import tiny_causal, tiny_mar
from visual_spec.pipelines.continuous_image import ContinuousImagePipeline
from visual_spec.pipelines.sampler_text import make_sampler


def tiny_latent_pipeline(kind: str = "mar", **changes: Any) -> ContinuousImagePipeline:
    """With a drafter of one layer.

    Args:
        kind: "mar" or "causal".
        changes: of both models.
    """
    torch.manual_seed(0)
    vae: Any = AutoencoderKL(
        block_out_channels=(4, 4),  # pyright: ignore[reportArgumentType]
        down_block_types=("DownEncoderBlock2D",) * 2,  # pyright: ignore[reportArgumentType]
        up_block_types=("UpDecoderBlock2D",) * 2,  # pyright: ignore[reportArgumentType]
        latent_channels=4,
        norm_num_groups=2,
        sample_size=8,
        scaling_factor=0.5,
    )
    make = tiny_mar if kind == "mar" else tiny_causal
    sizes: dict[str, Any] = dict(token_dim=4, head_kind="velocity", head_steps=6, **changes)
    return ContinuousImagePipeline(
        make(**sizes),
        vae.eval(),
        make_sampler("continuous"),
        default_guidance_scale=2.0,
        drafter=make(num_layers=1, **sizes),
    )


SIDE = 32  # pixels


def tiny_tokenizer(seed: int = 0) -> AutoencoderKL:
    torch.manual_seed(seed)
    return new_tokenizer(channels=(4, 4, 8, 8), latent_channels=3, image_size=SIDE)


def tiny_latents() -> AutoencoderKL:
    """Random, with latents that differ from picture to picture and have little noise."""
    model = tiny_tokenizer().eval().requires_grad_(False)
    initialise(model)
    normalise(model, class_pictures(20, 1, size=SIDE)[1])
    return model
