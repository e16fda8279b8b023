"""Put trained parts together into the folder that `load_pipeline("motion_causal")` reads.

`python scripts/assemble_motion_causal.py --trained FOLDER --out weights/visual_spec_models/motion_causal`
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.chunk_video import ChunkVideoPipeline
from visual_spec.training.embedding import RECORD, embed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trained", type=Path, required=True, help="folder that the trainer wrote")
    parser.add_argument("--policy", default="full", help="default of the pipeline")
    parser.add_argument("--steps", type=int, default=4, help="likewise")
    parser.add_argument("--shift", type=float, default=3.0, help="likewise")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    trained, out = arguments.trained, arguments.out
    record = json.loads((trained / RECORD).read_text())
    chunk, chunks = (record["settings"][name] for name in ("chunk", "chunks"))
    pipe = ChunkVideoPipeline(
        transformer=WanTransformer3DModel.from_pretrained(trained / "transformer", torch_dtype=torch.float32),
        text_encoder=CaptionEncoder.from_pretrained(trained / "text_encoder", torch_dtype=torch.float32),
        chunk=chunk,
        training_frames=chunk * chunks,
        default_policy=arguments.policy,
        default_steps=arguments.steps,
        default_shift=arguments.shift,
    )
    parts = ("transformer", "text_encoder")
    embed(pipe, out, trained={part: trained / part for part in parts}, shared={})
    shutil.copyfile(trained / RECORD, out / "transformer" / RECORD)


if __name__ == "__main__":
    main()
