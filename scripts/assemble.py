"""Put trained parts together into the folder of an embedded model.

    python scripts/assemble.py shapes transformer=AR/transformer text_encoder=AR/text_encoder vq_model=TOKENIZER \\
        drafter=DRAFTER --out weights/visual_spec_models/shapes
    python scripts/assemble.py shapes_nar transformer=FOLDER --out weights/visual_spec_models/shapes_nar
    python scripts/assemble.py motion_causal transformer=T/transformer text_encoder=T/text_encoder \\
        --set training_frames=8 --out weights/visual_spec_models/motion_causal

A part is a folder that a trainer wrote. Parts that a recipe shares stay in their folder beside `--out`, and
`shared.json` says where. `--set` changes settings of the pipeline and its sampler.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout need not be installed

from visual_spec.data.shapes_classes import CLASS_NAMES
from visual_spec.data.tunes import NUM_SAMPLES, SAMPLE_RATE
from visual_spec.files.documents import write_json
from visual_spec.models.core.low_rank import ADAPTER
from visual_spec.pipelines import components
from visual_spec.pipelines.embedded import SHARED
from visual_spec.pipelines.sampler_text import make_sampler, parse_sampler

RECORD = "training.json"


@dataclass(frozen=True)
class Recipe:
    """How an embedded model is put together.

    Attributes:
        pipeline: its class; empty for a network alone.
        sampler: as on the command line.
        settings: of the pipeline.
        shared: parts of another folder: {part: folder beside this one, or "folder/part"}.
        classes: of shared parts that are read as another class than they were saved as.
        halved: parts that are stored in 16 bits, {part: None}, with some weights in 8: {part: (beginning of their
            names, dimensions; 0: any)}. Other parts keep the weights that the trainer stored.
        rounded: parts of transformers whose halved weights `round_weights` rounds.
        configured: settings that the trained networks get.
        equal_to: a folder beside this one whose equal parts are shared with it.
    """

    pipeline: str
    sampler: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    halved: Mapping[str, tuple[str, int] | None] = field(default_factory=dict)
    rounded: tuple[str, ...] = ()
    configured: Mapping[str, Any] = field(default_factory=dict)
    equal_to: str = ""


CLASSES = {"id2label": list(CLASS_NAMES)}
OF_SHAPES = {"vq_model": "shapes", "text_encoder": "shapes"}
CLIPS = {"default_guidance_scale": 1.0, "default_temperature": 0.7}
CLIPS_OF_TUNES = {
    "default_guidance_scale": 1.5,
    "default_temperature": 1.0,
    "max_audio_length_in_s": NUM_SAMPLES / SAMPLE_RATE,
}
# The first and last layers of the autoencoder keep 16 bits: there 8 cost more than in all the others (27.52 dB, not
# 27.68, of 27.77).
AUTOENCODER = {"vae": (r"(encoder|decoder)\.(down|mid|up)_block", 4)}
CONTINUOUS = Recipe(
    "ContinuousImagePipeline",
    "continuous",
    {**CLASSES, "default_guidance_scale": 3.0},
    halved=AUTOENCODER,
    configured={"head_steps": 50, "final_noise": 0.0},
)
# No sample depends on what a drafter thinks; of the other parts two points of accuracy may be lost.
MUSIC: dict[str, Any] = dict(
    halved={"text_encoder": ("", 2), "drafter": ("", 2), "codec": None, "transformer": None},
    rounded=("codec", "transformer"),
)

RECIPES = {
    "shapes": Recipe(
        "ImagePipeline",
        "speculative-jacobi",
        {"default_guidance_scale": 1.5, "default_temperature": 0.6},
        halved={**dict.fromkeys(("vq_model", "text_encoder")), "drafter": ("", 2), "transformer": ("", 2)},
    ),
    "things": Recipe(
        "ImagePipeline",
        "speculative-jacobi",
        {"default_guidance_scale": 1.5, "default_temperature": 0.5},
        halved={**dict.fromkeys(("vq_model", "text_encoder")), "drafter": ("", 2), "transformer": ("", 2)},
    ),
    "shapes_nar": Recipe(
        "ImagePipeline", "ordered", {"default_guidance_scale": 1.5, "default_temperature": 0.6}, OF_SHAPES
    ),
    "shapes_any": Recipe(
        "ImagePipeline",
        "any-order:order=halton,steps=20",
        {"default_guidance_scale": 1.5, "default_temperature": 0.7},
        OF_SHAPES,
    ),
    "shapes_shuffle": Recipe(
        "ImagePipeline",
        "block-jacobi",
        {"default_guidance_scale": 1.5, "default_temperature": 0.7},
        OF_SHAPES,
    ),
    "shapes_control": Recipe(
        "ImagePipeline",
        "speculative-jacobi",
        {"default_guidance_scale": 3.0, "default_temperature": 0.6},
        OF_SHAPES,
    ),
    "shapes_distilled": Recipe(
        "DistilledTextImagePipeline",
        "distilled:steps=2",
        {"default_guidance_scale": 1.5},
        {**OF_SHAPES, "teacher": "shapes/transformer"},
    ),
    "shapes_masked": Recipe(
        "MaskedImagePipeline",
        "masked:steps=16,choice_temperature=1",
        {"default_guidance_scale": 2.0},
        OF_SHAPES,
    ),
    "shapes_var": Recipe(
        "ScaleImagePipeline",
        "scale-wise",
        {**CLASSES, "default_guidance_scale": 2.0, "default_top_k": 0, "default_top_p": 1.0},
        halved={"vq_model": None} | dict.fromkeys(("transformer", "refiner"), (r"(blocks|head_nm)[.]", 2)),
    ),
    "shapes_flexvar": Recipe(
        "ScaleImagePipeline",
        "scale-wise",
        {**CLASSES, "default_guidance_scale": 2.0, "default_top_k": 0, "default_top_p": 1.0},
        {"vq_model": "shapes"},
        classes={"vq_model": "FlexVQModel"},
        halved={"transformer": (r".*(weight|pos_1LC)$", 0)},
    ),
    # A refiner that was fine-tuned for CoDe, named by `--sampler scale-wise:refiner=shapes_var_refiner`.
    "shapes_var_refiner": Recipe("", halved={"transformer": None}),
    "shapes_mar": CONTINUOUS,
    "shapes_causal": Recipe(
        CONTINUOUS.pipeline,
        CONTINUOUS.sampler,
        CONTINUOUS.settings,
        {"vae": "shapes_mar"},
        configured=CONTINUOUS.configured,
    ),
    "tunes": Recipe("AudioPipeline", "columns", CLIPS_OF_TUNES, **MUSIC),
    # The steps that MAGNeT was published with. Without its spans of 3 frames this small model hears captions better.
    "tunes_masked": Recipe(
        "AudioPipeline",
        "masked:steps=20/10/10/10,clock=magnet,span=1,temperature=falling",
        {**CLIPS_OF_TUNES, "masked": True},
        equal_to="tunes",
        **MUSIC,
    ),
    "motion": Recipe(
        "VideoPipeline",
        "speculative-jacobi:initial_draft=panned_frame",
        CLIPS,
        {"vq_model": "shapes"},
    ),
    "motion_nar": Recipe(
        "VideoPipeline",
        "ordered",
        {**CLIPS, "default_guidance_scale": 1.5},
        {"vq_model": "shapes", "text_encoder": "motion"},
    ),
    "motion_masked": Recipe(
        "VideoPipeline", "frame-masked:steps=4,history_hidden=0.3", CLIPS, {"vq_model": "shapes"}
    ),
    "motion_causal": Recipe(
        "ChunkVideoPipeline", "chunk-wise:chunk=2,shift=1.0,first_steps=16", {"training_frames": 8}
    ),
    "motion_planned": Recipe(
        "VideoPipeline",
        "frame-masked:steps=4,history_hidden=0.1",
        CLIPS,
        {"vq_model": "shapes", "text_encoder": "motion_masked"},
    ),
}


def assemble(
    recipe: Recipe, parts: Mapping[str, Path], out: Path, *, sampler: str = "", **changes: Any
) -> None:
    """Write the folder.

    Args:
        parts: {part: folder that a trainer wrote}.
        out: a folder beside those that hold shared parts.
        sampler: in place of the recipe's.
        changes: settings in place of the recipe's.

    Raises:
        ValueError: a part that is shared is passed.
    """
    if both := sorted(parts.keys() & recipe.shared.keys()):
        raise ValueError(f"{', '.join(both)} passed; this model takes it from {recipe.shared[both[0]]}.")
    configured = {name: changes.pop(name, value) for name, value in recipe.configured.items()}
    networks = {
        part: load(folder, **({} if part in recipe.halved else configured)) for part, folder in parts.items()
    }
    for part, eight_bits in recipe.halved.items():
        if part in networks:
            networks[part].to(torch.float16)
            if eight_bits is not None:
                hold_in_8_bits(networks[part], *eight_bits)
    if not recipe.pipeline:
        ((part, network),) = networks.items()
        network.save_pretrained(out)
        _tidy(out, parts[part], part, weights=False)
        return
    for part, owner in recipe.shared.items():
        home, _, name = owner.partition("/")
        networks[part] = load(out.parent / home / (name or part), recipe.classes.get(part))
    if text := sampler or recipe.sampler:
        name, settings = parse_sampler(text)
        networks["sampler"] = make_sampler(name, **settings)
    pipe = getattr(components, recipe.pipeline)(**networks, **{**recipe.settings, **changes})
    pipe.save_pretrained(out)
    for part in recipe.shared:
        shutil.rmtree(out / part)
    if recipe.shared:
        write_json(out / SHARED, dict(recipe.shared))
    for part, folder in parts.items():
        _tidy(out / part, folder, part, weights=part not in recipe.halved)
    for part in recipe.rounded:
        round_weights(out / part)
    for written in ("pipeline.py", "README.md"):  # of saved folders; this one is part of a package
        (out / written).unlink(missing_ok=True)
    index = json.loads((out / "model_index.json").read_text())
    write_json(out / "model_index.json", index | {"_class_name": type(pipe).__name__})
    if recipe.equal_to and (out.parent / recipe.equal_to).is_dir():
        share_equal_parts(out, out.parent / recipe.equal_to)


def load(folder: Path, name: str | None = None, **settings: Any) -> Any:
    """A network that was saved in `folder`, in 32 bits, of the class `name`, or else of the one that it names."""
    config = json.loads((folder / "config.json").read_text())
    written: str = name or config.get("_class_name") or config["architectures"][0]
    home = "transformers" if "_class_name" not in config else "diffusers"
    kind = getattr(components, written, None) or getattr(importlib.import_module(home), written)
    settings["torch_dtype" if issubclass(kind, ModelMixin) else "dtype"] = torch.float32
    return kind.from_pretrained(folder, **settings)


def _tidy(folder: Path, source: Path, part: str, *, weights: bool) -> None:
    """Leave out where a part was trained, and add the record of its training; `weights`: and its weights as stored."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("_name_or_path", None)
    write_json(folder / "config.json", config)
    # Trainers of two parts leave one record beside them.
    records = [source / RECORD, *([source.parent / RECORD] if part == "transformer" else [])]
    for record in [path for path in records if path.exists()][:1]:
        shutil.copyfile(record, folder / RECORD)
    if weights:
        for name in (SAFETENSORS_WEIGHTS_NAME, ADAPTER):
            if (source / name).exists():
                shutil.copyfile(source / name, folder / name)


