"""How often a picture shows what its prompt asks for, read back by the parser of the `shapes` data.

Every sample has an index, which fixes its prompt and its seed, so a sample does not depend on the batch, on the number
of processes, or on whether the run was interrupted. Each process appends one line per sample to a shard of its own; a
run started again draws only what is missing. Under `torchrun` the samples are split by index.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from visual_spec.eval.files import write_atomically

if TYPE_CHECKING:
    from visual_spec.pipelines.image import ImagePipeline

Score = Callable[[str, Any], dict[str, bool]]
Z_95 = 1.959963984540054  # the 97.5 % point of the normal law


def wilson_interval(hits: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """The interval of a rate, 95 % by default (Wilson 1927; Brown, Cai and DasGupta 2001, section 3.1.1).

    Raises:
        ValueError: unless 0 <= hits <= total and total >= 1.
    """
    if total < 1 or not 0 <= hits <= total:
        raise ValueError(f"{hits} hits of {total} given; pass 0 <= hits <= total and total >= 1")
    rate, shrink = hits / total, 1 + z * z / total
    centre = (rate + z * z / (2 * total)) / shrink
    reach = z / shrink * math.sqrt(rate * (1 - rate) / total + z * z / (4 * total * total))
    # At the ends the formula gives exactly 0 and 1, which rounding would miss.
    return (0.0 if hits == 0 else centre - reach), (1.0 if hits == total else centre + reach)


def summarise(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy of samples as `evaluate_accuracy` records them.

    Returns:
        samples; all_correct, the share of pictures with every attribute right; attributes, {name: the same for one
        attribute, over the prompts that ask for it}; both as {hits, total, rate, low, high}, the last two the 95 %
        Wilson interval. mean_attribute: the mean over samples of the share of attributes right. tokens_per_call: all
        tokens over all calls.

    Raises:
        ValueError: if there are no records.
    """
    records = list(records)
    if not records:
        raise ValueError("no samples to summarise; run the evaluation first")
    names = dict.fromkeys(name for record in records for name in record["hits"])
    by_name = {name: [r["hits"][name] for r in records if name in r["hits"]] for name in names}
    return {
        "samples": len(records),
        "all_correct": _rate([all(r["hits"].values()) for r in records]),
        "mean_attribute": sum(sum(r["hits"].values()) / len(r["hits"]) for r in records) / len(records),
        "attributes": {name: _rate(values) for name, values in by_name.items()},
        "tokens_per_call": sum(r["tokens"] for r in records) / sum(r["calls"] for r in records),
    }


def _rate(values: Sequence[bool]) -> dict[str, float]:
    hits, total = sum(values), len(values)
    low, high = wilson_interval(hits, total)
    return {"hits": hits, "total": total, "rate": hits / total, "low": low, "high": high}


def evaluate_accuracy(
    pipe: ImagePipeline,
    folder: str | Path,
    *,
    samples: int = 200,
    seed: int = 0,
    batch_size: int = 8,
    law: dict[str, Any] | None = None,
    rank: int = 0,
    world_size: int = 1,
    save_images: bool = False,
    score: Score | None = None,
    prompts: Sequence[str] | None = None,
    model: str = "",
    report: Callable[[str], Any] = lambda text: None,
) -> list[dict[str, Any]]:
    """Draw pictures of held-out prompts with the pipeline's sampler and score each, or go on where a run stopped.

    Args:
        pipe: draws; its sampler is part of the settings.
        folder: where `settings.json`, the shards `samples-<rank>.jsonl` and, once complete, `summary.json` lie.
        samples: sample i has prompt i and seed `seed + i`. May be raised later; what is there is kept.
        law: guidance_scale, temperature, top_k, top_p for `ImagePipeline.__call__`; what is left out is its default.
        rank, world_size: this process takes the indices that leave `rank` when divided by `world_size`.
        save_images: also write `images/<index>.png`.
        score: `(prompt, picture) -> {attribute: whether it holds}`; default `visual_spec.data.shapes_parser.score`.
        prompts: default: captions of `shapes` that no trainer sees.
        model: name for the settings, so that one folder does not mix models.

    Returns:
        All records in `folder` so far, in order of their index: index, prompt, seed, hits, calls, tokens.

    Raises:
        ValueError: sizes out of range, fewer prompts than samples, or a folder that holds samples of other settings.
    """
    import torch

    from visual_spec.eval.measure import sampler_settings

    if samples < 1 or batch_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"samples={samples}, batch_size={batch_size}, rank={rank} of {world_size}; "
            "pass at least 1 sample, a batch of at least 1 and a rank from 0 to world_size - 1"
        )
    if score is None:
        from visual_spec.data.shapes_parser import score
    if prompts is None:
        from visual_spec.data.shapes import held_out_prompts

        prompts = held_out_prompts(samples)
    if len(prompts) < samples:
        raise ValueError(f"{len(prompts)} prompts for {samples} samples; pass one prompt per sample")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": model,
        "sampler": sampler_settings(pipe.sampler),
        "law": dict(law or {}),
        "seed": seed,
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
    }
    _settle(folder / "settings.json", settings)
    shard = folder / f"samples-{rank:05d}.jsonl"
    _drop_torn_line(shard)
    done = {record["index"]: record for record in read_records(folder)}
    for index, record in done.items():
        if index < samples and record["prompt"] != prompts[index]:
            raise ValueError(
                f"sample {index} in {folder} has the prompt {record['prompt']!r}, not {prompts[index]!r}; "
                "pass an empty folder for other prompts"
            )
    missing = [index for index in range(rank, samples, world_size) if index not in done]
    report(f"{len(done)} samples there, {len(missing)} to draw")
    with shard.open("a", encoding="utf-8") as file:
        for start in range(0, len(missing), batch_size):
            batch = missing[start : start + batch_size]
            output = pipe(
                [prompts[index] for index in batch],
                generator=[torch.Generator().manual_seed(seed + index) for index in batch],
                output_type="pil",
                **(law or {}),
            )
            for place, index in enumerate(batch):
                if save_images:
                    _save(output.images[place], folder / "images" / f"{index:05d}.png")
                record = {
                    "index": index,
                    "prompt": prompts[index],
                    "seed": seed + index,
                    "hits": {
                        name: bool(hit) for name, hit in score(prompts[index], output.images[place]).items()
                    },
                    "calls": int(output.trace.target_calls[place]),
                    "tokens": int(output.tokens.shape[1]),
                }
                _append(file, record)
            report(f"{start + len(batch)} of {len(missing)} drawn")
    records = read_records(folder)
    chosen = [record for record in records if record["index"] < samples]
    if len(chosen) == samples:  # every process is done; the last one gets here, whichever that is
        summary = {"settings": settings, **summarise(chosen)}
        write_atomically(folder / "summary.json", json.dumps(summary, indent=1) + "\n", overwrite=True)
    return chosen


