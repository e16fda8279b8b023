"""Write `visual_spec/__init__.pyi`, from which editors and the site know the names that are loaded at first use.

python scripts/write_stub.py
"""

from __future__ import annotations

from pathlib import Path

import visual_spec
from visual_spec.families import FORMER

STUB = Path(visual_spec.__file__).with_suffix(".pyi")


def stub() -> str:
    """The text of the stub: one import a name, and the list of all."""
    homes = sorted((module, name) for name, module in visual_spec.HOMES.items())
    names = [f"from {module} import {name} as {name}" for module, name in homes]
    former = [f"{name} = {now}" for name, now in FORMER.items() if now in visual_spec.HOMES]
    listed = [f'    "{name}",' for name in sorted(visual_spec.HOMES)]
    return "\n".join(
        ["# Written by scripts/write_stub.py.", "# fmt: off", *names]
        + ["", *former, "HOMES: dict[str, str]", "__version__: str", "__all__ = [", *listed, "]", ""]
    )


if __name__ == "__main__":
    STUB.write_text(stub())
