"""Put a trained masked model into the folder that `MaskedImagePipeline.from_pretrained("shapes_masked")` reads.

`python scripts/assemble_shapes_masked.py --model FOLDER --out visual_spec/models/weights/shapes_masked`

Tokenizer and caption encoder are those of `shapes`, to which the folder links. The weights are copied as they are: in 8
bits if they were trained with `--eight-bits`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from visual_spec.models.masked.maskgit import MaskedImageTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.masked_image import MaskedImagePipeline
from visual_spec.samplers.masked import MaskedSampler

SHARED = ("vq_model", "text_encoder")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder that train_shapes_masked.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="a folder beside that of shapes")
    parser.add_argument("--steps", type=int, default=16, help="calls of a picture")
    parser.add_argument("--choice-temperature", type=float, default=1.0, help="0 with --score halton")
    parser.add_argument("--score", default="log_probability")
    parser.add_argument("--guidance-scale", type=float, default=2.0, help="default of the pipeline")
    arguments = parser.parse_args()
    shapes = arguments.out.parent / "shapes"
    halton = {"schedule": "arccos", "clock": "halton"} if "halton" in arguments.score else {}
    pipe = MaskedImagePipeline(
        transformer=MaskedImageTransformer.from_pretrained(arguments.model),
        vq_model=VQModel.from_pretrained(shapes / "vq_model"),
        text_encoder=CaptionEncoder.from_pretrained(shapes / "text_encoder"),
        sampler=MaskedSampler(
            steps=arguments.steps,
            score=arguments.score,
            choice_temperature=arguments.choice_temperature,
            **halton,
        ),
        default_guidance_scale=arguments.guidance_scale,
    )
    pipe.save_pretrained(arguments.out)
    for part in SHARED:
        shutil.rmtree(arguments.out / part)
        (arguments.out / part).symlink_to(Path("..") / "shapes" / part)
    for path in arguments.model.glob("*"):
        if path.name in ("config.json", "diffusion_pytorch_model.safetensors", "training.json"):
            shutil.copy(path, arguments.out / "transformer" / path.name)


if __name__ == "__main__":
    main()
