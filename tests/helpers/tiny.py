"""A complete image model that is real but tiny and random: 4 x 4 tokens out of 12, pictures of 8 x 8 pixels."""

from typing import Any

import torch

from visual_spec.data.shapes import vocabulary
from visual_spec.models.masked.frames import FrameMaskedTransformer
from visual_spec.models.masked.maskgit import MaskedImageTransformer
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.masked_image import MaskedImagePipeline
from visual_spec.pipelines.video import VideoPipeline
from visual_spec.samplers.masked.frames import FrameMaskedSampler
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

WORDS = ["a", "blue", "circle", "on", "red", "square"]


def tiny_transformer(**changes) -> LlamaGenTransformer:
    torch.manual_seed(0)
    settings = dict(
        vocab_size=12, dim=16, num_layers=2, num_heads=2, grid_size=4, prefix_length=6, num_classes=None
    )
    model = LlamaGenTransformer(**{**settings, "caption_dim": 8, **changes})
    with torch.no_grad():  # larger than a fresh network's, so that the laws differ from slot to slot
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim == 2 else None
    return model.eval()


def tiny_vq_model(**changes) -> VQModel:
    torch.manual_seed(1)
    settings = dict(base_channels=8, channel_multipliers=(1, 2), blocks_per_level=1, latent_channels=8)
    return VQModel(
        **{**settings, "codebook_size": 12, "codebook_dim": 4, "norm_groups": 4, "image_size": 8, **changes}
    ).eval()


def tiny_text_encoder() -> CaptionEncoder:
    torch.manual_seed(2)
    return CaptionEncoder(vocabulary=WORDS, dim=8, num_layers=1, num_heads=2, max_words=6).eval()


def tiny_readers() -> tuple[CaptionEncoder, VQModel]:
    """A random encoder of captions of `shapes`, and a random tokenizer of their pictures, 4 x 4 tokens out of 16."""
    encoder = CaptionEncoder(vocabulary(), dim=8, num_layers=0, max_words=20)
    sizes: dict[str, Any] = dict(base_channels=4, channel_multipliers=(1,) * 4, blocks_per_level=1)
    codes: dict[str, Any] = dict(latent_channels=4, codebook_size=16, codebook_dim=4, norm_groups=None)
    return encoder.eval(), VQModel(**sizes, **codes, image_size=32).eval()


def tiny_pipeline(sampler=None) -> ImagePipeline:
    parts = tiny_transformer(), tiny_vq_model(), tiny_text_encoder()
    return quiet(ImagePipeline(*parts, sampler or AutoregressiveSampler()))


def tiny_video_pipeline(sampler=None) -> VideoPipeline:
    """Clips of three frames of 4 x 4 pixels, 2 x 2 tokens."""
    transformer = tiny_transformer(num_frames=3, grid_size=2, zero_prefix_keys=False)
    parts = transformer, tiny_vq_model(), tiny_text_encoder()
    return quiet(VideoPipeline(*parts, sampler or AutoregressiveSampler()))


def tiny_frame_transformer(**changes) -> FrameMaskedTransformer:
    torch.manual_seed(3)
    settings = dict(
        vocab_size=12, dim=16, num_layers=2, num_heads=2, grid_size=2, num_frames=3, prefix_length=6
    )
    model = FrameMaskedTransformer(**{**settings, "caption_dim": 8, "feed_forward_dim": 24, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model.eval()


def tiny_frame_pipeline(sampler=None) -> VideoPipeline:
    """Clips of three frames of 4 x 4 pixels, 2 x 2 tokens that are drawn in parallel."""
    parts = tiny_frame_transformer(), tiny_vq_model(), tiny_text_encoder()
    return quiet(VideoPipeline(*parts, sampler or FrameMaskedSampler(3, 0.5), default_guidance_scale=2.0))


def tiny_masked_transformer(**changes) -> MaskedImageTransformer:
    torch.manual_seed(0)
    settings = dict(vocab_size=12, dim=16, num_layers=2, num_heads=2, grid_size=4, prefix_length=6)
    model = MaskedImageTransformer(**{**settings, "num_classes": None, "caption_dim": 8, **changes})
    with torch.no_grad():  # a fresh network's layers are the identity
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def tiny_masked_pipeline(sampler=None) -> Any:
    parts = tiny_masked_transformer(), tiny_vq_model(), tiny_text_encoder()
    return quiet(MaskedImagePipeline(*parts, sampler or MaskedSampler(steps=3)))


def quiet(pipe: Any) -> Any:
    """A pipeline without its progress bar."""
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seeded(*seeds: int) -> list[torch.Generator]:
    """One generator per seed."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]
