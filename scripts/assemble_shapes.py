"""Put trained parts together into the folder that `ImagePipeline.from_pretrained("shapes")` reads.

`python scripts/assemble_shapes.py --tokenizer FOLDER --ar FOLDER --out weights/visual_spec_models/shapes`
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler
from visual_spec.training.loop import write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        help="folder that python -m visual_spec.training.tokenizer wrote",
    )
    parser.add_argument(
        "--ar", type=Path, required=True, help="folder that python -m visual_spec.training.ar wrote"
    )
    parser.add_argument(
        "--drafter", type=Path, help="the folder `drafter` that python -m visual_spec.training.drafter wrote"
    )
    parser.add_argument("--guidance-scale", type=float, default=1.5, help="default of the pipeline")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    pipe = ImagePipeline(
        transformer=LlamaGenTransformer.from_pretrained(arguments.ar / "transformer"),
        vq_model=VQModel.from_pretrained(arguments.tokenizer),
        text_encoder=CaptionEncoder.from_pretrained(arguments.ar / "text_encoder"),
        sampler=SpeculativeJacobiSampler(),
        default_guidance_scale=arguments.guidance_scale,
        drafter=None if arguments.drafter is None else EagleDrafter.from_pretrained(arguments.drafter),
    )
    # Half precision on disk; from_pretrained computes in float32 again.
    pipe.to(torch.float16).save_pretrained(arguments.out)
    for path in arguments.out.glob("*/config.json"):  # where the parts were trained is nobody's business
        config = json.loads(path.read_text())
        config.pop("_name_or_path", None)
        write_json(path, config)
    sources = {"vq_model": arguments.tokenizer, "transformer": arguments.ar, "drafter": arguments.drafter}
    for part, source in sources.items():
        if source is not None:
            write_json(
                arguments.out / part / "training.json", json.loads((source / "training.json").read_text())
            )


if __name__ == "__main__":
    main()
