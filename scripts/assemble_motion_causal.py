"""Put trained parts together into the folder that `load_pipeline("motion_causal")` reads.

`python scripts/assemble_motion_causal.py --trained FOLDER --out visual_spec/models/weights/motion_causal`
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME

from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.chunk_video import ChunkVideoPipeline
from visual_spec.training.loop import write_json


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
    record = json.loads((trained / "training.json").read_text())
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
    pipe.save_pretrained(out)
    for part in ("transformer", "text_encoder"):  # as they were stored, in 8 bits
        for name in (SAFETENSORS_WEIGHTS_NAME, "config.json"):
            shutil.copyfile(trained / part / name, out / part / name)
    write_json(out / "transformer" / "training.json", record)
    for written in ("pipeline.py", "README.md"):  # of saved folders; this one is part of the package
        (out / written).unlink(missing_ok=True)
    index = json.loads((out / "model_index.json").read_text())
    write_json(out / "model_index.json", index | {"_class_name": type(pipe).__name__})


if __name__ == "__main__":
    main()
