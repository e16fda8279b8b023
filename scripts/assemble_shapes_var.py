"""Put trained parts together into the folder that `ScaleImagePipeline.from_pretrained("shapes_var")` reads.

`python scripts/assemble_shapes_var.py --tokenizer FOLDER --transformer FOLDER --refiner FOLDER --out
weights/visual_spec_models/shapes_var`

A refiner that was fine-tuned for CoDe goes to a folder of its own, `<out>_refiner`, which is named by
`--sampler scale-wise:refiner=shapes_var_refiner`; the one in the pipeline is the small model that draws alone, too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from visual_spec.data.shapes_classes import CLASS_NAMES
from visual_spec.models.next_scale.var import VARTransformer
from visual_spec.models.next_scale.var_vq import MultiscaleVQModel
from visual_spec.pipelines.scale_image import ScaleImagePipeline
from visual_spec.samplers.scales import ScaleWiseSampler
from visual_spec.training.loop import hold_in_8_bits, write_json


def tidy(folder: Path, source: Path) -> None:
    """Leave out where a part was trained, which is nobody's business, and add the record of its training."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("_name_or_path", None)
    write_json(folder / "config.json", config)
    write_json(folder / "training.json", json.loads((source / "training.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="what visual_spec.training.var_tokenizer wrote"
    )
    parser.add_argument("--transformer", type=Path, required=True, help="what visual_spec.training.var wrote")
    parser.add_argument("--refiner", type=Path, help="what visual_spec.training.var --size small wrote")
    parser.add_argument("--tuned-refiner", type=Path, help="the same, fine-tuned with --teacher")
    parser.add_argument("--num-draft-scales", type=int, help="of the transformer (default: all but two)")
    parser.add_argument(
        "--refiner-guidance-scale", type=float, help="1 for a refiner that learned guided laws"
    )
    parser.add_argument("--refiner-first-scale", type=int, help="the first scale that the refiner learned")
    parser.add_argument("--guidance-scale", type=float, default=2.0, help="default of the pipeline")
    parser.add_argument("--top-k", type=int, default=0, help="default of the pipeline; 0: off")
    parser.add_argument("--top-p", type=float, default=1.0, help="default of the pipeline; 1: off")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    refiner = None if arguments.refiner is None else VARTransformer.from_pretrained(arguments.refiner)
    pipe = ScaleImagePipeline(
        transformer=VARTransformer.from_pretrained(arguments.transformer),
        vq_model=MultiscaleVQModel.from_pretrained(arguments.tokenizer),
        sampler=ScaleWiseSampler(),
        id2label=list(CLASS_NAMES),
        default_guidance_scale=arguments.guidance_scale,
        default_top_k=arguments.top_k,
        default_top_p=arguments.top_p,
        refiner=refiner,
        num_draft_scales=arguments.num_draft_scales,
        refiner_guidance_scale=arguments.refiner_guidance_scale,
        refiner_first_scale=arguments.refiner_first_scale,
    )
    # Half precision on disk, matrices of blocks and norms in 8 bits; from_pretrained computes in float32 again.
    pipe.to(torch.float16)
    for part in (pipe.transformer, pipe.refiner):
        if part is not None:
            hold_in_8_bits(part, r"(blocks|head_nm)[.]")
    pipe.save_pretrained(arguments.out)
    sources = {
        "vq_model": arguments.tokenizer,
        "transformer": arguments.transformer,
        "refiner": arguments.refiner,
    }
    for part, source in sources.items():
        if source is not None:
            tidy(arguments.out / part, source)
    if arguments.tuned_refiner is not None:
        folder = arguments.out.with_name(f"{arguments.out.name}_refiner")
        tuned = VARTransformer.from_pretrained(arguments.tuned_refiner, torch_dtype=torch.float16)
        tuned.save_pretrained(folder)
        tidy(folder, arguments.tuned_refiner)


if __name__ == "__main__":
    main()
