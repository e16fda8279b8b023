"""Put a trained student into the folder that `load_pipeline("shapes_distilled")` reads.

`python scripts/assemble_shapes_distilled.py --model FOLDER --out visual_spec/models/weights/shapes_distilled`

Tokenizer, caption encoder and teacher stay in the folder of `shapes` beside `--out`, which `shared.json` names. The
weights are copied as they are, in 8 bits.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME

from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_student import LlamaGenStudent
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.distilled_image import DistilledTextImagePipeline
from visual_spec.pipelines.embedded import SHARED
from visual_spec.samplers.distilled import DistilledSampler
from visual_spec.training.loop import write_json

OWNER = "shapes"
PARTS = {"vq_model": "vq_model", "text_encoder": "text_encoder", "teacher": "transformer"}  # as named there


def assemble(model: Path, out: Path, *, steps: int, guidance_scale: float, owner: str = OWNER) -> None:
    """Write the folder.

    Args:
        model: what `python -m visual_spec.training.distilled` wrote.
        out: a folder beside the one of `owner`, which holds the shared parts.
        steps: calls of the student, 1 or 2.
        guidance_scale: of tokens that the teacher draws.
    """
    home = out.parent / owner
    pipe = DistilledTextImagePipeline(
        transformer=LlamaGenStudent.from_pretrained(model, torch_dtype=torch.float32),
        vq_model=VQModel.from_pretrained(home / PARTS["vq_model"]),
        text_encoder=CaptionEncoder.from_pretrained(home / PARTS["text_encoder"]),
        sampler=DistilledSampler(steps),
        default_guidance_scale=guidance_scale,
        teacher=LlamaGenTransformer.from_pretrained(home / PARTS["teacher"]),
    )
    pipe.save_pretrained(out)
    for part in PARTS:
        shutil.rmtree(out / part)
    write_json(
        out / SHARED,
        {part: owner if part == name else f"{owner}/{name}" for part, name in PARTS.items()},
    )
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
    parser.add_argument("--model", type=Path, required=True, help="what visual_spec.training.distilled wrote")
    parser.add_argument("--out", type=Path, required=True, help="a folder beside that of shapes")
    parser.add_argument("--steps", type=int, default=2, help="calls of the student, 1 or 2")
    parser.add_argument("--guidance-scale", type=float, default=1.5, help="of tokens that the teacher draws")
    given = parser.parse_args()
    assemble(given.model, given.out, steps=given.steps, guidance_scale=given.guidance_scale)


if __name__ == "__main__":
    main()