@torch.no_grad()
def hold_in_8_bits(model: nn.Module, names: str = "", ndim: int = 2) -> None:
    """Hold weights of `ndim` dimensions in 8 bits (e4m3), to be saved so; the model cannot compute with them.

    Args:
        model: changed in place.
        ndim: 0 is any number.
        names: a regular expression for the beginning of their names.
    """
    for name, parameter in model.named_parameters():
        if ndim in (0, parameter.ndim) and re.match(names, name):
            parameter.data = parameter.data.to(torch.float8_e4m3fn)


def round_weights(folder: Path) -> None:
    """Round the weights of a stored model of transformers to 8 bits, and say so in its config.json.

    Matrices become e4m3. Directions of weight-normed convolutions become whole numbers from -127 to 127: their scale is
    free, so each uses the whole range. Codebooks and all else keep their 16 bits.
    """
    path, weights = folder / "model.safetensors", {}
    for name, value in load_file(path).items():
        if name.endswith("weight.original1"):
            longest = value.float().abs().amax(tuple(range(1, value.ndim)), keepdim=True)
            value = (value.float() * (127 / longest)).round().to(torch.int8)
        elif value.ndim == 2 and ".codebook." not in name:
            value = value.to(torch.float8_e4m3fn)
        weights[name] = value
    save_file(weights, path, metadata={"format": "pt"})
    kinds = sorted({str(value.dtype).removeprefix("torch.") for value in weights.values()} - {"float16"})
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"stored_as": kinds[0] if len(kinds) == 1 else kinds})


def share_equal_parts(out: Path, other: Path) -> None:
    """Leave out parts whose weights another pipeline has, too, and say so in `shared.json`."""
    shared = {}
    for part in ("codec", "text_encoder"):
        here, there = (sorted((folder / part).glob("*.safetensors")) for folder in (out, other))
        if [path.read_bytes() for path in here] == [path.read_bytes() for path in there]:
            shutil.rmtree(out / part)
            shared[part] = other.name
    write_json(out / "shared.json", shared)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("parts", nargs="+", metavar="PART=FOLDER")
    parser.add_argument("--out", type=Path, required=True, help="a folder beside the folders of shared parts")
    parser.add_argument("--sampler", default="", help="default of the pipeline (default: the recipe's)")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the pipeline")
    args = parser.parse_args()
    parts = {part: Path(folder) for part, _, folder in (text.partition("=") for text in args.parts)}
    changes = {name: _value(text) for name, _, text in (text.partition("=") for text in args.set)}
    assemble(RECIPES[args.name], parts, args.out, sampler=args.sampler, **changes)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
