"""Count the tokens per call of Jacobi decoding with each source of drafts, beside plain decoding of the same prompts.

python benchmarks/second_sources.py --prompts 200 --out benchmarks/results/shapes-calls.json
python benchmarks/second_sources.py --prompts 200 --pictures shapes_nar --out benchmarks/results/shapes-pictured.json
python benchmarks/second_sources.py --prompts 2000 --pictures shapes_nar --batch-size 8 --only "pictured, window 64" ...
python benchmarks/second_sources.py --model things --prompts 2000 --batch-size 8 --only "repaired, window 16" ...

Every batch of prompts is drawn by all samplers in turn; a picture's calls do not depend on the batch. What was counted
so far is written after each batch, so the run may be stopped at any time. Only calls are counted: no times.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from visual_spec.data.captions import captions_of
from visual_spec.files.documents import write_json
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

SAMPLERS: dict[str, Any] = {
    f"{drafts}, window {window}": SpeculativeJacobiSampler(window, drafts=drafts)
    for window in (64, 32, 16)
    for drafts in ("carried", "repaired", "chosen")
}


def chains() -> dict[str, Any]:
    """Chains of drafts from the drafter under both lossless rules that keep or refuse by chance."""
    return {
        f"{acceptance}, {count} drafts": DraftedSampler(count, acceptance=acceptance)
        for count in (4, 8)
        for acceptance in ("exact", "block")
    }


def pictures() -> dict[str, Any]:
    """Drafts from whole pictures of a near-to-far model, beside those that need no weights."""
    sources = (("repaired", 32), ("repaired", 64), ("pictured", 32), ("pictured", 64), ("pictured", 256))
    return {
        f"{drafts}, window {window}": SpeculativeJacobiSampler(window, drafts=drafts, initial_draft="left")
        for drafts, window in sources
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
    parser.add_argument("--model", default="shapes", help="name or folder")
    parser.add_argument("--guidance", type=float, help="guidance scale (default: the model's own)")
    parser.add_argument("--chains", action="store_true", help="drafted chains in place of Jacobi decoding")
    parser.add_argument(
        "--pictures", metavar="MODEL", help="drafts from whole pictures of this near-to-far model"
    )
    parser.add_argument("--only", nargs="+", metavar="ROW", help="the rows to count, by their names")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    pipe: Any = load_pipeline(given.model)
    pipe.set_progress_bar_config(disable=True)
    samplers = chains() if given.chains else pictures() if given.pictures else SAMPLERS
    if unknown := set(given.only or ()) - set(samplers):
        parser.error(
            f"--only {sorted(unknown)[0]!r}: there is no such row; pass some of {', '.join(samplers)}"
        )
    samplers = {name: samplers[name] for name in given.only or samplers}
    calls: dict[str, list[int]] = {name: [] for name in samplers}
    equal, agreeing = dict.fromkeys(samplers, 0), 0
    prompts = captions_of(pipe).held_out_prompts(given.first + given.prompts)[given.first :]
    painter: Any = None
    if given.pictures:
        painter = load_pipeline(given.pictures)
        painter.set_progress_bar_config(disable=True)
        pipe.drafter = painter.transformer

    def draw(pipe: Any, batch: range) -> Any:
        seeds = [torch.Generator().manual_seed(given.first + index) for index in batch]
        asked = [prompts[index] for index in batch]
        return pipe(asked, guidance_scale=given.guidance, generator=seeds, output_type="latent")

    def drawn_by(sampler: Any, batch: range) -> Any:
        pipe.sampler = sampler
        return draw(pipe, batch)

    for start in range(0, len(prompts), given.batch_size):
        batch = range(start, min(start + given.batch_size, len(prompts)))
        plain = None if given.chains else drawn_by(AutoregressiveSampler(), batch).tokens
        for name, sampler in samplers.items():
            drawn = drawn_by(sampler, batch)
            calls[name] += drawn.trace.target_calls.tolist()
            equal[name] += 0 if plain is None else int((drawn.tokens == plain).all(1).sum())
        record = {
            "guidance": pipe.config["default_guidance_scale"] if given.guidance is None else given.guidance,
            "prompts": batch.stop,
            "first": given.first,
            "rows": {
                name: tokens_per_call(counts, pipe.transformer.grid.num_tokens)
                | ({} if given.chains else {"equal pictures": equal[name]})
                for name, counts in calls.items()
            },
        }
        if painter is not None:
            own = draw(painter, batch)
            agreeing += int((own.tokens == plain).sum())
            record["calls of a picture"] = int(own.trace.target_calls[0])
            record["tokens of it that plain decoding draws"] = round(
                agreeing / batch.stop / own.tokens.shape[1], 3
            )
        write_json(given.out, record, indent=1)


if __name__ == "__main__":
    main()
