"""Tiny models of continuous tokens, and their KL decoder."""

from typing import Any

import torch

from scripts.train.kl_tokenizer import new_tokenizer
from scripts.train.mar import initialise
from visual_spec.models.continuous.causal import CausalContinuousTransformer
from visual_spec.models.continuous.mar import MARTransformer


def tiny_vae(latent_channels=3, seed=0):
    torch.manual_seed(seed)
    return new_tokenizer(channels=(4, 4, 4), latent_channels=latent_channels, image_size=16).eval()


def tiny_model(kind, dim=16, seed=0, **changes):
    torch.manual_seed(seed)
    shared: dict[str, Any] = dict(
        grid_size=4, token_dim=3, dim=dim, num_layers=1, num_heads=2, head_width=8, head_depth=1
    )
    shared |= dict(num_classes=3, head_kind="velocity", head_steps=5, **changes)
    model = (
        MARTransformer(buffer_size=2, **shared)
        if kind == "mar"
        else CausalContinuousTransformer(prefix_length=1, **shared)
    )
    initialise(model)
    for parameter in model.parameters():  # nothing stays at the zeros that training starts from
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]
