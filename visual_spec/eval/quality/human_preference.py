"""The Human Preference Score v2 (Wu et al. 2023), by a CLIP ViT-H/14 that was trained on what people prefer.

The released file has open_clip's names. It is read into the CLIP of transformers, whose sizes and tokenizer the folder
of the model that it was trained from holds (laion/CLIP-ViT-H-14-laion2B-s32B-b79K).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.core.checkpoints import fill, read_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = "HPS_v2*.pt"
_MEAN, _SPREAD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's
_NAMES = (  # open_clip's, and transformers'
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^text_projection$", "text_projection.weight"),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)


def load_preference(folder: str | Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """The network with its weights fixed, and its tokenizer.

    Args:
        folder: config and tokenizer of CLIP ViT-H/14, and one file `HPS_v2*.pt` as it is released.

    Raises:
        FileNotFoundError: no such folder, or not one such file in it.
        ValueError: a file that holds more than tensors, or does not fit the config.
    """
    files = sorted(Path(folder).glob(_FILES))
    if len(files) != 1:
        raise FileNotFoundError(
            f"{folder} holds {len(files)} files {_FILES}; pass a folder with one, such as HPS_v2.1_compressed.pt, and "
            "config.json and the tokenizer of laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
        )
    from transformers import AutoTokenizer, CLIPConfig, CLIPModel

    config = CLIPConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        network: Any = CLIPModel(config)
    weights = _renamed(read_checkpoint(files[0]).weights)
    # Buffers that are no weights: a model on the meta device has none.
    for tower in (network.text_model, network.vision_model):
        embeddings = tower.embeddings
        embeddings.position_ids = torch.arange(embeddings.position_embedding.num_embeddings)[None]
    fill(network, weights, str(files[0]), what=f"the config of {folder}", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return network.eval().requires_grad_(False), tokenizer


def pixels(pictures: Tensor, side: int) -> Tensor:
    """Return what the network sees [N, 3, side, side] of pictures [N, 3, H, W] of 0 to 255.

    Resized by the shorter side, bicubic with antialiasing as current torchvision does for tensors, and cut to the
    middle. Values that overshoot stay.
    """
    height, width = pictures.shape[2:]
    shorter = min(height, width)
    sizes = [int(side * length / shorter) for length in (height, width)]
    resized = pictures / 255
    if shorter != side:
        resized = F.interpolate(resized, sizes, mode="bicubic", antialias=True)
    top, left = (round((size - side) / 2) for size in sizes)
    middle = resized[:, :, top : top + side, left : left + side]
    mean, spread = (torch.tensor(values).to(middle)[:, None, None] for values in (_MEAN, _SPREAD))
    return (middle - mean) / spread


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for key, value in weights.items():
        for pattern, name in _NAMES:
            key = re.sub(pattern, name, key)
        if ".attn.in_proj_" in key:
            for part, third in zip("qkv", value.chunk(3), strict=True):
                renamed[key.replace(".attn.in_proj_", f".self_attn.{part}_proj.")] = third
        else:
            renamed[key] = value.T if key in ("visual_projection.weight", "text_projection.weight") else value
    return renamed
