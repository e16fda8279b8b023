"""A table of methods for a paper, LaTeX, Markdown or CSV: of results of `eval`, or of drawn and scored sets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import visual_spec
from visual_spec.eval.machine import environment_line
from visual_spec.eval.quality.figures import quality_cells
from visual_spec.eval.tables import cells, column, csv_text, interval, latex, markdown

if TYPE_CHECKING:
    from visual_spec.eval.quality.sets_page import ScoredSet

Table = tuple[list[str], list[list[str]], list[str]]  # headers, lines, and what they were measured on
_INTERVAL = re.compile(r"(-?[\d.]+|inf)x? \((-?[\d.]+|inf)-(-?[\d.]+|inf)\)")


def table_ending(path: Path) -> str:
    """The kind of a table's file: ".tex", ".md" or ".csv"; ValueError for a name of another ending."""
    if path.suffix not in (".tex", ".md", ".csv"):
        raise ValueError(f"--table {path} given; the name must end in .tex, .md or .csv")
    return path.suffix


def results_tables(documents: Sequence[dict[str, Any]]) -> list[Table]:
    """A table of each document of `eval`."""
    return [(*quality_cells(one, next(iter(one["rows"][0]["features"]))), facts_of(one)) for one in documents]


def facts_of(document: dict[str, Any]) -> list[str]:
    """Where a result of `eval` comes from, and the command that makes it again."""
    asked, where = document["settings"], document["environment"]
    names = [row["name"] for row in document["rows"] if row["kind"] not in ("plain", "control")]
    command = ["visual-spec", "eval", "--model", str(asked["model"]), "--samples", str(asked["samples"])]
    command += ["--batch-size", str(asked["batch_size"]), "--seed", str(asked["seed"])]
    command += ["--dtype", str(asked["dtype"]), "--samplers", *names, "--out", "DIR"]
    law = ", ".join(f"{name} {value:g}" for name, value in asked["law"].items() if value is not None)
    return [
        f"{environment_line(where)}; visual_spec {where['visual_spec']}, {where['time']}",
        f"{asked['model']}, weights {asked['weights']}; {asked['samples']} samples, seeds from {asked['seed']}; {law}",
        shlex.join(command),
    ]


def sets_table(sets: Sequence[ScoredSet]) -> Table:
    """A line for each set; a score that one of them lacks is a dash, and what makes it is among the facts."""
    names = list(dict.fromkeys(name for one in sets for name in (one.scores or {"figures": {}})["figures"]))
    rows = [
        {
            "name": one.name,
            "sampler": one.sampler,
            "calls": one.calls,
            "seconds": one.seconds,
            **{name: one.figure(name) for name in names},
        }
        for one in sets
    ]
    columns = [column("set", "{}", "name"), column("sampler", "{}", "sampler")]
    columns += [column("calls", "{:.1f}", "calls"), column("seconds", "{:.3f}", "seconds")]
    columns += [interval(name.replace("_", " "), name, 3) for name in names]
    facts = [f"visual_spec {visual_spec.__version__}"]
    for one in sets:
        run, count = one.run, len(one.samples.lines)
        law = ", ".join(f"{name} {value:g}" for name, value in run["law"].items() if value is not None)
        facts.append(
            f"{one.name}: {run['model']}, weights {run['weights']}; {count} samples, seeds from {run['seed']}, batches "
            f"of {run['batch_size']}, {run['dtype']} on {run['device']}; {law}"
        )
        if lacking := [name for name in names if one.figure(name) is None] or ([] if names else ["all"]):
            facts.append(
                f"{one.name} has no scores of {', '.join(lacking)}: visual-spec score {one.samples.path} --metrics ..."
            )
    return *cells(rows, columns), facts


def table_text(tables: Sequence[Table], kind: str) -> str:
    """The file. In CSV an interval is three columns: value, low, high."""
    parts = []
    for header, lines, facts in tables:
        if kind == ".md":
            parts.append("\n\n".join([markdown(header, lines), *facts]) + "\n")
        elif kind == ".tex":
            parts.append("".join(f"% {fact}\n" for fact in facts) + latex(header, lines))
        else:
            wide = [any(_INTERVAL.fullmatch(line[at]) for line in lines) for at in range(len(header))]
            names = [
                f"{name}{end}"
                for name, three in zip(header, wide, strict=True)
                for end in ([""] if not three else ["", " low", " high"])
            ]
            rows = [
                [part for cell, three in zip(line, wide, strict=True) for part in _parts(cell, three)]
                for line in lines
            ]
            parts.append("".join(f"# {fact}\n" for fact in facts) + csv_text([names, *rows]))
    return "\n".join(parts)


def _parts(cell: str, three: bool) -> list[str]:
    if not three:
        return [cell]
    found = _INTERVAL.fullmatch(cell)
    return list(found.groups()) if found else ["" if cell == "-" else cell, "", ""]
