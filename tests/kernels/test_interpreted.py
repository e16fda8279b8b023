"""Kernels, and what runs by them, in Triton's interpreter on the CPU: the tests of files `interpreted_*.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("interpreted_*.py"))
WHOLE = ("adapters", "llamagen", "samplers")  # decodes by models and samplers


SLOW = pytest.mark.slow
RUNS = (
    ("whole", "marks"),
    [
        pytest.param(False, "not slow", id="kernels"),
        pytest.param(True, "not slow", id="decodes"),
        pytest.param(False, "slow", id="slow kernels", marks=SLOW),
        pytest.param(True, "slow", id="slow decodes", marks=SLOW),
    ],
)


@pytest.mark.parametrize(*RUNS)
def test_kernels_compute_what_their_definitions_say(whole, marks, request):
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported. As many sets as in this run."""
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    files = [str(one) for one in FILES if (one.stem.removeprefix("interpreted_") in WHOLE) == whole]
    assert len(files) >= len(WHOLE)
    most = request.config.getoption("parameter_sets")
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-m", marks]
    options += [f"--parameter-sets={most}"] if most else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
