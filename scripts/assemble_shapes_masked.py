"""Put a trained masked model into the folder that `MaskedImagePipeline.from_pretrained("shapes_masked")` reads.

`python scripts/assemble_shapes_masked.py --model FOLDER --out weights/visual_spec_models/shapes_masked`

Tokenizer and caption encoder stay in the folder of `shapes` beside `--out`, which `shared.json` names. The weights are
copied as they are: in 8 bits if they were trained with `--eight-bits`. `--shortcut` and `--causal-layer` are what
`python -m visual_spec.training.shortcut` and `.causal_layer` wrote; without them the pipeline has none.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from visual_spec.models.masked.causal_layer import CausalLayer
from visual_spec.models.masked.maskgit import MaskedImageTransformer
from visual_spec.models.masked.shortcut import FeatureShortcut
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.masked_image import MaskedImagePipeline
from visual_spec.pipelines.sampler_text import make_sampler, parse_sampler
from visual_spec.training.embedding import embed

OWNER, PARTS = "shapes", ("vq_model", "text_encoder")
BESIDE = {"shortcut": FeatureShortcut, "causal_layer": CausalLayer}


def assemble(
    model: Path, out: Path, *, sampler: str, guidance_scale: float, owner: str = OWNER, **beside: Path | None
) -> None:
    """Write the folder.

    Args:
        model: what `python -m visual_spec.training.masked_image` wrote.
        out: a folder beside the one of `owner`, which holds the shared parts.
        sampler: as on the command line.
        guidance_scale: default of the pipeline.
        beside: folders of the networks of `BESIDE`; None: without it.
    """
    name, settings = parse_sampler(sampler)
    home = out.parent / owner
    folders = {part: folder for part, folder in beside.items() if folder is not None}
    pipe = MaskedImagePipeline(
        transformer=MaskedImageTransformer.from_pretrained(model),
        vq_model=VQModel.from_pretrained(home / PARTS[0]),
        text_encoder=CaptionEncoder.from_pretrained(home / PARTS[1]),
        sampler=make_sampler(name, **settings),
        default_guidance_scale=guidance_scale,
        **{part: BESIDE[part].from_pretrained(folder) for part, folder in folders.items()},
    )
    embed(pipe, out, trained={"transformer": model, **folders}, shared=dict.fromkeys(PARTS, owner))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="what visual_spec.training.masked_image wrote"
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder beside that of shapes")
    parser.add_argument(
        "--sampler",
        default="masked:steps=16,choice_temperature=1",
        help="default of the pipeline, as on the command line",
    )
    parser.add_argument("--guidance-scale", type=float, default=2.0, help="default of the pipeline")
    parser.add_argument("--shortcut", type=Path, help="what visual_spec.training.shortcut wrote")
    parser.add_argument("--causal-layer", type=Path, help="what visual_spec.training.causal_layer wrote")
    given = parser.parse_args()
    assemble(
        given.model,
        given.out,
        sampler=given.sampler,
        guidance_scale=given.guidance_scale,
        shortcut=given.shortcut,
        causal_layer=given.causal_layer,
    )


if __name__ == "__main__":
    main()
