"""A tiny autoencoder of pictures of 32 pixels: 4 x 4 tokens of 3 numbers."""

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from scripts.train.kl_tokenizer import class_pictures, initialise, new_tokenizer, normalise

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
