"""Write `visual_spec/__init__.pyi`, from which editors and the site know the names that are loaded at first use.

python scripts/write_stub.py
"""

from __future__ import annotations

from pathlib import Path

import visual_spec
from visual_spec.families import FORMER, all_pipelines
from visual_spec.samplers.registry import all_samplers

STUB = Path(visual_spec.__file__).with_suffix(".pyi")


def stub() -> str:
    """The text of the stub: one import a name, those of prototype too, and the list of the core's."""
    entries = (*all_samplers(), *all_pipelines().values())
    others = {
        one.class_name: one.module for one in entries if one.module.startswith("visual_spec.prototype.")
    }
    homes = sorted((module, name) for name, module in (visual_spec.HOMES | others).items())
    names = [f"from {module} import {name} as {name}" for module, name in homes]
    former = [f"{name} = {now}" for name, now in FORMER.items() if now in visual_spec.HOMES]
    listed = [f'    "{name}",' for name in sorted(visual_spec.HOMES)]
    return "\n".join(
        ["# Written by scripts/write_stub.py.", "# fmt: off", *names]
        + ["", *former, "HOMES: dict[str, str]", "__version__: str", "__all__ = [", *listed, "]", ""]
    )


if __name__ == "__main__":
    STUB.write_text(stub())
