"""Folders of `speculators` (vllm-project): `config.json` and `model.safetensors`, read and written.

What engines read of a folder is the whole file. They find a verifier's embedding and head where the folder has none.
A corrector has weights beside the layout, under `corrector.`, and `corrects` in its config.json; engines refuse it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from visual_spec.files.documents import write_json
from visual_spec.files.whole import written_whole
from visual_spec.models.core.saved import Difference, check_finite, check_there, fetched, read_settings

WEIGHTS = "model.safetensors"
# Of a verifier, or of training alone.
_LEFT_OUT = ("verifier_lm_head.", "verifier_norm.", "t2d", "confidence_head.")


def read_folder(kind: Any, name: str | os.PathLike, options: Mapping[str, Any]) -> Any:
    """Return the drafter of class `kind` of a folder, or of a repository of the Hub.

    Raises:
        ValueError: it is no folder of a block drafter, or its weights do not fit its config.json; says why.
        OSError: nothing can be fetched under a Hub id.
    """
    check_there(name, "config.json", options)
    if not Path(name).is_dir():
        name = fetched(os.fspath(name), ["config.json", "*.safetensors"], options)
    folder = Path(name) / (options.get("subfolder") or "")
    config = read_settings(folder / "config.json")
    if config.get("speculators_model_type") not in ("dflash", "dspark"):
        raise ValueError(
            f"{folder} holds a drafter of kind {config.get('speculators_model_type')!r}; pass a folder of "
            "`speculators` of kind 'dflash' or 'dspark'."
        )
    if config["speculators_model_type"] == "dspark":
        config = {"sample_from_anchor": True, "markov_rank": 256} | config
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {WEIGHTS}; copy or download it again.")
    weights = {
        key: value for key, value in load_file(folder / WEIGHTS).items() if not key.startswith(_LEFT_OUT)
    }
    taken = signature(kind.__init__).parameters
    settings = {key: value for key, value in config.items() if key in taken}
    settings |= {"own_embeddings": "embed_tokens.weight" in weights, "own_head": "lm_head.weight" in weights}
    try:
        model = kind(**settings)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{folder}/config.json makes no {kind.__name__}: {error}") from error
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if difference := Difference.between(weights, shapes):
        raise ValueError(
            f"{folder} does not hold the {kind.__name__} of its config.json: {difference}; copy or download it again."
        )
    floating = [value.dtype for value in weights.values() if value.is_floating_point()]
    check_finite(weights, str(folder))
    model.to(options.get("torch_dtype") or options.get("dtype") or floating[0]).load_state_dict(weights)
    return model.eval()


def write_folder(drafter: Any, folder: str | os.PathLike) -> None:
    """Write a drafter; a kill in between leaves no half-written folder."""
    config = {
        key: value
        for key, value in dict(drafter.config).items()
        if not key.startswith("_") and value is not None
    }
    kind = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}[config["speculators_model_type"]]
    tokens = drafter.most
    config |= {"architectures": [kind], "_class_name": "BlockDrafter"}
    config.setdefault(
        "speculators_config",
        {
            "algorithm": config["speculators_model_type"],
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": "", "architectures": []},
        },
    )
    weights: dict[str, Tensor] = {key: value.contiguous() for key, value in drafter.state_dict().items()}
    with written_whole(folder) as whole:
        write_json(whole / "config.json", json.loads(json.dumps(config, allow_nan=False)))
        save_file(weights, whole / WEIGHTS, metadata={"format": "pt"})
