"""What `visual-spec bench` prints, read back."""

import json
from typing import Any

from visual_spec.eval.speed import bench


def benched(capsys: Any, *arguments: Any) -> tuple[dict[str, Any], list[dict[str, str]], str]:
    """The document, the rows of the table by their headers, and all text before the document."""
    assert bench.main(["--device", "cpu", "--json", *map(str, arguments)]) == 0
    lines = capsys.readouterr().out.splitlines()
    header, _, *table = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")
    )
    rows = [dict(zip(header, cells, strict=True)) for cells in table]
    return json.loads(lines[-1]), rows, "\n".join(lines[:-1])
