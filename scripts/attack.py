"""Attack visual_spec with malformed inputs and with kills, and count what becomes of them.

Every input must be refused in one line with exit status 2, or be accepted rightly. After every kill nothing
half-written may stand under a final name, and a second run must come to the same as one that was never killed.

python scripts/attack.py --out attack.json
python scripts/attack.py --share 0.02 --kills 1 --seed 1
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests are not installed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, metavar="S", help="of the inputs of every kind")
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="of every kind of work")
    parser.add_argument("--only", metavar="KIND", help="inputs of this kind only, and no kills")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the counts and every failure as JSON")
    arguments = parser.parse_args()

    from visual_spec.commands.tables import plain_table
    from visual_spec.files.documents import write_json

    started, table, failures = time.monotonic(), {}, []
    with tempfile.TemporaryDirectory() as folder:
        attack(Path(folder), arguments, table, failures)
    header = sorted({what for counts in table.values() for what in counts})
    lines = [[kind, *(str(counts[what]) for what in header)] for kind, counts in table.items()]
    print(plain_table(["input or work", *header], lines))
    document = dict(
        seed=arguments.seed, seconds=round(time.monotonic() - started), counts=table, failures=failures
    )
    if arguments.out:
        write_json(arguments.out, document, indent=1)
    return 1 if failures else 0


def attack(folder: Path, arguments: argparse.Namespace, table: dict, failures: list) -> None:
    import pytest

    from tests.attack import inputs, kills, outcome

    ground = inputs.Ground(folder / "ground", pytest.MonkeyPatch())
    for number, case in enumerate(inputs.cases(ground, arguments.seed, arguments.share)):
        if arguments.only not in (None, case.kind):
            continue
        flaws = outcome.attempt(case, folder / str(number))
        shutil.rmtree(folder / str(number))
        table.setdefault(case.kind, Counter())[flaws.what] += 1
        if flaws.what not in (outcome.REFUSED, outcome.ACCEPTED):
            failures.append(
                {"kind": case.kind, "case": case.name, "what": flaws.what, "said": flaws.said[-1500:]}
            )
            print(f"{flaws.what}: {case.kind}: {case.name}\n{flaws.said[-600:]}", flush=True)
    if arguments.only is None and arguments.kills:
        for name, wrong in kills.attack(ground, folder / "kills", arguments.seed, arguments.kills):
            table.setdefault(f"kills of {name}", Counter())["wrong" if wrong else "whole, and resumed"] += 1
            if wrong:
                failures.append({"kind": name, "said": wrong})
                print(f"{name}: {wrong}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
