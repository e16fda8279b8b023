"""An hour with a GPU, walked on a CPU: every stage runs at a tiny size, and what fails or lasts stops nothing else."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_package import ROOT
from visual_spec.eval.defaults import settings_of_model
from visual_spec.eval.speed import bench, gpu_hour, gpu_stages, gpu_tables
from visual_spec.eval.speed.gpu_hour import STAGES
from visual_spec.eval.speed.gpu_results import Stage, read_result, result_path
from visual_spec.eval.speed.groups import read_groups

HERE = "tests.eval.speed.test_gpu_hour"
FAILS, LASTS, FINE = (
    Stage("8", "one part of two fails", f"{HERE}:one_fails", 60),
    Stage("9", "starts a process and waits for ever", f"{HERE}:lasts", 60),
    Stage("10", "is fine", f"{HERE}:fine", 60),
)
FAKES = (FAILS, LASTS, FINE)


# -- stages that only the tests have ---------------------------------------------------------------------------------


def one_fails(dry):
    def fails():
        if not Path(os.environ["GPU_HOUR_TEST"], "mended").exists():
            raise RuntimeError("on purpose")
        return {"answer": 2}

    return {"fails": fails, "works": lambda: {"answer": _count("works")}}


def lasts(dry):
    def wait():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["GPU_HOUR_TEST"], "pid").write_text(str(child.pid))
        child.wait()

    return {"quick": lambda: {"answer": 1}, "slow": wait, "never reached": lambda: {"answer": 3}}


def fine(dry):
    return {"one": lambda: {"answer": _count("one")}, "wrong": lambda: {"answer": 4}}


def dies(dry):
    def die():
        print("the last words", flush=True)
        os._exit(7)

    return {"before": lambda: {"answer": 1}, "dies": die}


def problem(dry):
    return {"part": lambda: {"answer": 5, "problem": "two tokens differ"}}


def _count(name: str) -> int:
    """How often it was called, over processes."""
    path = Path(os.environ["GPU_HOUR_TEST"], name)
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return len(path.read_text())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_HOUR_TEST", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "out"


def run(stages, folder, **options):
    return gpu_hour.run_stages(stages, folder, dry=True, report=lambda text: None, **options)


# -- the runner --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_failures_and_limits_stop_nothing_else_and_are_resumed(folder, tmp_path):
    limited = Stage(LASTS.name, LASTS.title, LASTS.parts, 12)
    stages = (FAILS, limited, FINE)
    assert run(stages, folder) == {"8": "failed", "9": "over its limit", "10": "ok"}

    failed = read_result(result_path(folder, FAILS))
    assert failed["parts"]["fails"]["error"].startswith("RuntimeError: on purpose (test_gpu_hour.py:")
    assert failed["parts"]["works"]["result"] == {"answer": 1}
    assert failed["expected"] == ["fails", "works"]
    facts = failed["environment"]
    assert facts["device"] == "cpu" and facts["torch"] and "commit" in facts and failed["seconds"] > 0

    stopped = read_result(result_path(folder, limited))
    assert [part["status"] for part in stopped["parts"].values()] == ["ok", "over its limit"]
    assert stopped["error"] == "stopped after 12 s" and 12 <= stopped["seconds"] < 30
    for _ in range(50):  # what the stage had started has ended with it
        if not _runs(int((tmp_path / "pid").read_text())):
            break
        time.sleep(0.1)
    else:
        pytest.fail("a process of the stage still runs")

    # The next run leaves alone what is done, and of the rest runs what is missing.
    (tmp_path / "mended").touch()
    assert run((FAILS, FINE), folder) == {"8": "ok", "10": "ok"}
    mended = read_result(result_path(folder, FAILS))
    assert mended["parts"]["works"]["result"] == {"answer": 1} and mended["parts"]["fails"]["status"] == "ok"
    assert (tmp_path / "one").read_text() == "x"
    assert run((FINE,), folder, again=True) == {"10": "ok"} and (tmp_path / "one").read_text() == "xx"
    assert not list(folder.glob(".*"))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_that_dies_leaves_what_it_had_and_its_last_words(folder):
    stage = Stage("11", "dies", f"{HERE}:dies", 60)
    assert run((stage, FINE), folder) == {"11": "failed", "10": "ok"}
    document = read_result(result_path(folder, stage))
    assert [part["status"] for part in document["parts"].values()] == ["ok", "failed"]
    assert document["error"] == "ended with 7: the last words"


def test_results_of_other_code_and_of_dry_runs_do_not_count(folder):
    stage = Stage("12", "has a problem", f"{HERE}:problem", 60)
    assert run((stage,), folder) == {"12": "failed"}
    path = result_path(folder, stage)
    document = json.loads(path.read_text())
    assert document["parts"]["part"]["result"]["answer"] == 5
    assert document["parts"]["part"]["error"] == "two tokens differ"
    document["parts"]["old"] = document["parts"]["part"]
    document["environment"]["torch"] = "another"
    path.write_text(json.dumps(document))
    run((stage,), folder)
    assert list(read_result(path)["parts"]) == ["part"]
    assert "Not yet measured" in gpu_tables.tables(folder, [stage])
    path.write_text("{")
    assert read_result(path) == {}


def test_a_budget_leaves_the_rest_for_the_next_run(folder):
    said = []
    assert gpu_hour.run_stages((FINE,), folder, dry=True, budget=5, report=said.append) == {}
    assert said == ["stage 10, is fine: no time left for it"]


def test_the_essential_stages_fit_into_half_an_hour():
    assert all(stage.limit < 9 * 60 for stage in STAGES)
    assert (
        sum(stage.limit for stage in STAGES if stage.essential) <= 24 * 60
    )  # and a minute for what is installed
    assert len({stage.name for stage in STAGES}) == len(STAGES)


def test_stages_are_chosen_by_name():
    assert [stage.name for stage in gpu_hour.chosen_stages("5, 1,5a")] == ["5a", "5b", "5c", "5d", "5e", "1"]
    assert gpu_hour.chosen_stages(None) == list(STAGES)
    with pytest.raises(ValueError, match="no stage '9'; pass some of 1, 2, 3"):
        gpu_hour.chosen_stages("9")


# -- the stages themselves -------------------------------------------------------------------------------------------


def test_dry_run_walks_every_stage_and_its_tables_are_written(folder, tmp_path, capsys):
    assert gpu_hour.main(["--out", str(folder), "--dry-run"]) == 0, capsys.readouterr().out
    documents = {stage.name: read_result(result_path(folder, stage)) for stage in STAGES}
    for document in documents.values():
        assert document["status"] == "ok" and document["dry_run"] is True
        assert list(document["parts"]) == document["expected"] != []
    same = {**documents["2"]["parts"], **documents["3"]["parts"]}
    assert all(part["result"]["same"] <= part["result"]["samples"] for part in same.values())
    rows = [row["name"] for part in documents["5a"]["parts"].values() for row in part["result"]["rows"]]
    assert {"transformers generate", "official loop", "autoregressive", "speculative-jacobi"} <= set(rows)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 200_000

    # As if a GPU had measured it.
    for stage in STAGES:
        document = documents[stage.name] | {"dry_run": False}
        if stage.name == "6":
            result_path(folder, stage).unlink()
            continue
        result_path(folder, stage).write_text(json.dumps(document))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{gpu_tables.BEGIN}\nold\n{gpu_tables.END}\nbehind\n")
    for _ in range(2):
        assert gpu_hour.main(["--tables", str(folder), "--document", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("behind\n") and "old" not in text
    assert text.count("### Stage") == len(STAGES) and text.count("Not yet measured") == 1
    assert text.count("| transformers generate") == 3 and "proactive-jacobi" in text


def test_the_page_of_results_has_the_marks():
    text = (ROOT / "docs" / "RESULTS.md").read_text()
    assert text.count(gpu_tables.BEGIN) == text.count(gpu_tables.END) == 1
    made = gpu_tables.tables(ROOT / "benchmarks" / "results" / "gpu", STAGES)
    assert made in text, "run python scripts/gpu_hour.py --tables benchmarks/results/gpu"


def test_settings_of_the_real_run_are_read(monkeypatch):
    """All that a GPU would be asked for, as far as it can be checked without one."""
    asked = []
    monkeypatch.setattr(gpu_stages, "_bench", lambda options: asked.append(options) or {"rows": []})
    names = {stage.name: stage.parts.partition(":") for stage in STAGES}
    for name, (module, _, function) in names.items():
        parts = getattr(importlib.import_module(module), function)(False)
        assert parts, name
        for title, part in parts.items():
            if name in ("4", "5a") or title.startswith("var"):
                part()
    parser = bench.argparse.ArgumentParser()
    bench.add_arguments(parser)
    read = [parser.parse_args(options) for options in asked]
    assert len(read) == 9 + 6 + 3
    for args in read:
        bench._check_numbers(args)
        if not args.random_weights:
            known = settings_of_model(args.model)
            assert len(read_groups(args, known)[0]) > 1


def test_without_a_gpu_a_real_run_is_refused(folder, capsys):
    with pytest.raises(SystemExit):
        gpu_hour.main(["--out", str(folder)])
    assert "PyTorch sees no GPU here; pass --dry-run" in capsys.readouterr().err
    assert not folder.exists()


def test_wheels_are_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match="no wheels in"):
        gpu_hour.install(tmp_path)


def test_the_script_lists_its_stages():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_hour.py"), "--list"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == [stage.name for stage in STAGES]
