"""Put a trained near-to-far model into the folder that `ImagePipeline.from_pretrained("shapes_nar")` reads.

`python scripts/assemble_shapes_nar.py --model FOLDER --out weights/visual_spec_models/shapes_nar`

Tokenizer and caption encoder stay in the folder of `shapes` beside `--out`, which `shared.json` names. The weights are
copied as they are, in 8 bits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.samplers.ordered import OrderedSampler
from visual_spec.training.embedding import embed

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
    embed(pipe, out, trained={"transformer": model}, shared=dict.fromkeys(PARTS, owner))


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
