"""Put trained parts together into the folder that `AudioPipeline.from_pretrained("tunes")` reads.

`python scripts/assemble_tunes.py --codec FOLDER --autoregressive FOLDER --out weights/visual_spec_models/tunes`, and
with `--masked FOLDER --out .../tunes_masked` in place of `--autoregressive` that of the masked model. To the former
belongs `--drafter FOLDER`, the folder `drafter` that python -m visual_spec.training.column_drafter wrote.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import EncodecModel, MusicgenForCausalLM

from visual_spec.data.tunes import NUM_SAMPLES, SAMPLE_RATE
from visual_spec.models.drafters.column_eagle import ColumnEagleDrafter
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.samplers.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.masked import MaskedSampler
from visual_spec.training.loop import hold_in_8_bits, write_json

# The steps that MAGNeT was published with. Without its spans of 3 frames, this small model hears its captions better.
MASKED: dict[str, Any] = {"steps": (20, 10, 10, 10), "clock": "magnet", "span": 1, "temperature": "falling"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--codec", type=Path, required=True, help="folder that python -m visual_spec.training.codec wrote"
    )
    kind = parser.add_mutually_exclusive_group(required=True)
    for name in ("autoregressive", "masked"):
        kind.add_argument(
            f"--{name}",
            type=Path,
            help=f"folder that python -m visual_spec.training.music --kind {name} wrote",
        )
    parser.add_argument("--drafter", type=Path, help="of columns, with --autoregressive")
    parser.add_argument("--guidance-scale", type=float, default=1.5, help="default of the pipeline")
    parser.add_argument("--temperature", type=float, default=1.0, help="default of the pipeline")
    parser.add_argument(
        "--shared-with",
        type=Path,
        help="a pipeline made before, beside this one; equal parts stay in its folder",
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.drafter is not None and arguments.masked is not None:
        parser.error("--drafter given with --masked, which has no use for one; leave it out.")
    masked = arguments.masked is not None
    source: Any = arguments.masked if masked else arguments.autoregressive
    pipe = AudioPipeline(
        transformer=MusicgenForCausalLM.from_pretrained(source / "transformer"),
        codec=EncodecModel.from_pretrained(arguments.codec),
        text_encoder=CaptionEncoder.from_pretrained(source / "text_encoder"),
        sampler=MaskedSampler(**MASKED) if masked else ColumnAutoregressiveSampler(),
        masked=masked,
        default_guidance_scale=arguments.guidance_scale,
        default_temperature=arguments.temperature,
        max_audio_length_in_s=NUM_SAMPLES / SAMPLE_RATE,
        drafter=None if arguments.drafter is None else ColumnEagleDrafter.from_pretrained(arguments.drafter),
    )
    # Half precision on disk; from_pretrained computes in float32 again.
    pipe.to(torch.float16)
    # Matrices in 8 bits. No sample depends on what a drafter thinks; of the others two points of accuracy may be lost.
    for part in (pipe.text_encoder, pipe.drafter):
        if part is not None:
            hold_in_8_bits(part)
    pipe.save_pretrained(arguments.out)
    for path in arguments.out.glob("*/config.json"):  # where the parts were trained is nobody's business
        config = json.loads(path.read_text())
        config.pop("_name_or_path", None)
        write_json(path, config)
    trained = {"codec": arguments.codec, "transformer": source, "drafter": arguments.drafter}
    for part, folder in trained.items():
        if folder is not None:
            record = json.loads((folder / "training.json").read_text())
            write_json(arguments.out / part / "training.json", record)
    for part in ("codec", "transformer"):
        round_weights(arguments.out / part)
    if arguments.shared_with is not None:
        share_equal_parts(arguments.out, arguments.shared_with)


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


if __name__ == "__main__":
    main()
