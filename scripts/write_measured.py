"""Write what `visual-spec eval` measured of the embedded models to the file that cards of saved pipelines quote.

    python scripts/write_measured.py benchmarks/results/*-quality.json

Prints what is left out: results of other weights than the package has now.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from visual_spec.files.documents import json_text
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.pipelines.card import MEASURED
from visual_spec.pipelines.embedded import embedded_models
from visual_spec.pipelines.loading import load_pipeline


def entry_of(document: dict[str, Any]) -> dict[str, Any]:
    """Conditions and a Markdown table of one document of `visual-spec eval`."""
    settings, rows = document["settings"], []
    for row in document["rows"]:
        if row["kind"] == "control":
            continue
        output = "lossy"
        if row["kind"] == "plain":
            output = "plain decoding"
        elif row["lossless"]:
            output = "same tokens" if row["identical"] else "lossless"
        calls, right = row["tokens_per_call"]["value"], row["accuracy"]["mean_attribute"]
        share = ", ".join(f"{100 * right[name]:.1f}" for name in ("low", "high"))
        rows.append(f"| `{row['name']}` | {output} | {calls:.2f} | {100 * right['value']:.1f} ({share}) |")
    law = ", ".join(f"{name} {value:g}" for name, value in settings["law"].items() if value is not None)
    return {
        "conditions": f"{settings['samples']} samples of held-out prompts, {settings['dtype']}, {law}. Accuracy: "
        "percent of the asked attributes that a parser finds in the output, with a 95 % interval.",
        "table": ["| sampler | output | tokens per call | accuracy |", "|:--|:--|--:|--:|", *rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json")
    present = {}
    for name in embedded_models():
        pipe = load_pipeline(name)
        parts = [part for part in pipe.components.values() if hasattr(part, "state_dict")]
        numbers = sum(value.numel() for part in parts for value in part.state_dict().values())
        present[fingerprint(parts)] = numbers
    measured = {}
    for path in parser.parse_args().results:
        document = json.loads(path.read_text())
        weights = document["settings"]["weights"]
        if weights in present:
            measured[weights] = {"numbers": present[weights], **entry_of(document)}
        else:
            print(f"{path} was measured with other weights ({weights}); left out")
    MEASURED.write_text(json_text(measured, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
