"""The models that are part of the package: names and sizes. Reads JSON only, so that listing them needs no PyTorch."""

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

WEIGHTS_FOLDER = Path(__file__).parent.parent / "models" / "weights"


def embedded_models() -> list[str]:
    """Names that `from_pretrained` takes without a download."""
    return sorted(path.parent.name for path in WEIGHTS_FOLDER.glob("*/model_index.json"))


def embedded_drafters() -> list[str]:
    """Names that `load_drafter` takes: drafters that are no part of a pipeline's own folder."""
    return sorted(path.parent.name for path in WEIGHTS_FOLDER.glob("*_drafter/config.json"))


def embedded_folder(name: str) -> Path:
    """The `save_pretrained` folder of an embedded model."""
    return WEIGHTS_FOLDER / name


def describe(folder: Path) -> dict[str, Any]:
    """Facts of a `save_pretrained` folder.

    Returns:
        name; pipeline, the class name; components, {name: class name}; parameters, {name: count}; bytes of all
        weights; image_size in pixels, or None for models that do not draw.

    Raises:
        FileNotFoundError: there is no model_index.json in it.
    """
    index = json.loads((folder / "model_index.json").read_text())
    components = {
        name: value[1] for name, value in index.items() if isinstance(value, list) and value[1] is not None
    }
    weights = {name: sorted((folder / name).glob("*.safetensors")) for name in components}
    tokenizer_config = folder / "vq_model" / "config.json"
    image_size = (
        json.loads(tokenizer_config.read_text()).get("image_size") if tokenizer_config.exists() else None
    )
    return {
        "name": folder.name,
        "pipeline": index["_class_name"],
        "components": components,
        "parameters": {name: sum(map(_count_parameters, paths)) for name, paths in weights.items() if paths},
        "bytes": sum(path.stat().st_size for paths in weights.values() for path in paths),
        "image_size": image_size,
    }


def _count_parameters(path: Path) -> int:
    """Numbers in a safetensors file, from its header: 8 bytes of length, then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
