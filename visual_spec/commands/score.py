"""visual-spec score: FID, KID, Inception score, precision and recall, CLIP, FVD and more of a set of samples.

    visual-spec score drawn --reference VIRTUAL_imagenet256_labeled.npz --metrics fid is prc --feature-weights FILE
    visual-spec score drawn --reference true_pictures --metrics fid kid clip --clip FOLDER --compare-to plain

The set is a folder: one that `visual-spec sample` wrote, or any with pictures or clips in it. Features are kept in the
folder of the scores, so another metric costs little, and a run that was stopped goes on. Under `torchrun`, or with
`--rank` and `--shards`, processes share the work.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from visual_spec.commands.options import SHARE, add, command, progress, share
from visual_spec.files.documents import json_text, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `visual-spec score`."""
    from visual_spec.eval.quality.metric_table import names_of, options

    parser.add_argument("folder", type=Path, metavar="DIR", help="the samples, or an .npz file of pictures")
    # fmt: off
    add(
        parser,
        reference=dict(type=Path, metavar="DIR",
                       help="true samples: a folder, or ADM's .npz with arr_0 or mu and sigma"),
        metrics=dict(nargs="+", metavar="M", help=f"of pictures {' '.join(names_of('image'))}, of clips "
                     f"{' '.join(names_of('audio'))}, of videos {' '.join(names_of('video'))} (default: shapes, mel or "
                     "frames)"),
        compare_to=dict(type=Path, metavar="DIR", help="another set for the same prompts and seeds, such as plain "
                        "decoding's: share of equal samples, and difference of the distances with its own interval"),
    )
    for option, source in options().items():
        what = source.what + (": a program, see --trust-program" if source.program else "")
        add(parser, **{option: dict(type=Path, metavar="DIR" if source.folder else "FILE", help=what)})
    add(
        parser,
        trust_program=dict(action="store_true", help="run the program in the file of --i3d, which may read, write and "
                           "send all that you may"),
        size=dict(type=int, metavar="N", help="resize pictures to N pixels first, as clean-fid (default: as they are)"),
        out=dict(type=Path, metavar="DIR", help="scores (default: DIR/scores)"),
        features=dict(type=Path, metavar="DIR",
                      help="features, which several sets with one reference may share (default: in --out)"),
        write_npz=dict(type=Path, metavar="FILE", help="also write the pictures for ADM's evaluator"),
    )
    # fmt: on
    add(parser, "batch_size", *SHARE, "device", "threads", "json")


def run(args: argparse.Namespace) -> int:
    """Score as the options say; writes `scores.json` and prints a table. Returns 1 where a promise is broken."""
    for path in (args.folder, args.reference, args.compare_to):
        if path is not None and not path.exists():
            raise FileNotFoundError(f"no folder of samples and no .npz file at {path}")
    import torch

    from visual_spec.eval.quality.extractors import Setup
    from visual_spec.eval.quality.feature_sets import SampleFiles
    from visual_spec.eval.quality.metric_table import OWN, options
    from visual_spec.eval.quality.score import Scoring, score
    from visual_spec.eval.quality.score_tables import prompts_csv, scores_csv, scores_latex
    from visual_spec.files.whole import ready_folder, refuse_existing, write_atomically
    from visual_spec.pipelines.placing import choose_device, own_device

    drawn = SampleFiles.open(args.folder)
    if (args.size is not None and args.size < 1) or args.batch_size < 1:
        raise ValueError(f"--size {args.size} --batch-size {args.batch_size}; pass at least 1")
    out = args.out or (args.folder if args.folder.is_dir() else args.folder.parent) / "scores"
    features = ready_folder(args.features or ready_folder(out))
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    # Blanks or commas between them, as other tools take them.
    metrics = [name for text in args.metrics or () for name in text.split(",") if name]
    networks = {option: getattr(args, option) for option in options()}
    networks = {name: path for name, path in networks.items() if path is not None}
    device = str(choose_device(own_device(args.device)))
    beside = None if args.compare_to is None else SampleFiles.open(args.compare_to)
    work = Scoring(
        drawn,
        None if args.reference is None else SampleFiles.open(args.reference),
        beside,
        tuple(metrics or [OWN[drawn.medium]]),
        features,
        Setup(networks, args.size, device, args.batch_size, args.trust_program, beside),
    )
    work.check()
    if args.write_npz is not None:
        if drawn.medium != "image":
            raise ValueError(f"--write-npz is for pictures; {drawn.path} holds {drawn.medium}")
        drawn.write_npz(refuse_existing(args.write_npz, False))
    document = score(work, report=progress, **share(args))
    if document is None:
        print("this process is done; other processes have features to extract", file=sys.stderr)
        return 0
    write_json(out / "scores.json", document, indent=1)
    write_atomically(out / "scores.csv", scores_csv(document["figures"]), overwrite=True)
    write_atomically(out / "scores.tex", scores_latex(document["figures"]), overwrite=True)
    if work.each and drawn.prompts is not None:
        write_atomically(out / "prompts.csv", prompts_csv(drawn.prompts, work.each), overwrite=True)
    print(score_table(document))
    if args.json:
        print(json_text(document))
    return int((document["comparison"] or {}).get("kept") is False)


def score_table(document: dict[str, Any]) -> str:
    """Markdown: one line a figure, and what the samples have in common with those they are compared to."""
    from visual_spec.eval.quality.beside import summary
    from visual_spec.eval.tables import markdown

    lines = []
    for name, figure in document["figures"].items():
        sizes = str(figure["samples"])
        if figure.get("reference_samples"):
            sizes += f" against {figure['reference_samples']}"
        value = f"{figure['value']:.4g} ({figure['low']:.4g} to {figure['high']:.4g})"
        lines.append(
            [name.replace("_", " "), value, sizes, f"{figure['extractor']} {figure['weights']}".strip()]
        )
    table = markdown(["figure", "value (95 %)", "samples", "extractor, weights"], lines)
    notes: dict[str, list[str]] = {}  # by what is noted: of which figures
    for name, figure in document["figures"].items():
        if "note" in figure:
            notes.setdefault(figure["note"], []).append(name.replace("_", " "))
    table += "".join(f"\n\nNote: {note}." for note in document.get("notes", []))
    table += "\n" * bool(notes) + "".join(f"\n* {', '.join(names)}: {note}." for note, names in notes.items())
    comparison = document["comparison"]
    return table if comparison is None else f"{table}\n\n{summary(comparison)}"


main = command("score", __doc__, add_arguments, run)
