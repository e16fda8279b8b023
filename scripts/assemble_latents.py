"""Put trained parts together into the folders that `LatentImagePipeline.from_pretrained("shapes_mar")` and
"shapes_causal" read.

`python scripts/assemble_latents.py --vae FOLDER --transformer FOLDER --drafter FOLDER --out
weights/visual_spec_models/shapes_mar`

With `--share-vae shapes_mar` the autoencoder stays in that folder beside `--out`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME

from visual_spec.data.shapes_classes import CLASS_NAMES
from visual_spec.pipelines import components
from visual_spec.pipelines.latent_image import LatentImagePipeline
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.training.loop import hold_in_8_bits, write_json


def load(folder: Path, head_steps: int, final_noise: float) -> Any:
    """A trained model, with the chain that its head draws by."""
    kind = getattr(components, json.loads((folder / "config.json").read_text())["_class_name"])
    return kind.from_pretrained(
        folder, torch_dtype=torch.float32, head_steps=head_steps, final_noise=final_noise
    )


def tidy(folder: Path, source: Path, *, weights: bool) -> None:
    """Leave out where a part was trained, and add the record of its training; `weights`: and its weights as stored."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("_name_or_path", None)
    write_json(folder / "config.json", config)
    write_json(folder / "training.json", json.loads((source / "training.json").read_text()))
    if weights:
        shutil.copyfile(source / SAFETENSORS_WEIGHTS_NAME, folder / SAFETENSORS_WEIGHTS_NAME)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vae", type=Path, required=True, help="what visual_spec.training.kl_tokenizer wrote"
    )
    parser.add_argument("--transformer", type=Path, required=True, help="what visual_spec.training.mar wrote")
    parser.add_argument("--drafter", type=Path, help="the same with --size small")
    parser.add_argument(
        "--share-vae", metavar="NAME", help="the folder beside --out that holds the autoencoder"
    )
    parser.add_argument("--guidance-scale", type=float, default=3.0, help="default of the pipeline")
    parser.add_argument("--head-steps", type=int, default=50, help="levels of a token's chain")
    parser.add_argument(
        "--final-noise", type=float, default=0.0, help="of the last level, a standard deviation"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    chain = arguments.head_steps, arguments.final_noise
    parts = {"transformer": arguments.transformer, "drafter": arguments.drafter}
    vae = AutoencoderKL.from_pretrained(arguments.vae, torch_dtype=torch.float16)
    # Its first and last layers keep 16 bits: there 8 cost more than in all the others (27.52 dB, not 27.68, of 27.77).
    hold_in_8_bits(vae, r"(encoder|decoder)\.(down|mid|up)_block", ndim=4)
    loaded: dict[str, Any] = {
        name: None if folder is None else load(folder, *chain) for name, folder in parts.items()
    }
    pipe = LatentImagePipeline(
        vae=vae,
        sampler=make_sampler("continuous"),
        id2label=list(CLASS_NAMES),
        default_guidance_scale=arguments.guidance_scale,
        **loaded,
    )
    pipe.save_pretrained(arguments.out)
    for name, folder in parts.items():
        if folder is not None:
            tidy(arguments.out / name, folder, weights=True)
    tidy(arguments.out / "vae", arguments.vae, weights=False)
    for written in ("pipeline.py", "README.md"):  # of saved folders; this one is part of the package
        (arguments.out / written).unlink(missing_ok=True)
    index = json.loads((arguments.out / "model_index.json").read_text())
    write_json(arguments.out / "model_index.json", index | {"_class_name": type(pipe).__name__})
    if arguments.share_vae is not None:
        shutil.rmtree(arguments.out / "vae")
        write_json(arguments.out / "shared.json", {"vae": arguments.share_vae})


if __name__ == "__main__":
    main()
