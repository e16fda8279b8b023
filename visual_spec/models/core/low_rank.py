"""Folders that hold only what differs from another model: new weights, and changes of low rank (LoRA, 2106.09685).

Such a folder has `adapter.json`: {"adapts": "folder/component"}, which lies beside the pipeline's folder. A matrix W of
the other model becomes W + up @ down, where the weights have `<name>.up` [out, rank] and `<name>.down` [rank, in].
Other weights of the folder are taken as they are, and what it does not name is the other model's. Where the other one
is a part of the model, "inside" says how its weights' names begin there.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import Tensor

from visual_spec.files.reading import read_object

ADAPTER = "adapter.json"
UP, DOWN = ".up", ".down"


@torch.no_grad()
def whole_weights(folder: Path) -> dict[str, Tensor]:
    """Return all weights of the model that `folder` makes of the one it adapts, in 32 bits.

    Raises:
        ValueError: the other model is not there, or a change fits no matrix of it; names the file.
    """
    path, told = folder / SAFETENSORS_WEIGHTS_NAME, read_object(folder / ADAPTER)
    name, inside = str(told.get("adapts")), str(told.get("inside", ""))
    owner = folder.absolute().parents[1] / name / SAFETENSORS_WEIGHTS_NAME
    if ".." in Path(name).parts or not owner.is_file():
        raise ValueError(f"{folder / ADAPTER} adapts {name!r}, and there is no {owner}; place it there.")
    weights, changes = (
        {key: value.to(torch.float32) for key, value in load_file(file).items()} for file in (owner, path)
    )
    weights = {inside + key: value for key, value in weights.items()}
    for key in [key for key in changes if key.endswith(UP)]:
        name = key.removesuffix(UP)
        up, down, matrix = changes.pop(key), changes.pop(name + DOWN, None), weights.get(name)
        if matrix is None or down is None or (*up.shape, *matrix.shape) != (
            *matrix.shape[:1], *down.shape[:1], *up.shape[:1], *down.shape[1:]
        ):  # fmt: skip
            raise ValueError(f"{path}: {key} changes no matrix of {owner}; copy or download both again.")
        weights[name] = matrix + up @ down
    return weights | changes
