"""A tiny aMUSEd transformer, and the ids that diffusers' own pipeline draws from it."""

from typing import Any

import pytest
import torch
from diffusers.models.unets.uvit_2d import UVit2DModel
from diffusers.schedulers import scheduling_amused
from diffusers.schedulers.scheduling_amused import AmusedScheduler
from torch import Tensor

from visual_spec.models.masked.amused import AmusedTransformer, ClipCondition
from visual_spec.samplers.core.noise import CHOICE, TOKEN, CounterNoise

# Of 6 or 12 steps one hides exactly half of the tokens; there diffusers' single precision loses one of them.
CODES, MASK, SIDE, STEPS = 24, 31, 8, 5
# Sizes of the tokenizer of diffusers' own tests.
VQ_SIZES: dict[str, Any] = dict(
    block_out_channels=(8, 8), latent_channels=8, layers_per_block=1, norm_num_groups=8, sample_size=8,
    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, act_fn="silu",
    num_vq_embeddings=CODES, mid_block_add_attention=False, lookup_from_codebook=True,
)  # fmt: skip


def transformer() -> AmusedTransformer:
    """The sizes of diffusers' own tests, with more ids than codes, as the released models have."""
    torch.manual_seed(0)
    model = AmusedTransformer(
        hidden_size=8, use_bias=False, hidden_dropout=0.0, cond_embed_dim=8, micro_cond_encode_dim=2,
        micro_cond_embed_dim=10, encoder_hidden_size=8, vocab_size=MASK + 1, codebook_size=CODES, in_channels=8,
        block_out_channels=8, num_res_blocks=1, downsample=True, upsample=True, block_num_heads=1,
        num_hidden_layers=1, num_attention_heads=1, attention_dropout=0.0, intermediate_size=8,
        layer_norm_eps=1e-6, ln_elementwise_affine=True, sample_size=SIDE,
    )  # fmt: skip
    with torch.no_grad():  # laws that differ from slot to slot
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model.eval()


@torch.no_grad()
def diffusers_ids(
    monkeypatch: pytest.MonkeyPatch,
    model: AmusedTransformer,
    told: ClipCondition,
    keys: Tensor,
    ids: Tensor,
    pixels: int = 16,
) -> Tensor:
    """The loop of diffusers' pipeline around its scheduler, with this library's noise in the place of its own."""
    noise, count = CounterNoise(keys, "cpu"), len(keys)
    slots = torch.arange(SIDE * SIDE).expand(count, -1)
    now = 0

    def multinomial(probs: Tensor, number: int, generator: Any = None) -> Tensor:
        return noise.categorical(probs.log().view(count, -1, CODES), slots, TOKEN, now).view(-1, 1)

    def gumbel(like: Tensor, generator: Any = None) -> Tensor:
        return noise.gumbel(slots, 1, CHOICE, now, like.dtype)[..., 0]

    monkeypatch.setattr(torch, "multinomial", multinomial)
    monkeypatch.setattr(scheduling_amused, "gumbel_noise", gumbel)
    scheduler: Any = AmusedScheduler(mask_token_id=MASK)
    scheduler.set_timesteps(STEPS, (2, 0))
    side = float(pixels * SIDE)
    sizes = torch.tensor([side, side, 0.0, 0.0, 6.0]).expand(2 * count, -1)
    states = torch.cat([told.null_states.expand(count, -1, -1), told.states])
    pooled = torch.cat([told.null_pooled.expand(count, -1), told.pooled])
    latents = ids.view(count, SIDE, SIDE)
    for step, timestep in enumerate(scheduler.timesteps):
        now = step
        without, with_text = UVit2DModel.forward(
            model, torch.cat([latents] * 2), states, pooled, sizes
        ).chunk(2)
        logits = without + 10.0 * (with_text - without)
        latents = scheduler.step(logits, timestep, latents).prev_sample
    monkeypatch.undo()
    return latents.flatten(1)
