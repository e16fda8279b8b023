"""torchrun: two and three processes draw the files of one, and find its scores."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.networks import make_pictures
from tests.helpers.sample_sets import LAW, content, work_in
from visual_spec.eval.quality.sample_set import sample

# Chunks of three samples, so that every process has features to extract.
COMMAND = """
import sys
from visual_spec.eval.quality import feature_sets
feature_sets.CHUNK = 3
from visual_spec.cli import main
sys.exit(main())
"""


def launched(script: Path, processes: int, *arguments) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    run.append("--")  # else torchrun of Python 3.11 takes --num for its own --numa-binding
    done = subprocess.run(
        [*run, str(script), *map(str, arguments)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_any_number_of_processes_draws_the_same_files_and_finds_the_same_scores(tmp_path):
    sample(work_in(tmp_path / "whole"))
    work_in(tmp_path).pipe.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\na red square\n")
    (tmp_path / "command.py").write_text(COMMAND)
    true = make_pictures(tmp_path / "true", 8, 1)
    found, files = [], []
    for count in (1, 2, 3):
        drawn = tmp_path / f"drawn{count}"
        asked = ["--prompts", tmp_path / "prompts.txt", "--num", 7, "--batch-size", 3, "--threads", 1]
        asked += ["--sampler", f"autoregressive:guidance_scale={LAW.guidance_scale}"]
        command, scores = tmp_path / "command.py", tmp_path / f"s{count}"
        launched(command, count, "sample", "--model", tmp_path / "model", *asked, "--out", drawn)
        files.append(content(drawn))
        asked = ["--reference", true, "--size", 128, "--threads", 1, "--out", scores]
        launched(command, count, "score", drawn, *asked)
        assert len(list(scores.glob("*.npz"))) == 6  # chunks of both sets
        found.append(json.loads((scores / "scores.json").read_text())["figures"])
    assert files[0] == files[1] == files[2]
    pictures = {name: data for name, data in content(tmp_path / "whole").items() if name.endswith(".png")}
    assert len(pictures) == 7 and pictures.items() <= files[0].items()
    for other in found[1:]:
        for name, figure in found[0].items():
            for part in ("value", "low", "high"):
                assert other[name][part] == pytest.approx(figure[part], rel=1e-9, abs=1e-12), name
