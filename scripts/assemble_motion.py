"""Put trained parts together into the folder that `VideoPipeline.from_pretrained("motion")` reads.

`python scripts/assemble_motion.py --trained FOLDER --out visual_spec/models/weights/motion`

The tokenizer is that of `shapes` and stays in its folder beside `--out`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME

from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.video import VideoPipeline
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler
from visual_spec.training.loop import write_json


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trained", type=Path, required=True, help="folder that python -m visual_spec.training.motion wrote"
    )
    parser.add_argument("--share", default="shapes", help="the folder beside --out that holds the tokenizer")
    parser.add_argument("--guidance-scale", type=float, default=1.0, help="default of the pipeline")
    parser.add_argument("--temperature", type=float, default=0.7, help="default of the pipeline")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    trained, out = arguments.trained, arguments.out
    pipe = VideoPipeline(
        transformer=LlamaGenTransformer.from_pretrained(trained / "transformer", torch_dtype=torch.float32),
        vq_model=VQModel.from_pretrained(
            out.parent / arguments.share / "vq_model", torch_dtype=torch.float32
        ),
        text_encoder=CaptionEncoder.from_pretrained(trained / "text_encoder", torch_dtype=torch.float32),
        sampler=SpeculativeJacobiSampler(128, initial_draft="previous_frame"),
        default_guidance_scale=arguments.guidance_scale,
        default_temperature=arguments.temperature,
    )
    pipe.save_pretrained(out)
    for part in ("transformer", "text_encoder"):  # as they were stored, in 8 bits
        for name in (SAFETENSORS_WEIGHTS_NAME, "config.json"):
            shutil.copyfile(trained / part / name, out / part / name)
    write_json(out / "transformer" / "training.json", json.loads((trained / "training.json").read_text()))
    shutil.rmtree(out / "vq_model")
    write_json(out / "shared.json", {"vq_model": arguments.share})
    for written in ("pipeline.py", "README.md"):  # of saved folders; this one is part of the package
        (out / written).unlink(missing_ok=True)
    index = json.loads((out / "model_index.json").read_text())
    write_json(out / "model_index.json", index | {"_class_name": type(pipe).__name__})


if __name__ == "__main__":
    main()
