"""Time models of official size without their checkpoints; acceptance is stated, not measured.

python -m benchmarks.sizes.official --model janus-pro-7b --dtype bfloat16 --batch-sizes 1 4
python -m benchmarks.sizes.official --model var-d30+var-d16 --count-only

Models: llamagen-xxl, llamagen-xl-t2i, janus-pro-7b, lumina-mgpt-7b, emu3-8b and the like; var-d16, or var-d30+var-d16
for CoDe; mar-b, mar-l, mar-h. Other options are those of `visual-spec bench`.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.sizes import continuous, next_token, scales
from visual_spec.commands import bench
from visual_spec.commands.options import command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    bench.add_arguments(parser)
    parser.add_argument(
        "--accept-probability",
        type=float,
        default=0.75,
        metavar="P",
        help="stated: every draft is accepted with this probability (default: 0.75)",
    )
    parser.add_argument(
        "--image-size", type=int, metavar="N", help="pixels (default: what the model was released for)"
    )
    parser.add_argument(
        "--slots", type=int, default=32, metavar="N", help="slots decoded in a timed round (default: 32)"
    )


def run(args: argparse.Namespace) -> int:
    """Time, print and write; see `bench.measured`."""
    if args.slots < 2:
        raise ValueError(f"--slots {args.slots} given; pass at least 2")
    if not 0 <= args.accept_probability <= 1:
        raise ValueError(f"--accept-probability {args.accept_probability} given; pass a number from 0 to 1")
    if args.curve:
        raise ValueError("--curve counts accepted drafts, and random weights accept none; leave it out")
    return bench.measured(args, _of_size)


def _of_size(args: argparse.Namespace) -> tuple[str, Any, Any]:
    kinds: dict[str, tuple[str, Any]] = {"var": ("scales", scales), "mar": ("vectors", continuous)}
    unit, home = kinds.get(args.model.partition("-")[0], ("tokens", next_token))
    return unit, home, None


main = command("bench", __doc__, add_arguments, run, of_saved_models=False)

if __name__ == "__main__":
    raise SystemExit(main())
