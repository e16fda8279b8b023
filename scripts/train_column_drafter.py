"""Train an EAGLE drafter of columns for a music model: `python scripts/train_column_drafter.py --out FOLDER`.

It learns from clips that the model plays, or with `--true-clips` from those of `tunes`, under the model's own guidance
and temperature; `--start-from` goes on with a drafter made before. Afterwards `--out/drafter` holds the weights and
`training.json`, with the loss curve, the acceptance rate by depth and the columns per call on held-out prompts. An
interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from visual_spec.data.tunes import held_out_prompts
from visual_spec.models.drafters.column_eagle import ColumnEagleDrafter
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.samplers.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.columns_drafted import DraftedColumnSampler
from visual_spec.training.column_drafter import OBJECTIVES, ColumnDrafterTraining, train_column_drafter
from visual_spec.training.loop import write_json


def columns_per_call(pipe: AudioPipeline, count: int = 8) -> dict:
    """Columns per target call on held-out prompts, a batch of `count`, under the pipeline's own law."""
    prompts, found = held_out_prompts(count, seed=1), {}
    for acceptance in ("exact", "identical"):
        pipe.sampler = DraftedColumnSampler(acceptance=acceptance)
        generators = [torch.Generator().manual_seed(1000 + index) for index in range(count)]
        result = pipe(prompts, generator=generators, output_type="latent")
        found[acceptance] = round(float(result.trace.tokens_per_call.mean()), 3)
    return {"prompts": count, "num_drafts": pipe.sampler.config["num_drafts"], **found}


def main() -> None:
    defaults = ColumnDrafterTraining()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tunes", help="embedded model, or a folder with a pipeline")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the drafter; resumes if interrupted"
    )
    parser.add_argument("--num-blocks", type=int, default=2, help="layers of a fresh drafter")
    parser.add_argument("--start-from", type=Path, help="folder of a drafter to go on with")
    parser.add_argument("--true-clips", dest="drawn", action="store_false", help="of tunes, not of the model")
    parser.add_argument("--objective", choices=OBJECTIVES, default=defaults.objective)
    parser.add_argument("--clips", type=int, default=defaults.clips)
    parser.add_argument("--held-out-clips", type=int, default=defaults.held_out_clips)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--unroll", type=int, default=defaults.unroll)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--bfloat16", action="store_true", help="matrix products in bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = vars(parser.parse_args())
    model, out, device, blocks, first = (
        arguments.pop(name) for name in ("model", "out", "device", "num_blocks", "start_from")
    )
    pipe = AudioPipeline.from_pretrained(model).to(device)
    pipe.set_progress_bar_config(disable=True)
    law = pipe.make_law()
    settings = ColumnDrafterTraining(
        **arguments, guidance_scales=(law.guidance_scale,), temperature=law.temperature
    )
    torch.manual_seed(settings.seed)
    if first is None:
        drafter = ColumnEagleDrafter.for_target(pipe.transformer, num_blocks=blocks).to(device)
    else:
        drafter = ColumnEagleDrafter.from_pretrained(first).to(device)
    pipe.sampler = ColumnAutoregressiveSampler()

    def draw(prompts: list[str], seed: int) -> Tensor:
        print(f"playing {len(prompts)} clips", flush=True)
        generators = [torch.Generator().manual_seed(1000 * seed + index) for index in range(len(prompts))]
        return pipe(prompts, generator=generators, output_type="latent").codes

    record = train_column_drafter(
        drafter, pipe.transformer, pipe.text_encoder, pipe.codec, draw, settings, out
    )
    pipe.drafter = drafter
    record["decoding"] = columns_per_call(pipe)
    if first is not None and (first / "training.json").exists():
        earlier = json.loads((first / "training.json").read_text())
        record["started_from"] = {key: value for key, value in earlier.items() if key != "loss"}
    write_json(out / "drafter" / "training.json", record)
    print({key: record[key] for key in ("parameters", "seconds", "acceptance_rates", "decoding")})


if __name__ == "__main__":
    main()
