"""A tiny pipeline of diffusers' Wan."""

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from tests.helpers.tiny_wan import tiny_wan

SMALL: dict[str, Any] = dict(num_frames=9, height=32, width=32)


def tiny_pipeline(**changes) -> Any:
    """Pixels are 8 times latent ones, frames 4 times and one more; without a text encoder."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[2.0, 1.5, 0.5, 1.0],
    )
    parts = dict(
        tokenizer=None, text_encoder=None, vae=vae.eval(), scheduler=FlowMatchEulerDiscreteScheduler()
    )
    pipe = WanPipeline(**{**parts, "transformer": tiny_wan().float(), **changes})
    pipe.set_progress_bar_config(disable=True)
    return pipe
