"""The embedded models, a package of their own: names and sizes. Reads JSON only, so listing them needs no PyTorch."""

import importlib.util
import json
import os
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

from visual_spec.families import family_of
from visual_spec.pipelines.components import resolved
from visual_spec.samplers.registry import meant

INDEX, SHARED = "model_index.json", "shared.json"
_PACKAGE = "visual_spec_models"


def weights_folder() -> Path:
    """The folder of the embedded models.

    In a checkout it is `weights/visual_spec_models` beside the code, so that weights and code are of one commit.
    Otherwise it is the installed package `visual-spec-models`. Without that package, no folder exists at the path.
    """
    beside = Path(__file__).parents[2] / "weights" / _PACKAGE
    if beside.is_dir():
        return beside
    installed = importlib.util.find_spec(_PACKAGE)
    return beside if installed is None or installed.origin is None else Path(installed.origin).parent


def missing_models() -> str:
    """What to install where there are no embedded models; empty where they are."""
    if weights_folder().is_dir():
        return ""
    return "the embedded models are not installed: pip install ./weights in a checkout"


def embedded_models() -> list[str]:
    """Names that `from_pretrained` takes without a download."""
    return sorted(path.parent.name for path in weights_folder().glob(f"*/{INDEX}"))


def embedded_drafters() -> list[str]:
    """Names that `load_drafter` takes: drafters that are no part of a pipeline's own folder."""
    return sorted(path.parent.name for path in weights_folder().glob("*_drafter/config.json"))


def embedded_refiners() -> list[str]:
    """Names that `load_refiner` takes: small next-scale models beside the one in a pipeline's own folder."""
    return sorted(path.parent.name for path in weights_folder().glob("*_refiner/config.json"))


def embedded_folder(name: str) -> Path:
    """The `save_pretrained` folder of an embedded model."""
    return weights_folder() / name


def local_folder(name: str | os.PathLike) -> Path | None:
    """Where a pipeline of this name is on this disk; None: nowhere.

    What the working directory has under the name of an embedded model counts only if it is a pipeline.
    """
    path = Path(name)
    if os.fspath(name) in embedded_models() and not (path / INDEX).is_file():
        return embedded_folder(os.fspath(name))
    return path if path.is_dir() else None


def refuse_no_pipeline(name: str | os.PathLike) -> None:
    """Refuse a name that no embedded model and no Hub id can have, and a path without a saved pipeline.

    Raises:
        ValueError: an unknown or empty name, a path at which there is nothing, a file, or a folder without
            model_index.json; says what to do.
    """
    path, text = local_folder(name) or Path(name), os.fspath(name)
    if path.is_dir() and not (path / INDEX).exists():
        from visual_spec.files.whole import sweep

        sweep(path)  # a save that was killed between two renames
    if not text.strip():
        raise ValueError(
            "an empty model name given; pass an embedded model, a folder written by save_pretrained, or a Hub id "
            "'owner/name'."
        )
    convert = f"visual-spec convert {'FILE...' if path.is_dir() else path} --out DIR"
    if path.is_file():
        raise ValueError(
            f"{path} is a file. An official checkpoint is loaded together with its tokenizer's file by from_official, "
            f"or made into a folder by `{convert}`."
        )
    if path.is_dir():
        if not (path / INDEX).exists():
            raise ValueError(f"{path} has no {INDEX}, so it is no pipeline ({_what_is_there(path, convert)}")
    elif path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise ValueError(f"there is no folder {text}; pass one written by save_pretrained.")
    elif "/" not in text:
        raise ValueError(
            f"unknown model {text!r}; {missing_models() or 'embedded models are ' + ', '.join(embedded_models())}. "
            "Pass one of them, a folder written by save_pretrained, or a Hub id 'owner/name'."
            + meant(text, embedded_models())
        )


