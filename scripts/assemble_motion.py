"""Put trained parts together into the folder that `VideoPipeline.from_pretrained("motion")` reads.

`python scripts/assemble_motion.py --trained FOLDER --out weights/visual_spec_models/motion`

The tokenizer is that of `shapes` and stays in its folder beside `--out`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.video import VideoPipeline
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler
from visual_spec.training.embedding import RECORD, embed


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
    parts = ("transformer", "text_encoder")
    embed(pipe, out, trained={part: trained / part for part in parts}, shared={"vq_model": arguments.share})
    shutil.copyfile(trained / RECORD, out / "transformer" / RECORD)


if __name__ == "__main__":
    main()
