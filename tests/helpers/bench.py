"""What `visual-spec bench` prints, read back."""

import json
import statistics
from typing import Any

import torch

from visual_spec.commands import bench


def benched(
    capsys: Any, *arguments: Any, main: Any = bench.main
) -> tuple[dict[str, Any], list[dict[str, str]], str]:
    """The document, the rows of the table by their headers, and all text before the document."""
    assert main(["--device", "cpu", "--json", *map(str, arguments)]) == 0
    lines = capsys.readouterr().out.splitlines()
    header, _, *table = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")
    )
    rows = [dict(zip(header, cells, strict=True)) for cells in table]
    return json.loads(lines[-1]), rows, "\n".join(lines[:-1])


def check_times(
    row: dict[str, Any], shown: dict[str, str], plain: dict[str, Any], sample: str = "image", digits: int = 0
) -> None:
    """The cells of a timed row follow from its raw seconds and calls, and from the seconds of plain decoding."""
    seconds = row["seconds"]
    each = torch.tensor(seconds, dtype=torch.float64) / row["batch_size"] * 1000
    p20, p50, p80 = (float(each.quantile(q)) for q in (0.2, 0.5, 0.8))
    assert shown[f"ms/{sample} p50"] == f"{p50:.{digits}f}"
    assert shown["p20 - p80"] == f"{p20:.{digits}f} - {p80:.{digits}f}"
    if "ms/call" in shown:  # a batch takes as many forwards as its slowest sample
        calls = [max(counts) for counts in row["calls_per_sample"]]
        per_call = [1000 * spent / count for spent, count in zip(seconds, calls, strict=True)]
        assert shown["ms/call"] == f"{statistics.median(per_call):.2f}"
    if len(seconds) == len(plain["seconds"]):
        ratios = [base / spent for base, spent in zip(plain["seconds"], seconds, strict=True)]
        assert shown["speed-up"] == f"{statistics.median(ratios):.2f}x"
