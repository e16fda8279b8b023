"""A block for diffusers' modular Wan pipelines: clips drawn chunk by chunk, from a cache of frames.

    blocks = WanBlocks()
    blocks.sub_blocks["denoise"] = CausalWanDenoiseStep()
    pipe = blocks.init_pipeline()
    transformer = load_self_forcing("self_forcing_dmd.pt")
    pipe.update_components(transformer=transformer, vae=..., text_encoder=..., tokenizer=...)
    videos = pipe(prompt="a cat on a fence", cache="sink-window:sink=3,window=12", num_frames=81, output="videos")

It stands in place of the block that denoises a whole clip. The transformer is as it was after each call.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.modular_pipelines.modular_pipeline import ModularPipelineBlocks, PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec, InputParam, OutputParam

from visual_spec.models.video.causal_wan import CausalWan
from visual_spec.pipelines.accelerate.video import latent_size
from visual_spec.pipelines.chunk_video import read_policy
from visual_spec.samplers.continuous.chunks import ChunkWiseSampler
from visual_spec.samplers.core.law import TokenLaw

_USUAL = ChunkWiseSampler().config


class CausalWanDenoiseStep(ModularPipelineBlocks):
    """Draw the latents of clips with a causal student of Wan 2.1, such as Self-Forcing's.

    Inputs: `prompt_embeds` of the text encoder's block; `num_frames`, `height`, `width`, `num_videos_per_prompt`,
    `generator` as of the pipeline; `cache`, a policy or its text (`visual_spec.models.video.frame_cache`); `chunk`,
    `steps`, `first_steps`, `shift` and `solver` as of `ChunkWiseSampler`; `context`, clean latents
    [B or 1, C, n, h, w] to go on from.

    Outputs: `latents` for the decoder's block; `causal_trace`, a `ChunkTrace`.

    Raises:
        TypeError, ValueError: as `visual_spec.pipelines.accelerate.video.generate_video`.
    """

    model_name = "wan"

    @property
    def description(self) -> str:
        return "Draws latents chunk by chunk with a causal Wan, from a cache of the frames before"

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [ComponentSpec("transformer", WanTransformer3DModel)]

    @property
    def inputs(self) -> list[InputParam]:
        return [
            InputParam("prompt_embeds", required=True, type_hint=torch.Tensor, description="[B, T, E]"),
            InputParam("num_frames", type_hint=int),
            InputParam("height", type_hint=int),
            InputParam("width", type_hint=int),
            InputParam("num_videos_per_prompt", type_hint=int, default=1),
            InputParam("generator"),
            InputParam("cache", default="full", description="a policy of the cache, or its text"),
            InputParam(
                "chunk", type_hint=int, default=_USUAL["chunk"], description="latent frames of a chunk"
            ),
            InputParam(
                "steps", default=_USUAL["steps"], description="timesteps of a chunk, before the shift"
            ),
            InputParam("first_steps", description="timesteps of the first chunk; None: as the others"),
            InputParam("shift", type_hint=float, default=_USUAL["shift"]),
            InputParam("solver", type_hint=str, default=_USUAL["solver"], description="renoise or unipc"),
            InputParam("context", type_hint=torch.Tensor, description="clean latents before the clip"),
        ]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [
            OutputParam("latents", type_hint=torch.Tensor, description="[B, C, f, h, w]"),
            OutputParam("causal_trace", description="calls, and bytes of the cache after each chunk"),
        ]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        asked: Any = self.get_block_state(state)
        policy = read_policy(asked.cache)
        first = asked.first_steps or None
        sampler = ChunkWiseSampler(asked.chunk, asked.steps, asked.shift, first, asked.solver)
        frames, height, width = latent_size(
            components,
            asked.num_frames or components.default_num_frames,
            asked.height or components.default_height,
            asked.width or components.default_width,
            asked.chunk,
        )
        model = CausalWan(components.transformer, policy)
        try:
            embeds = asked.prompt_embeds.repeat_interleave(asked.num_videos_per_prompt, 0)
            result = sampler(
                model,
                embeds,
                law=TokenLaw(),
                generator=asked.generator,
                batch_size=len(embeds),
                num_frames=frames,
                height=height,
                width=width,
                context=asked.context,
            )
            asked.latents, asked.causal_trace = result.tokens, result.trace
        finally:
            model.release()
        self.set_block_state(state, asked)
        return components, state
