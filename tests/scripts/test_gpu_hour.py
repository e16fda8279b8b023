"""The commands for a borrowed GPU: the runner on commands of the tests, and whether each real command can be read."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.sizes import __main__ as sizes
from benchmarks.sizes import music as music_sizes
from scripts.gpu_hour import JOBS, Job, chosen, main, run_job
from tests.helpers.refusals import refuses
from visual_spec.commands import bench
from visual_spec.eval.defaults import settings_of_model
from visual_spec.eval.speed.groups import read_groups

ROOT = Path(__file__).parents[2]
WRITES = "import json, sys, pathlib; pathlib.Path(sys.argv[1]).write_text(json.dumps({'answer': 1})); print('done')"
LASTS = (
    "import subprocess, sys, pathlib; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "pathlib.Path(sys.argv[1]).write_text(str(child.pid)); child.wait()"
)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_failures_and_limits_stop_nothing_else_and_are_resumed(tmp_path, capsys):
    flag, pid = tmp_path / "mended", tmp_path / "pid"
    fails = f"import os, sys; print('last words'); sys.exit(0 if os.path.exists({str(flag)!r}) else 7)"
    jobs = (
        Job("fails", 60, ("-c", fails)),
        Job("lasts", 5, ("-c", LASTS, str(pid))),
        Job("writes", 60, ("-c", WRITES, "{out}")),
    )
    folder = tmp_path / "out"
    assert main(["--out", str(folder)], jobs) == 1
    found = {job.name: json.loads((folder / f"{job.name}.json").read_text()) for job in jobs}
    assert [one["status"] for one in found.values()] == ["failed", "stopped", "ok"]
    assert "last words" in found["fails"]["said"] and found["writes"]["result"] == {"answer": 1}
    assert 5 <= found["lasts"]["seconds"] < 30
    deadline = time.monotonic() + 10
    while runs(int(pid.read_text())):  # what the command had started has ended with it
        assert time.monotonic() < deadline
        time.sleep(0.1)
    flag.touch()
    capsys.readouterr()
    assert main(["--out", str(folder), "--only", "fails", "writes"], jobs) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("fails: ok")  # and nothing of `writes`
    assert main(["--out", str(folder), "--only", "writes", "--again"], jobs) == 0
    assert capsys.readouterr().out.startswith("writes: ok")
    assert main(["--out", str(folder), "--budget", "20"], jobs) == 1
    assert "lasts: stopped" in capsys.readouterr().out


def test_a_budget_leaves_the_rest_for_the_next_run(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--budget", "5"], (Job("writes", 60, ("-c", WRITES, "{out}")),)) == 1
    assert "no time left" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_commands_find_the_checkout_its_models_and_what_was_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "carried.py").touch()
    text = "import carried, benchmarks, visual_spec_models as models; print(models.__file__)"
    done = run_job(Job("imports", 60, ("-c", text)), 60)
    assert done["status"] == "ok" and str(ROOT / "weights") in done["said"]


def test_results_of_pytest_are_counted(tmp_path):
    file = tmp_path / "test_three.py"
    file.write_text(
        "import pytest\ndef test_passes(): pass\ndef test_fails(): assert 0\n@pytest.mark.skip\ndef test_no(): pass\n"
    )
    found = run_job(Job("tests", 60, ("-m", "pytest", "--noconftest", str(file), "--junitxml={out}")), 60)
    assert found["status"] == "failed" and (found["result"]["passed"], found["result"]["skipped"]) == (1, 1)
    assert [name.rpartition("::")[2] for name in found["result"]["failed"]] == ["test_fails"]
    skipped = ("-m", "pytest", "--noconftest", str(file), "-k", "no", "--junitxml={out}")
    assert run_job(Job("tests", 60, skipped), 60)["status"] == "failed"


def test_every_command_fits_into_ten_minutes_and_can_be_read(monkeypatch):
    """All that a GPU would be asked for, as far as it can be checked without one."""
    assert len({job.name for job in JOBS}) == len(JOBS) and all(job.limit < 540 for job in JOBS)
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    for job in JOBS:
        assert sum("{out}" in word for word in job.command) == 1
        if job.command[:3] == ("-m", "visual_spec", "bench"):
            args = parser.parse_args(job.command[3:])
            bench._check_numbers(args)
            assert len(read_groups(args, settings_of_model(args.model))[0]) > 1
        elif job.name != "tests":
            module = job.command[1].replace(".", "/") if job.command[0] == "-m" else job.command[0]
            assert (ROOT / module).exists() or (ROOT / module).with_suffix(".py").exists()


def test_names_are_beginnings():
    assert [job.name for job in chosen(["kernels", "tests"], JOBS)] == ["kernels", "kernels-64", "tests"]
    assert chosen(None, JOBS) == JOBS
    refuses(ValueError, "nothing.*tests", chosen, ["nothing"], JOBS)


@pytest.mark.fast_sets(2)
@pytest.mark.parametrize("kind", ["music", "speech", "video", "profile"])
def test_sizes_are_measured_and_written(kind, tmp_path, monkeypatch):
    from visual_spec.eval import measure
    from visual_spec.models.next_token import llamagen

    monkeypatch.setattr(measure, "copy_bandwidth", lambda device, mebibytes=None: 1e10)
    monkeypatch.setattr(measure, "matmul_peak", lambda device, dtype: 1e11)
    monkeypatch.setitem(music_sizes.SIZES, "tiny", (1, 32, 2, 32))
    monkeypatch.setitem(llamagen.PRESETS, "tiny", {"num_layers": 2, "num_heads": 2, "dim": 16})
    size = "llamagen-tiny" if kind == "profile" else "tiny"
    out = tmp_path / "out.json"
    options = [
        kind,
        "--size",
        size,
        "--runs",
        "1",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", ["sizes", *options])
    sizes.main()
    document = json.loads(out.read_text())
    assert document["kind"] == kind and document["environment"]["device"] == "cpu"
    assert all(row.get("ms_per_call", row.get("wall_ms_per_call")) for row in document["rows"])
    assert os.path.getsize(out) < 100_000
