"""Nodes for ComfyUI: a model, a sampler, and what they draw (`IMAGE`) or play (`AUDIO`).

A clone of the repository in `custom_nodes` is found by ComfyUI (`__init__.py` at its root takes the nodes from here).

Layouts follow ComfyUI's documentation: an IMAGE is a float tensor [B, H, W, 3] in [0, 1] (the frames of clips
follow each other), an AUDIO is {"waveform": [B, C, T], "sample_rate": int}.

ComfyUI's own modules are used where they are loaded: other models make room for ours, ours leaves the GPU after a
sample, the bar advances with the tokens, and Cancel ends a sample at its next call of the model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from visual_spec.pipelines.accelerate import accelerate, read_sampler
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.embedded import embedded_models
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.registry import names as sampler_names

Inputs = dict[
    str, dict[str, tuple[object, ...]]
]  # "required" and "optional", by name: a type, and its settings
_CATEGORY = "visual-spec"
_MODEL, _SAMPLER = "VISUAL_SPEC_MODEL", "VISUAL_SPEC_SAMPLER"
_OWN = "default"  # law settings below 0, and this sampler: the model's own


class _Transformers:
    """A Janus of transformers with its processor, called as a pipeline of this package is."""

    medium = "image"

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor, self.last_trace = model, processor, None
        self.components = {"model": model}

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> _Transformers:
        self.model.to(device, dtype)
        return self

    def draw(
        self,
        prompts: list[str],
        seeds: list[torch.Generator],
        sampler: str,
        step: Callable[[int, int], None],
        law: dict[str, float],
    ) -> dict[str, torch.Tensor]:
        accelerate(self.model, {_OWN: None, "plain": "autoregressive"}.get(sampler, sampler))
        inputs = self.processor(text=prompts, generation_mode="image", padding=True, return_tensors="pt")
        temperature = law.pop("temperature", None)
        if temperature is not None:
            law |= {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        total = self.model.config.vision_config.num_image_tokens

        def told(_: int, lengths: torch.Tensor) -> None:
            step(int(lengths.min()), total)

        ids = self.model.generate_images(
            **inputs.to(self.model.device), generator=seeds, callback=told, **law
        )
        self.last_trace = self.model.last_trace
        return {"images": (self.model.decode_images(ids) + 1) / 2}


def _folders() -> dict[str, Path]:
    """Models in the folder `models/visual_spec` of ComfyUI, by their names."""
    paths = sys.modules.get("folder_paths")
    if paths is None:  # not within ComfyUI: the folder where this happens to run has no say
        return {}
    return {
        path.name: path for path in sorted(Path(paths.models_dir, "visual_spec").glob("*")) if path.is_dir()
    }


def _load(name: str) -> Any:
    folder = _folders().get(name, Path(name))
    config = folder / "config.json"
    if (folder / "model_index.json").exists() or not config.exists():
        return load_pipeline(str(folder) if folder.is_dir() else name)
    import transformers

    kind = (json.loads(config.read_text()).get("architectures") or [""])[0]
    if kind != "JanusForConditionalGeneration":
        raise ValueError(
            f"{folder} holds a {kind or 'model without architectures'}; of transformers' models this node draws with a "
            "Janus. `visual_spec.accelerate` takes others in Python."
        )
    model = transformers.JanusForConditionalGeneration.from_pretrained(folder).eval()
    return _Transformers(model, transformers.AutoProcessor.from_pretrained(folder))


class LoadModel:
    """An embedded model, or a folder in ComfyUI's `models/visual_spec`: of `save_pretrained`, or a Janus.

    `path`, a folder elsewhere or a Hub id, takes the place of the menu.
    """

    CATEGORY, FUNCTION = _CATEGORY, "load"
    RETURN_TYPES = (_MODEL,)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        names = [*_folders(), *embedded_models()]
        return {
            "required": {
                "model": (names, {"default": "things" if "things" in names else names[0]}),
                "device": (["auto", "cpu", "cuda"],),
                "dtype": (["float32", "bfloat16", "float16"],),
            },
            "optional": {"path": ("STRING", {"default": ""})},
        }

    def load(self, model: str, device: str = "auto", dtype: str = "float32", path: str = "") -> tuple[Any]:
        pipe = _load(path or model).to("cpu", getattr(torch, dtype))
        pipe.load_device = _device() if device == "auto" else torch.device(device)
        if isinstance(pipe, VisualPipeline):
            pipe.set_progress_bar_config(disable=True)
        return (pipe,)


class ChooseSampler:
    """A sampler of the menu; "default" is the model's own fast one, "plain" one token a call.

    `settings` are written as on the command line: "window=16,coupling=maximal".
    """

    CATEGORY, FUNCTION = _CATEGORY, "choose"
    RETURN_TYPES = (_SAMPLER,)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        names = [_OWN, "plain", *sampler_names()]
        return {"required": {"sampler": (names,)}, "optional": {"settings": ("STRING", {"default": ""})}}

    def choose(self, sampler: str, settings: str = "") -> tuple[str]:
        if settings and sampler in (_OWN, "plain"):
            raise ValueError(f"settings={settings!r} of {sampler!r}; choose a sampler by its name.")
        text = f"{sampler}:{settings}" if settings else sampler
        if sampler not in (_OWN, "plain"):
            read_sampler(text)  # refuses what there is not
        return (text,)


def _device() -> torch.device:
    """Where ComfyUI computes."""
    management = sys.modules.get("comfy.model_management")
    if management is not None:
        return management.get_torch_device()
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _listener() -> Callable[[int, int], None]:
    """A function of (tokens that are there, tokens of a sample) that moves ComfyUI's bar, and ends on Cancel."""
    management, utils = sys.modules.get("comfy.model_management"), sys.modules.get("comfy.utils")
    bar = utils.ProgressBar(1) if utils is not None else None

    def step(done: int, total: int) -> None:
        if management is not None:
            management.throw_exception_if_processing_interrupted()
        if bar is not None and total:
            bar.update_absolute(min(done, total), total)

    return step


