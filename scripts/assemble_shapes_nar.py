"""Put a trained near-to-far model into the folder that `ImagePipeline.from_pretrained("shapes_nar")` reads.

`python scripts/assemble_shapes_nar.py --model FOLDER --out visual_spec/models/weights/shapes_nar`

Tokenizer and caption encoder stay in the folder of `shapes` beside `--out`, which `shared.json` names. The weights are
copied as they are, in 8 bits.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME

from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.embedded import SHARED
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.samplers.ordered import OrderedSampler
from visual_spec.training.loop import write_json

OWNER, PARTS = "shapes", ("vq_model", "text_encoder")


def assemble(model: Path, out: Path, *, guidance_scale: float, owner: str = OWNER) -> None:
    """Write the folder.

    Args:
        model: what `python -m visual_spec.training.flashar` wrote.
        out: a folder beside the one of `owner`, which holds the shared parts.
        guidance_scale: default of the pipeline.
    """
    home = out.parent / owner
    pipe = ImagePipeline(
        transformer=LlamaGenTransformer.from_pretrained(model),
        vq_model=VQModel.from_pretrained(home / PARTS[0]),
        text_encoder=CaptionEncoder.from_pretrained(home / PARTS[1]),
        sampler=OrderedSampler(),
        default_guidance_scale=guidance_scale,
    )
    pipe.save_pretrained(out)
    for part in PARTS:
        shutil.rmtree(out / part)
    write_json(out / SHARED, dict.fromkeys(PARTS, owner))
    for file in (SAFETENSORS_WEIGHTS_NAME, "training.json"):
        shutil.copyfile(model / file, out / "transformer" / file)
    config = json.loads((out / "transformer" / "config.json").read_text())
    config.pop("_name_or_path", None)
    write_json(out / "transformer" / "config.json", config)
    for written in ("pipeline.py", "README.md"):  # of saved folders; this one is part of the package
        (out / written).unlink(missing_ok=True)
    index = json.loads((out / "model_index.json").read_text())
    write_json(out / "model_index.json", index | {"_class_name": type(pipe).__name__})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="what visual_spec.training.flashar wrote")
    parser.add_argument("--out", type=Path, required=True, help="a folder beside that of shapes")
    parser.add_argument("--guidance-scale", type=float, default=1.5, help="default of the pipeline")
    given = parser.parse_args()
    assemble(given.model, given.out, guidance_scale=given.guidance_scale)


if __name__ == "__main__":
    main()
