"""Token models of transformers as folders that vLLM serves: Emu3, Janus and GLM-Image. Needs no vLLM.

Only what draws tokens is written: the decoder, its embeddings and the head. Pixels are the user's own model's to make.
Janus's pictures have embeddings and a head of their own, so in the engine their ids lie above the vocabulary of text,
and the rows of their embeddings, which are fixed, are written out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from visual_spec.files.documents import json_text
from visual_spec.models.core.transformers_cache import Prompt
from visual_spec.pipelines.accelerate.images import image_model_class, unwrapped
from visual_spec.serving.vllm.folder import named

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Size = tuple[int, int]


def save_model_for_vllm(
    model: Any, folder: str | os.PathLike, *, grids: Sequence[Size] | None = None, prompt_tokens: int = 512
) -> Path:
    """Write what draws the tokens of a transformers model.

    Args:
        model: an Emu3, Janus or GLM-Image.
        grids: (height, width) in tokens of the grids that a request draws, in order: one of Emu3; of GLM-Image the
            small one and the large one. Janus has one size, leave it out.
        prompt_tokens: the longest prompt; vLLM is started with room for so many.

    Returns:
        The folder, to be passed to vLLM as its model (`engine_arguments`).

    Raises:
        TypeError: another model.
        ValueError: grids are missing, or given to Janus; the image ids of an Emu3 have gaps.
    """
    model = unwrapped(model)
    kind = image_model_class(model)
    write = _WRITERS.get("" if kind is None else kind.family)
    if write is None:
        raise TypeError(f"cannot serve a {type(model).__name__}; pass one of {', '.join(_WRITERS)}.")
    if (grids is None) != (kind is not None and kind.family == "Janus"):
        raise ValueError(
            f"grids={grids} for {type(model).__name__}; pass (height, width) of each, none for Janus."
        )
    config, weights = write(model, [list(grid) for grid in grids or ()])
    config["visual_spec"]["prompt_tokens"] = prompt_tokens
    config["torch_dtype"] = str(model.dtype).removeprefix("torch.")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json_text(config, indent=1))
    return path


class ModelPrompts:
    """Prompts as the token ids of a served transformers model.

    Args:
        model: as for `save_model_for_vllm`; its configuration is read.
        guided: whether requests have guidance.
    """

    def __init__(self, model: object, *, guided: bool = False) -> None:
        self.model, self.guided = unwrapped(model), guided
        kind = image_model_class(self.model)
        assert kind is not None
        self.kind = kind

    def of(self, prompt: Mapping[str, Any]) -> tuple[list[int], ...]:
        """Return the ids of a prompt, and with guidance the ids of the prompt that it leads away from.

        Args:
            prompt: what the model's processor makes of one prompt to be drawn.

        Raises:
            ValueError: as `plan` of the adapter; or it holds several prompts, or pictures.
        """
        more = dict(prompt)
        ids, mask = more.pop("input_ids"), more.pop("attention_mask", None)
        if len(ids) != 1 or more.get("pixel_values") is not None:
            raise ValueError(f"{len(ids)} prompts with {', '.join(more)}; pass one prompt, of text only.")
        conditional = Prompt(ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool())
        _, condition = self.kind.plan(self.model, conditional, guided=self.guided, **more)
        both = [condition.prompt, condition.unconditional][: 1 + self.guided]
        return tuple(own.ids[own.mask].tolist() for own in both if own is not None)


def _emu3(model: Any, grids: list[list[int]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    ids = sorted(model.model.vocabulary_mapping.image_tokens)
    if ids != list(range(ids[0], ids[-1] + 1)):
        raise ValueError(
            f"image ids {ids[0]} to {ids[-1]} of config.vocabulary_map have gaps; vLLM serves a range."
        )
    config = _plain(model.config.text_config) | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    row_end = model.model.vocabulary_mapping.eol_token_id
    config["visual_spec"] = {"grids": grids, "image_ids": [ids[0], ids[-1] + 1], "row_end": row_end}
    return config, named("model", model.model.text_model) | named("lm_head", model.lm_head)


@torch.no_grad()
def _janus(model: Any, grids: list[list[int]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    vq, first = model.config.vq_config, model.config.text_config.vocab_size
    side = round(model.config.vision_config.num_image_tokens**0.5)
    stop = first + vq.num_embeddings
    config = _plain(model.config.text_config)
    config |= {"architectures": ["VisualSpecJanus"], "model_type": "llama", "tie_word_embeddings": False}
    config |= {"vocab_size": stop + 1, "eos_token_id": stop}
    sizes = ("image_token_embed_dim", "projection_dim", "num_embeddings", "hidden_act")
    config["visual_spec"] = {
        "grids": [[side, side]],
        "image_ids": [first, stop],
        "head": {name: getattr(vq, name) for name in sizes},
    }
    weights = named("model", model.model.language_model)
    codes = torch.arange(vq.num_embeddings, device=model.device)
    words, pictures = (
        weights["model.embed_tokens.weight"],
        model.prepare_embeddings_for_image_generation(codes),
    )
    end = torch.zeros_like(words[:1])
    weights["model.embed_tokens.weight"] = torch.cat([words[:first], pictures.to(words), end])
    return config, weights | named("lm_head", model.model.generation_head)


def _glm_image(model: Any, grids: list[list[int]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = _plain(model.config.text_config) | {
        "architectures": ["VisualSpecGlmImage"],
        "model_type": "glm4",
    }
    config |= {"eos_token_id": model.config.image_end_token_id, "tie_word_embeddings": False}
    # What GLM-4 has otherwise.
    config["partial_rotary_factor"] = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config["visual_spec"] = {
        "grids": grids,
        "image_ids": [0, model.config.vq_config.num_embeddings],
        "scored": model.lm_head.out_features,
    }
    return config, named("model", model.model.language_model) | named("lm_head", model.lm_head)


_WRITERS = {"Emu3": _emu3, "Janus": _janus, "GLM-Image": _glm_image}


def _plain(config: PreTrainedConfig) -> dict[str, Any]:
    kept = config.to_dict()
    return {name: value for name, value in kept.items() if name not in ("transformers_version", "dtype")}