def read_records(folder: str | Path) -> list[dict[str, Any]]:
    """The samples in all shards of a folder, each index once, in order; a line cut short does not count."""
    found: dict[int, dict[str, Any]] = {}
    for shard in sorted(Path(folder).glob("samples-*.jsonl")):
        for line in shard.read_bytes().split(b"\n")[:-1]:  # what follows the last line feed was not finished
            record = json.loads(line)
            found.setdefault(record["index"], record)
    return [found[index] for index in sorted(found)]


def _append(file: IO[str], record: dict[str, Any]) -> None:
    file.write(json.dumps(record) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _drop_torn_line(shard: Path) -> None:
    """Cut off what an interrupted writer left behind the last line feed, or the next line would be glued to it."""
    if not shard.exists():
        return
    data = shard.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with shard.open("r+b") as file:
            file.truncate(whole)


def _settle(path: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a folder, or compare them with those its samples were drawn under."""
    text = json.dumps(settings, indent=1) + "\n"
    if not path.exists():
        write_atomically(path, text, overwrite=True)
        return
    there, here = json.loads(path.read_text()), json.loads(text)
    differing = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    if differing:
        changes = "; ".join(f"{name}: {there.get(name)} there, {here.get(name)} here" for name in differing)
        raise ValueError(f"{path.parent} holds samples of other settings ({changes}); pass another folder")


def _save(picture: Any, path: Path) -> None:
    import io

    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    write_atomically(path, buffer.getvalue(), overwrite=True)  # a sample drawn again is the same picture


def summary_table(summary: dict[str, Any]) -> str:
    """Markdown: one line per attribute, then the whole prompt."""
    from visual_spec.eval.bench import markdown

    rows = [*summary["attributes"].items(), ("the whole prompt", summary["all_correct"])]
    lines = [
        [
            name,
            f"{100 * r['rate']:.1f} %",
            f"{100 * r['low']:.1f} - {100 * r['high']:.1f} %",
            f"{r['hits']} of {r['total']}",
        ]
        for name, r in rows
    ]
    lines.append(["mean over attributes", f"{100 * summary['mean_attribute']:.1f} %", "", ""])
    return markdown(["accuracy of", "rate", "95 % interval", "pictures"], lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the evaluation."""
    parser.add_argument(
        "--model", default="shapes", help="embedded name, folder, or Hub id (default: shapes)"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="shards and summary; goes on if there"
    )
    parser.add_argument(
        "--samples", type=int, default=200, metavar="N", help="held-out prompts (default: 200)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="B", help="pictures decoded together (default: 8)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sample 0; sample i has seed + i")
    parser.add_argument("--save-images", action="store_true", help="keep the pictures")
    parser.add_argument(
        "--sampler", default="autoregressive", help="autoregressive (default) | speculative-jacobi"
    )
    parser.add_argument("--window", type=int, metavar="W")
    parser.add_argument("--coupling", metavar="NAME", help="gumbel | independent | maximal")
    parser.add_argument("--acceptance", metavar="NAME", help="identical | exact")
    parser.add_argument("--guidance-scale", type=float, metavar="S")
    parser.add_argument("--temperature", type=float, metavar="T")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "float64"])
    parser.add_argument(
        "--threads", type=int, metavar="N", help="processor threads (default: PyTorch's choice)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments, evaluate, print a table and, as the last line, JSON; returns the exit status."""
    parser = argparse.ArgumentParser(description="Prompt accuracy over held-out prompts, resumable.")
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """Evaluate as the options say. `RANK`, `LOCAL_RANK` and `WORLD_SIZE` are those that torchrun sets."""
    from visual_spec.eval.bench import load
    from visual_spec.pipelines.accelerate import accelerate, make_sampler

    def given(*names: str) -> dict[str, Any]:
        return {name: getattr(args, name) for name in names if getattr(args, name) is not None}

    sampler = make_sampler(args.sampler, **given("window", "coupling", "acceptance"))
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = args.device
    if device is None and world_size > 1:
        import torch

        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    pipe = accelerate(load(args.model, device, args.dtype, args.threads), sampler)
    records = evaluate_accuracy(
        pipe,
        args.out,
        samples=args.samples,
        seed=args.seed,
        batch_size=args.batch_size,
        law=given("guidance_scale", "temperature", "top_k", "top_p"),
        rank=rank,
        world_size=world_size,
        save_images=args.save_images,
        model=args.model,
        report=lambda text: print(text, file=sys.stderr, flush=True),
    )
    if not records:
        return 0  # more processes than samples: another one reports
    summary = summarise(records)
    print(summary_table(summary))
    print()
    print(json.dumps(summary))
    return 0
