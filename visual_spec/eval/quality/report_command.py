"""`visual-spec report`: a page of the results of eval, or of folders that `visual-spec sample` wrote.

visual-spec report results/results.json
visual-spec report plain fast --out report.html
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from visual_spec.eval.quality.sets_page import write_sets_page
from visual_spec.eval.report import frontier


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments and draw; returns the exit status.

    Raises:
        ValueError, OSError: bad input; names it.
    """
    return frontier.main(argv, of_folders=_sets_page)


def _sets_page(args: argparse.Namespace) -> int:
    if files := [path for path in args.results if not path.is_dir()]:
        raise ValueError(f"{files[0]} beside folders of samples; pass results of eval, or folders, not both")
    if args.chart is not None or args.pictures < 0:
        raise ValueError("of folders of samples: --chart is in the page, and --pictures takes 0 or more")
    title = args.title or "Samples and scores"
    write_sets_page(args.results, args.out, title, shown=args.pictures, overwrite=args.overwrite)
    print(f"wrote {args.out}")
    if args.json:
        print(json.dumps({"page": str(args.out), "sets": [str(path) for path in args.results]}))
    return 0
