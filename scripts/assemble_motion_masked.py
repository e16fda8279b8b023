"""Put trained parts together into the folder that `VideoPipeline.from_pretrained("motion_masked")` reads.

`python scripts/assemble_motion_masked.py --trained FOLDER --out weights/visual_spec_models/motion_masked`

The tokenizer is that of `shapes` and stays in its folder beside `--out`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from visual_spec.models.masked.frames import FrameMaskedTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.video import VideoPipeline
from visual_spec.samplers.frames import FrameMaskedSampler
from visual_spec.training.embedding import RECORD, embed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trained", type=Path, required=True, help="folder that python -m visual_spec.training.frames wrote"
    )
    parser.add_argument("--share", default="shapes", help="the folder beside --out that holds the tokenizer")
    parser.add_argument("--frame-steps", type=int, default=4, help="calls that draw a frame")
    parser.add_argument("--history-hidden", type=float, default=0.3)
    parser.add_argument("--guidance-scale", type=float, default=1.0, help="default of the pipeline")
    parser.add_argument("--temperature", type=float, default=0.7, help="default of the pipeline")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    trained, out = arguments.trained, arguments.out
    pipe = VideoPipeline(
        transformer=FrameMaskedTransformer.from_pretrained(trained / "transformer"),
        vq_model=VQModel.from_pretrained(out.parent / arguments.share / "vq_model"),
        text_encoder=CaptionEncoder.from_pretrained(trained / "text_encoder"),
        sampler=FrameMaskedSampler(arguments.frame_steps, arguments.history_hidden),
        default_guidance_scale=arguments.guidance_scale,
        default_temperature=arguments.temperature,
    )
    parts = ("transformer", "text_encoder")
    embed(pipe, out, trained={part: trained / part for part in parts}, shared={"vq_model": arguments.share})
    shutil.copyfile(trained / RECORD, out / "transformer" / RECORD)


if __name__ == "__main__":
    main()