def _what_is_there(folder: Path, convert: str) -> str:
    """What a folder that is no pipeline holds, and what to do with it."""
    config = folder / "config.json"
    try:
        kinds = json.loads(config.read_text()).get("architectures") if config.is_file() else None
    except (ValueError, AttributeError, OSError):
        kinds = None
    if isinstance(kinds, list) and kinds:
        return (
            f"it holds a {kinds[0]} of transformers). In Python: model = transformers.{kinds[0]}.from_pretrained("
            f"{os.fspath(folder)!r}); visual_spec.accelerate(model). `visual-spec models` says what that takes."
        )
    files = sorted(file.name for file in folder.iterdir())
    return (
        f"it holds {', '.join(files[:5]) or 'nothing'}{' ...' if len(files) > 5 else ''}). Pass a folder written by "
        f"save_pretrained; one is made of official checkpoint files by `{convert}`."
    )


def part_folder(folder: Path, part: str) -> Path:
    """Where the files of a component are: in the pipeline's folder, or in the folder of the pipeline it is shared with.

    Two embedded pipelines may have a component in common. Its files are in one of their folders, and `shared.json` of
    the other one says in which: {component: name of the folder}, or {component: "folder/component"} where it has
    another name there. (Not a link, which a wheel cannot hold.)
    """
    owner = shared_parts(folder).get(part)
    if owner is None:
        return folder / part
    home, _, name = owner.partition("/")
    return folder.parent / home / (name or part)


def shared_parts(folder: Path) -> dict[str, str]:
    """The components of a pipeline whose files are in the folder of another one: {component: where}."""
    path = folder / SHARED
    return json.loads(path.read_text()) if path.is_file() else {}


def describe(folder: Path) -> dict[str, Any]:
    """Facts of a `save_pretrained` folder.

    Returns:
        name; pipeline, the class name; components, {name: class name}; parameters, {name: count}; bytes of all
        weights; image_size in pixels, or None for models that do not draw; sampling_rate in Hz, or None for models that
        do not play; calls, the kinds of `visual_spec.samplers.registry` that the model answers.

    Raises:
        FileNotFoundError: there is no model_index.json in it.
    """
    index = resolved(json.loads((folder / "model_index.json").read_text()))
    components = {
        name: value[1] for name, value in index.items() if isinstance(value, list) and value[1] is not None
    }
    weights = {name: sorted(part_folder(folder, name).glob("*.safetensors")) for name in components}
    return {
        "name": folder.name,
        "pipeline": index["_class_name"],
        "components": components,
        "parameters": {name: sum(map(_count_parameters, paths)) for name, paths in weights.items() if paths},
        "bytes": sum(path.stat().st_size for paths in weights.values() for path in paths),
        "image_size": _image_size(folder),
        # Of a codec that is a component of its own, or a part of a whole MusicGen.
        "sampling_rate": (
            _settings(folder, "codec") or _settings(folder, "transformer").get("audio_encoder", {})
        ).get("sampling_rate"),
        "calls": family_of(
            index["_class_name"], index, _settings(folder, "sampler", "sampler_config.json")
        ).calls,
    }


def _settings(folder: Path, part: str, name: str = "config.json") -> dict[str, Any]:
    """What the settings of a component say; nothing where there are none."""
    path = part_folder(folder, part) / name
    return json.loads(path.read_text()) if path.exists() else {}


def _image_size(folder: Path) -> int | None:
    """Side of the pictures of a tokenizer: its setting, or what the scales and levels of a multi-scale one make.

    Of a clip it is what the transformer's grid of tokens makes, or what small frames are enlarged to.
    """
    index = json.loads((folder / "model_index.json").read_text())
    if "frame_size" in index:
        return index["frame_size"] * index["scale"]
    settings = _settings(folder, "transformer")
    config = _settings(folder, "vq_model") or _settings(folder, "vae")
    if "scales" in config:
        return config["scales"][-1] * 2 ** (len(config["channel_multipliers"]) - 1)
    if config and settings.get("num_frames", 1) > 1:
        return settings["grid_size"] * 2 ** (len(config["channel_multipliers"]) - 1)
    return config.get("image_size", config.get("sample_size"))


def _count_parameters(path: Path) -> int:
    """Numbers in a safetensors file, from its header."""
    with safe_open(path, "np") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
