"""Runs tests of kernels in Triton's interpreter, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import visual_spec


def run_interpreted(*names: str) -> None:
    """Run test files of this folder in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    root = Path(visual_spec.__file__).parents[1]
    files = [str(Path(__file__).with_name(name)) for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