def _tokens_of(pipe: object) -> int:
    """Tokens, or columns, of a sample of a pipeline; 0: it does not say."""
    grid = getattr(getattr(pipe, "transformer", None), "grid", None)
    return getattr(grid, "num_tokens", None) or getattr(pipe, "max_frames", None) or 0


class _Generate:
    CATEGORY, FUNCTION = _CATEGORY, "generate"
    media: tuple[str, ...] = ()

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        law = {
            name: ("FLOAT", {"default": -1.0, "min": -1.0, "max": 100.0, "step": 0.05})
            for name in ("guidance_scale", "temperature")  # below 0: the model's own
        }
        return {
            "required": {
                "model": (_MODEL,),
                "prompt": ("STRING", {"multiline": True, "default": cls.example}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 0xFFFFFFFFFFFFFFFF}),
                "batch_size": ("INT", {"default": 1, "min": 1, "max": 64}),
            },
            "optional": {"sampler": (_SAMPLER,), **law},
        }

    example = ""

    def draw(
        self,
        model: Any,
        prompt: str,
        seed: int,
        batch_size: int = 1,
        sampler: str = _OWN,
        guidance_scale: float = -1.0,
        temperature: float = -1.0,
    ) -> Any:
        """Return what the model makes, as tensors; sample i has seed + i, so it can be made again alone."""
        if model.medium not in self.media:
            raise ValueError(
                f"this model makes {model.medium}, and this node {' or '.join(self.media)}; use the other node."
            )
        law = {"guidance_scale": guidance_scale, "temperature": temperature}
        # The law refuses what is no number.
        law = {name: value for name, value in law.items() if not value < 0}
        seeds = [torch.Generator().manual_seed((seed + place) % 2**64) for place in range(batch_size)]
        home = getattr(model, "load_device", torch.device("cpu"))
        management = sys.modules.get("comfy.model_management")
        if management is not None and home.type != "cpu":
            parts = [part for part in model.components.values() if isinstance(part, torch.nn.Module)]
            size = sum(weight.nbytes for part in parts for weight in part.parameters())
            management.free_memory(2 * size, home)
        model.to(home)
        try:
            return self._drawn(model, [prompt] * batch_size, seeds, sampler, law)
        finally:
            if management is not None:
                model.to("cpu")

    def _drawn(
        self,
        model: Any,
        prompts: list[str],
        seeds: list[torch.Generator],
        sampler: str,
        law: dict[str, float],
    ) -> Any:
        step = _listener()
        if isinstance(model, _Transformers):
            return model.draw(prompts, seeds, sampler, step, law)
        before, total = model.sampler, _tokens_of(model)
        if sampler != _OWN or before is None:
            model.sampler = read_sampler(model.plain_sampler if sampler == "plain" else sampler)

        def told(_: object, __: int, done: int, ___: object) -> None:
            step(done, total)

        try:
            return model(prompts, generator=seeds, output_type="pt", callback_on_step_end=told, **law)
        finally:
            model.sampler = before


class GenerateImage(_Generate):
    """Pictures, or the frames of clips, one clip after the other."""

    RETURN_TYPES = ("IMAGE",)
    media = ("image", "video")
    example = "a fox left of a pizza on a mint background"

    def generate(self, **inputs: Any) -> tuple[torch.Tensor]:
        output = self.draw(**inputs)
        pixels = output["frames"].flatten(0, 1) if "frames" in output else output["images"]
        return (pixels.permute(0, 2, 3, 1).float().cpu().contiguous(),)


class GenerateAudio(_Generate):
    """Clips of music."""

    RETURN_TYPES = ("AUDIO",)
    media = ("audio",)
    example = "a slow sad organ melody in A minor, rising in even rhythm"

    def generate(self, **inputs: Any) -> tuple[dict[str, torch.Tensor | int]]:
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
