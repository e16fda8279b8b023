"""Ray Data draws the same files as one process, also where an actor is killed."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.helpers.sample_sets import content, work_in
from visual_spec.cli import main
from visual_spec.eval.quality.ray_engine import sample_with_ray
from visual_spec.eval.quality.sample_set import SampleSet, sample

ray = pytest.importorskip("ray", reason="Ray is not installed (extra `scale`)")


class KilledOnce(SampleSet):
    """A set whose second batch kills the process that draws it, once, between its pictures and its lines."""

    def draw(self, first: int) -> None:
        mark = self.folder.parent / "killed"
        super().draw(first)
        if first == self.batch_size and not mark.exists():
            (self.folder / "batches" / f"{first:06d}.jsonl").unlink()
            mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    yield
    ray.shutdown()


def killed_once(folder: Path) -> SampleSet:
    work = work_in(folder, num=10, batch_size=2)
    return KilledOnce(
        work.pipe, work.setting, work.prompts, work.folder, work.num, work.batch_size, work.model
    )


@pytest.mark.slow
def test_the_files_are_those_of_one_process_although_an_actor_is_killed(cluster, tmp_path):
    sample(work_in(tmp_path / "alone", num=10, batch_size=2))
    folder = tmp_path / "ray"
    found = sample_with_ray(lambda: killed_once(folder), work_in(folder, num=10, batch_size=2), workers=2)
    assert found is not None and found["samples"] == 10
    killed = int((tmp_path / "killed").read_text())
    assert killed != os.getpid()
    assert content(folder) == content(tmp_path / "alone")
    times = [json.loads(line) for line in (folder / "seconds.jsonl").read_text().splitlines()]
    assert [time["first"] for time in times] == [0, 2, 4, 6, 8]
    # A damaged picture is drawn again, and it alone.
    picture = folder / "000007.png"
    picture.write_bytes(picture.read_bytes()[:-9])
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    sample_with_ray(lambda: work_in(folder, num=10, batch_size=2), work_in(folder, num=10, batch_size=2))
    assert content(folder) == content(tmp_path / "alone")
    after = {path: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    assert {path.name for path in before if before[path] != after[path]} == {"000006.png", "000007.png"}
    with pytest.raises(ValueError, match="settings.*seed"):
        sample_with_ray(
            lambda: work_in(folder, num=12, batch_size=2, seed=1), work_in(folder, num=12, batch_size=2)
        )


@pytest.mark.slow
def test_the_command_draws_by_ray(cluster, tmp_path, capsys):
    work_in(tmp_path).pipe.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\na red square\n")
    asked = ["sample", "--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.txt")]
    asked += ["--batch-size", "2", "--num", "5", "--threads", "1", "--device", "cpu"]
    assert main([*asked, "--out", str(tmp_path / "alone")]) == 0
    assert main([*asked, "--out", str(tmp_path / "ray"), "--engine", "ray", "--workers", "2"]) == 0
    assert "5 samples in" in capsys.readouterr().out
    assert content(tmp_path / "ray") == content(tmp_path / "alone")
    assert main([*asked, "--out", str(tmp_path / "x"), "--engine", "ray", "--shards", "2"]) == 2
    assert "--rank and --shards share work without Ray" in capsys.readouterr().err
