"""Count the tokens per call of Jacobi decoding with each source of drafts, beside plain decoding of the same prompts.

python benchmarks/second_sources.py --prompts 200 --out benchmarks/results/shapes-second-sources.json

Every prompt is drawn by all samplers in turn. What was counted so far is written after each prompt, so the run may be
stopped at any time. Only calls are counted: no times.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from visual_spec.data.shapes import held_out_prompts
from visual_spec.eval.files import write_atomically
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.drafted import DraftedSampler
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler

SAMPLERS: dict[str, Any] = {
    f"{drafts}, window {window}": SpeculativeJacobiSampler(window, drafts=drafts)
    for window in (64, 32)
    for drafts in ("carried", "repaired", "chosen")
}


def chains() -> dict[str, Any]:
    """Chains of drafts from the drafter under both lossless rules that keep or refuse by chance."""
    return {
        f"{acceptance}, {count} drafts": DraftedSampler(count, acceptance=acceptance)
        for count in (4, 8)
        for acceptance in ("exact", "block")
    }


def tokens_per_call(calls: list[int], num_tokens: int) -> dict[str, Any]:
    """The mean over all calls, and its 95 % interval from the spread of calls between pictures."""
    counts = torch.tensor(calls, dtype=torch.float64)
    mean = float(counts.mean())
    error = 1.96 * float(counts.std()) / len(calls) ** 0.5 if len(calls) > 1 else mean
    interval = [round(num_tokens / (mean + error), 2), round(num_tokens / max(mean - error, 1), 2)]
    return {"tokens per call": round(num_tokens / mean, 2), "interval": interval, "most calls": max(calls)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="held-out prompts to leave out")
    parser.add_argument("--guidance", type=float, default=1.5)
    parser.add_argument("--chains", action="store_true", help="drafted chains in place of Jacobi decoding")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    pipe = ImagePipeline.from_pretrained("shapes")
    pipe.set_progress_bar_config(disable=True)
    samplers = chains() if given.chains else SAMPLERS
    calls: dict[str, list[int]] = {name: [] for name in samplers}
    equal = dict.fromkeys(samplers, 0)
    prompts = held_out_prompts(given.first + given.prompts)[given.first :]

    def draw(sampler: Any, index: int) -> Any:
        pipe.sampler = sampler
        seed = torch.Generator().manual_seed(given.first + index)
        return pipe([prompts[index]], guidance_scale=given.guidance, generator=[seed], output_type="latent")

    for index in range(len(prompts)):
        plain = None if given.chains else draw(AutoregressiveSampler(), index).images
        for name, sampler in samplers.items():
            drawn = draw(sampler, index)
            calls[name].append(int(drawn.trace.target_calls))
            equal[name] += plain is not None and torch.equal(drawn.images, plain)
        found = {
            "guidance": given.guidance,
            "prompts": index + 1,
            "first": given.first,
            "rows": {
                name: tokens_per_call(counts, pipe.transformer.grid.num_tokens)
                | ({} if given.chains else {"equal pictures": equal[name]})
                for name, counts in calls.items()
            },
        }
        write_atomically(given.out, json.dumps(found, indent=1) + "\n", overwrite=True)


if __name__ == "__main__":
    main()
