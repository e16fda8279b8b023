"""Train an EAGLE drafter for a model: `python scripts/train_drafter.py --model shapes --out FOLDER`.

The model draws the pictures that the drafter learns from. Afterwards `--out/drafter` holds the weights and
`training.json`, with the loss curve, the acceptance rate by depth and the tokens per call on held-out prompts. An
interrupted run resumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from visual_spec.data.shapes import held_out_prompts
from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.drafted import DraftedSampler
from visual_spec.samplers.tree import TreeSampler
from visual_spec.training.drafter import DrafterTraining, train_drafter
from visual_spec.training.loop import write_json


def generators(seed: int, count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1000 * seed + index) for index in range(count)]


def tokens_per_call(pipe: ImagePipeline, drafter: EagleDrafter, guidance: float, count: int = 8) -> dict:
    """Tokens per target call on held-out prompts, a batch of `count`, by sampler."""
    condition = pipe.encode_prompt(held_out_prompts(count, seed=1))
    found = {}
    for name, sampler in (("chain", DraftedSampler()), ("tree", TreeSampler())):
        result = sampler(
            pipe.transformer,
            condition,
            law=TokenLaw(guidance_scale=guidance),
            drafter=drafter,
            generator=generators(1, count),
            batch_size=count,
        )
        settings = {key: value for key, value in sampler.config.items() if not key.startswith("_")}
        found[name] = {
            **settings,
            "tokens_per_call": round(float(result.trace.tokens_per_call.mean()), 3),
        }
    return {"guidance_scale": guidance, "prompts": count, **found}


def main() -> None:
    defaults = DrafterTraining()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes", help="embedded model, or a folder with a pipeline")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the drafter; resumes if interrupted"
    )
    parser.add_argument("--pictures", type=int, default=defaults.pictures)
    parser.add_argument("--held-out-pictures", type=int, default=defaults.held_out_pictures)
    parser.add_argument("--guidance-scales", type=float, nargs="+", default=list(defaults.guidance_scales))
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--unroll", type=int, default=defaults.unroll)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = vars(parser.parse_args())
    model, out, device = (arguments.pop(name) for name in ("model", "out", "device"))
    settings = DrafterTraining(**{**arguments, "guidance_scales": tuple(arguments.pop("guidance_scales"))})
    pipe = ImagePipeline.from_pretrained(model).to(device)
    pipe.sampler = AutoregressiveSampler()
    pipe.set_progress_bar_config(disable=True)

    def draw(prompts: list[str], guidance: float, seed: int) -> Tensor:
        print(f"drawing {len(prompts)} pictures with guidance {guidance}", flush=True)
        output = pipe(
            prompts, guidance_scale=guidance, generator=generators(seed, len(prompts)), output_type="latent"
        )
        return output.tokens

    torch.manual_seed(settings.seed)
    drafter = EagleDrafter.for_target(pipe.transformer).to(device)
    record = train_drafter(drafter, pipe.transformer, draw, pipe.encode_prompt, settings, out)
    record["decoding"] = tokens_per_call(pipe, drafter, settings.guidance_scales[0])
    write_json(out / "drafter" / "training.json", record)
    print({key: record[key] for key in ("parameters", "seconds", "acceptance_rates", "decoding")})


if __name__ == "__main__":
    main()
