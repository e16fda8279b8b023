"""Train an embedded model, or a part of one: `python scripts/train NAME --help`, in a checkout.

Trainers that users need for models of their own are in the package: `python -m visual_spec.training.drafter` (EAGLE),
`column_drafter`, `distilled` (students) and `flashar` (near-to-far heads).
"""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[0] = str(FOLDER.parents[1])  # of the checkout, in place of this folder


def trainers() -> list[str]:
    """The modules here that are commands."""
    return sorted(
        path.stem for path in FOLDER.glob("[a-z]*.py") if "\ndef main() -> None:" in path.read_text()
    )


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in trainers():
        print(__doc__, "\nNAME is one of", ", ".join(trainers()))
        sys.exit(0 if name in ("-h", "--help") else f"no trainer {name!r}")
    sys.argv[:2] = [f"python scripts/train {name}"]
    from visual_spec.training.loop import run_trainer

    run_trainer(importlib.import_module(f"scripts.train.{name}").main)


if __name__ == "__main__":
    main()
