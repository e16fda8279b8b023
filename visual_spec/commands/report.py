"""visual-spec report: a page of the results of eval, or of folders that visual-spec sample wrote.

    visual-spec report results/results.json
    visual-spec report plain fast --out report.html

Results of eval show speed-up against quality. Of folders of samples the first is the one that the others are compared
with.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from visual_spec.commands.options import add, command
from visual_spec.files.documents import json_text
from visual_spec.files.whole import ready_folder, refuse_existing, write_atomically


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `visual-spec report`."""
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="RESULTS.json|DIR",
        help="results of eval, or folders of samples",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE", help="(default: report.html)"
    )
    parser.add_argument("--chart", type=Path, metavar="FILE", help="write the charts as .png or .svg too")
    parser.add_argument(
        "--pictures",
        type=int,
        default=200,
        metavar="N",
        help="of folders: samples side by side (default: 200)",
    )
    parser.add_argument("--title", metavar="TEXT", help="of the page")
    add(parser, "overwrite", "json")


def run(args: argparse.Namespace) -> int:
    """Draw as the options say."""
    if missing := [str(path) for path in args.results if not path.exists()]:
        raise FileNotFoundError(
            f"there is nothing at {', '.join(missing)}; pass results.json of visual-spec eval, or folders of samples"
        )
    ready_folder(refuse_existing(args.out, args.overwrite).parent)
    facts = (_of_folders if any(path.is_dir() for path in args.results) else _of_results)(args)
    print(f"wrote {args.out}" + (f" and {args.chart}" if args.chart else ""))
    if args.json:
        print(json_text({"page": str(args.out), **facts}))
    return 0


def _of_folders(args: argparse.Namespace) -> dict[str, Any]:
    from visual_spec.eval.quality.sets_page import write_sets_page

    if files := [path for path in args.results if not path.is_dir()]:
        raise ValueError(f"{files[0]} beside folders of samples; pass results of eval, or folders, not both")
    if args.chart is not None or args.pictures < 0:
        raise ValueError("of folders of samples: --chart is in the page, and --pictures takes 0 or more")
    title = args.title or "Samples and scores"
    write_sets_page(args.results, args.out, title, shown=args.pictures, overwrite=args.overwrite)
    return {"sets": [str(path) for path in args.results]}


def _of_results(args: argparse.Namespace) -> dict[str, Any]:
    from visual_spec.eval.charts import chart_ending, image_bytes
    from visual_spec.eval.report import frontier

    if args.chart is not None:
        kind = chart_ending(args.chart, "--chart")
        ready_folder(refuse_existing(args.chart, args.overwrite).parent)
    documents = frontier.read_results(args.results)
    if args.chart is not None:
        content = image_bytes(frontier.draw_frontier(documents[0]), kind)
        write_atomically(args.chart, content, overwrite=args.overwrite)
    title = args.title or "Speed-up against quality"
    frontier.write_page(documents, args.out, title, overwrite=args.overwrite)
    models = [document["settings"]["model"] for document in documents]
    return {"chart": args.chart and str(args.chart), "models": models}


main = command("report", __doc__, add_arguments, run)
