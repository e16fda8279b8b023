"""Put a trained student into the folder that `load_pipeline("shapes_distilled")` reads.

`python scripts/assemble_shapes_distilled.py --model FOLDER --out weights/visual_spec_models/shapes_distilled`

Tokenizer, caption encoder and teacher stay in the folder of `shapes` beside `--out`, which `shared.json` names. The
weights are copied as they are, in 8 bits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_student import LlamaGenStudent
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.distilled_image import DistilledTextImagePipeline
from visual_spec.samplers.distilled import DistilledSampler
from visual_spec.training.embedding import embed

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
    shared = {part: owner if part == name else f"{owner}/{name}" for part, name in PARTS.items()}
    embed(pipe, out, trained={"transformer": model}, shared=shared)


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
