"""Nodes for ComfyUI: a model, a sampler, and what they draw (`IMAGE`) or play (`AUDIO`).

Write one line into a file `custom_nodes/visual_spec_nodes.py` of ComfyUI, in whose environment this package is:

    from visual_spec.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

Layouts follow ComfyUI's documentation: an IMAGE is a float tensor [B, H, W, 3] in [0, 1] (the frames of clips
follow each other), an AUDIO is {"waveform": [B, C, T], "sample_rate": int}.
"""

from __future__ import annotations

from typing import Any

import torch

from visual_spec.pipelines.accelerate import read_sampler
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.loading import load_pipeline

_CATEGORY = "visual-spec"
_MODEL, _SAMPLER = "VISUAL_SPEC_MODEL", "VISUAL_SPEC_SAMPLER"


class LoadModel:
    """An embedded model, a folder written by `save_pretrained`, or a Hub id."""

    CATEGORY, FUNCTION = _CATEGORY, "load"
    RETURN_TYPES = (_MODEL,)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("STRING", {"default": "shapes"}),
                "device": (["auto", "cpu", "cuda"],),
                "dtype": (["float32", "bfloat16", "float16"],),
            }
        }

    def load(self, model: str, device: str = "auto", dtype: str = "float32") -> tuple[VisualPipeline]:
        where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        pipe = load_pipeline(model).to(where, getattr(torch, dtype))
        pipe.set_progress_bar_config(disable=True)
        return (pipe,)


class ChooseSampler:
    """A sampler by its text, such as "speculative-jacobi:window=16"; "default" is the model's own fast one."""

    CATEGORY, FUNCTION = _CATEGORY, "choose"
    RETURN_TYPES = (_SAMPLER,)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"sampler": ("STRING", {"default": "default"})}}

    def choose(self, sampler: str) -> tuple[str]:
        if sampler not in ("default", "plain"):
            read_sampler(sampler)  # refuses what there is not
        return (sampler,)


class _Generate:
    CATEGORY, FUNCTION = _CATEGORY, "generate"
    media: tuple[str, ...] = ()

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        law = {
            name: ("FLOAT", {"default": -1.0, "min": -1.0, "max": 100.0, "step": 0.05})
            for name in ("guidance_scale", "temperature")  # below 0: the model's own
        }
        return {
            "required": {
                "model": (_MODEL,),
                "prompt": ("STRING", {"multiline": True}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 0xFFFFFFFFFFFFFFFF}),
                "batch_size": ("INT", {"default": 1, "min": 1, "max": 64}),
            },
            "optional": {"sampler": (_SAMPLER,), **law},
        }

    def draw(
        self,
        model: Any,
        prompt: str,
        seed: int,
        batch_size: int = 1,
        sampler: str = "default",
        guidance_scale: float = -1.0,
        temperature: float = -1.0,
    ) -> Any:
        """Return what the pipeline makes, as tensors; sample i has seed + i, so it can be made again alone."""
        if model.medium not in self.media:
            raise ValueError(
                f"this model makes {model.medium}, and this node {' or '.join(self.media)}; use the other node."
            )
        law = {"guidance_scale": guidance_scale, "temperature": temperature}
        seeds = [torch.Generator().manual_seed((seed + place) % 2**64) for place in range(batch_size)]
        before = model.sampler
        if sampler != "default" or before is None:
            model.sampler = read_sampler(model.plain_sampler if sampler == "plain" else sampler)
        try:
            chosen = {
                name: value for name, value in law.items() if not value < 0
            }  # the law refuses what is no number
            return model([prompt] * batch_size, generator=seeds, output_type="pt", **chosen)
        finally:
            model.sampler = before


class GenerateImage(_Generate):
    """Pictures, or the frames of clips, one clip after the other."""

    RETURN_TYPES = ("IMAGE",)
    media = ("image", "video")

    def generate(self, **inputs: Any) -> tuple[torch.Tensor]:
        output = self.draw(**inputs)
        pixels = output.frames.flatten(0, 1) if "frames" in output else output.images
        return (pixels.permute(0, 2, 3, 1).float().cpu().contiguous(),)


class GenerateAudio(_Generate):
    """Clips of music."""

    RETURN_TYPES = ("AUDIO",)
    media = ("audio",)

    def generate(self, **inputs: Any) -> tuple[dict[str, Any]]:
        output = self.draw(**inputs)
        return ({"waveform": output.audios.float().cpu(), "sample_rate": int(output.sampling_rate)},)


NODE_CLASS_MAPPINGS = {
    "VisualSpecLoadModel": LoadModel,
    "VisualSpecSampler": ChooseSampler,
    "VisualSpecGenerateImage": GenerateImage,
    "VisualSpecGenerateAudio": GenerateAudio,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "VisualSpecLoadModel": "Load model (visual-spec)",
    "VisualSpecSampler": "Sampler (visual-spec)",
    "VisualSpecGenerateImage": "Generate image (visual-spec)",
    "VisualSpecGenerateAudio": "Generate audio (visual-spec)",
}
