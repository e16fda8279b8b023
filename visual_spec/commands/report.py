"""visual-spec report: a page of the results of eval, or of folders that visual-spec sample wrote.

    visual-spec report results/results.json
    visual-spec report plain fast --out report.html
    visual-spec report plain fast --table methods.tex --chart frontier.pdf

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

# fmt: off
_OPTIONS = dict(
    out=dict(type=Path, default=Path("report.html"), metavar="FILE", help="(default: report.html)"),
    chart=dict(type=Path, metavar="FILE", help="write the chart too, as .png, .svg or .pdf"),
    table=dict(type=Path, metavar="FILE", help="write a table of the methods too, as .tex, .md or .csv"),
    pictures=dict(type=int, default=200, metavar="N", help="of folders: samples side by side (default: 200)"),
    title=dict(metavar="TEXT", help="of the page"),
)
# fmt: on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `visual-spec report`."""
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="RESULTS.json|DIR",
        help="results of eval, or folders of samples",
    )
    add(parser, **_OPTIONS)
    add(parser, "overwrite", "json")


def run(args: argparse.Namespace) -> int:
    """Draw as the options say."""
    if missing := [str(path) for path in args.results if not path.exists()]:
        raise FileNotFoundError(
            f"there is nothing at {', '.join(missing)}; pass results.json of visual-spec eval, or folders of samples"
        )
    for path in (args.out, args.chart, args.table):
        if path is not None:
            ready_folder(refuse_existing(path, args.overwrite).parent)
    facts = (_of_folders if any(path.is_dir() for path in args.results) else _of_results)(args)
    print(f"wrote {', '.join(str(path) for path in (args.out, args.chart, args.table) if path)}")
    if args.json:
        print(json_text({"page": str(args.out), **facts}))
    return 0


def _of_folders(args: argparse.Namespace) -> dict[str, Any]:
    from visual_spec.eval.charts import chart_ending, image_bytes
    from visual_spec.eval.quality import methods
    from visual_spec.eval.quality.sets_page import ScoredSet, draw_sets, write_sets_page

    if files := [path for path in args.results if not path.is_dir()]:
        raise ValueError(f"{files[0]} beside folders of samples; pass results of eval, or folders, not both")
    if args.pictures < 0:
        raise ValueError(f"--pictures {args.pictures}; pass 0 or more")
    kinds = (
        args.chart and chart_ending(args.chart, "--chart"),
        args.table and methods.table_ending(args.table),
    )
    title = args.title or "Samples and scores"
    sets = [ScoredSet.read(path) for path in args.results]
    header, lines, facts = methods.sets_table(sets)
    drawn = None if args.chart is None else draw_sets(sets)
    if args.chart is not None and drawn is None:
        raise ValueError("--chart needs a distance, such as fid, that two sets have: score them first")
    write_sets_page(sets, args.out, title, shown=args.pictures, overwrite=args.overwrite)
    if args.chart is not None:
        write_atomically(args.chart, image_bytes(drawn, kinds[0]), overwrite=args.overwrite)
    if args.table is not None:
        text = methods.table_text([(header, lines, facts)], kinds[1])
        write_atomically(args.table, text, overwrite=args.overwrite)
    for lacking in (fact for fact in facts if " has no scores of " in fact):
        print(lacking)
    return {"sets": [str(path) for path in args.results]}


def _of_results(args: argparse.Namespace) -> dict[str, Any]:
    from visual_spec.eval.charts import chart_ending, image_bytes
    from visual_spec.eval.quality import methods
    from visual_spec.eval.report import frontier

    kind = args.chart and chart_ending(args.chart, "--chart")
    table = args.table and methods.table_ending(args.table)
    documents = frontier.read_results(args.results)
    if args.table is not None:
        text = methods.table_text(methods.results_tables(documents), table)
        write_atomically(args.table, text, overwrite=args.overwrite)
    if args.chart is not None:
        content = image_bytes(frontier.draw_frontier(documents[0]), kind)
        write_atomically(args.chart, content, overwrite=args.overwrite)
    title = args.title or "Speed-up against quality"
    frontier.write_page(documents, args.out, title, overwrite=args.overwrite)
    models = [document["settings"]["model"] for document in documents]
    return {"chart": args.chart and str(args.chart), "models": models}


main = command("report", __doc__, add_arguments, run)
