"""Tokens with their log-probabilities on disk: those of the pipeline, whole after kills, the same for any processes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.helpers.refusals import refuses
from tests.helpers.sample_sets import LAW, TEXTS, content, work_in
from tests.helpers.tiny import tiny_pipeline
from visual_spec.cli import main
from visual_spec.eval.quality.sample_set import sample
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.samplers.orders.zipar import ZipARSampler

# Rank 1 is killed once, where it has written its second batch's file and not yet given it its name.
KILLED = """
import os, signal, sys
from pathlib import Path
from visual_spec.files import whole
rename, mark = os.replace, Path(sys.argv.pop())
def killed(source, target):
    if os.environ.get("RANK") == "1" and Path(target).name == "000009.safetensors" and not mark.exists():
        mark.write_text("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
whole.os.replace = killed
from visual_spec.cli import main
sys.exit(main())
"""


def rollouts(folder, **settings):
    work = work_in(folder, **settings)
    return type(work)(**{**vars(work), "logprobs": True})


def shards(folder):
    """Arrays and facts of every file, in order."""
    for path in sorted((folder / "rollouts").glob("*.safetensors")):
        with safe_open(path, "np") as shard:
            yield (
                {name: shard.get_tensor(name) for name in shard.keys()},
                json.loads(shard.metadata()["facts"]),
            )


def test_files_hold_what_the_pipeline_draws_one_by_one(tmp_path):
    sample(rollouts(tmp_path, text="speculative-jacobi:window=4"))
    parts = list(shards(tmp_path))
    assert [len(arrays["tokens"]) for arrays, _ in parts] == [3, 3, 1]  # two of the last batch are not kept
    pipe, index = tiny_pipeline(), 0
    parameters = [part for part in pipe.components.values() if hasattr(part, "state_dict")]
    for arrays, facts in parts:
        assert facts["run"]["weights"] == fingerprint(parameters)
        assert facts["run"]["law"]["guidance_scale"] == 2.0
        for place, prompt in enumerate(facts["prompts"]):
            assert prompt == TEXTS[index % 3] and arrays["index"][place] == arrays["seed"][place] == index
            generator = torch.Generator().manual_seed(index)
            one = pipe(prompt, generator=generator, guidance_scale=2.0, output_logprobs=True)
            assert np.array_equal(arrays["tokens"][place], one.tokens[0].numpy().ravel())
            for name in ("logprobs", "model_logprobs"):
                expected = getattr(one.trace, name)[0].numpy()
                np.testing.assert_allclose(arrays[name][place], expected, rtol=0, atol=2e-5)
            index += 1
    assert index == 7


def test_a_lossy_sampler_has_the_models_alone(tmp_path):
    sample(rollouts(tmp_path, text="speculative-jacobi:window=4,coupling=maximal,acceptance=grouped"))
    assert all("logprobs" not in arrays and "model_logprobs" in arrays for arrays, _ in shards(tmp_path))


def test_a_damaged_or_missing_file_is_drawn_again(tmp_path):
    sample(rollouts(tmp_path))
    before = content(tmp_path)
    shard = tmp_path / "rollouts" / "000003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # a log-probability, which no header betrays
    for damage in (lambda: shard.write_bytes(bytes(data)), shard.unlink, lambda: shard.write_bytes(b"")):
        damage()
        times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.png")}
        sample(rollouts(tmp_path))
        assert content(tmp_path) == before
        drawn = {path.name for path, time in times.items() if path.stat().st_mtime_ns != time}
        assert drawn == {"000003.png", "000004.png", "000005.png"}


def test_a_set_without_them_is_another_one(tmp_path):
    sample(work_in(tmp_path))
    refuses(ValueError, "output_logprobs: None there, True here", sample, rollouts(tmp_path))


def test_a_sampler_that_keeps_none_is_refused_before_anything_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(ZipARSampler, "gives_logprobs", False)
    refuses(ValueError, "output_logprobs of a", sample, rollouts(tmp_path / "x", text="zipar"))
    assert not (tmp_path / "x").exists()


def test_the_command_refuses_a_pipeline_that_keeps_none(tmp_path, capsys):
    asked = ["sample", "--model", "shapes_mar", "--prompts", "classes", "--num", "1", "--logprobs"]
    assert main([*asked, "--out", str(tmp_path / "x")]) == 2
    assert "output_logprobs of a ContinuousSampler, whose tokens are vectors" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_processes_of_which_one_is_killed_write_the_bytes_of_one_process(tmp_path):
    work_in(tmp_path).pipe.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS) + "\n")
    (tmp_path / "command.py").write_text(KILLED)
    asked = ["sample", "--model", tmp_path / "model", "--prompts", tmp_path / "prompts.txt", "--num", 16]
    asked += ["--batch-size", 3, "--threads", 1, "--logprobs"]
    asked += ["--sampler", f"speculative-jacobi:window=4,guidance_scale={LAW.guidance_scale}"]
    alone, shared, mark = tmp_path / "alone", tmp_path / "shared", tmp_path / "mark"
    assert main([*map(str, asked), "--out", str(alone)]) == 0
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    run += map(str, [tmp_path / "command.py", *asked, "--out", shared, mark])

    def launched():
        return subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)

    assert launched().returncode != 0 and mark.exists()
    there = {path.name for path in (shared / "rollouts").glob("*.safetensors")}
    assert "000003.safetensors" in there and "000009.safetensors" not in there
    assert list((shared / "rollouts").glob(".*.tmp"))  # what the killed one had begun
    times = {path: path.stat().st_mtime_ns for path in (shared / "rollouts").glob("*.safetensors")}
    done = launched()
    assert done.returncode == 0, done.stderr
    assert content(shared) == content(alone)
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())  # nothing is drawn twice
    assert not list((shared / "rollouts").glob(".*.tmp"))


RAY = """
import os, sys
import ray
from visual_spec.eval.quality.ray_engine import Rollouts
from visual_spec.samplers.orders.zipar import ZipARSampler

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
rows = [{"prompt": prompt, "seed": seed} for seed in range(4) for prompt in ("a red circle", "a blue square")]
drawn = ray.data.from_items(rows).map_batches(
    Rollouts, fn_constructor_args=(sys.argv[1],), fn_constructor_kwargs={"pictures": True, "guidance_scale": 2.0},
    batch_size=3, concurrency=2,
)
drawn.write_parquet(sys.argv[2])
"""


@pytest.mark.slow
def test_ray_data_writes_them_as_parquet(tmp_path):
    pytest.importorskip("ray.data", reason="Ray Data is not installed (extra `scale`)")
    parquet = pytest.importorskip("pyarrow.parquet")
    work_in(tmp_path).pipe.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", RAY, str(tmp_path / "model"), str(tmp_path / "rows")]
    settings = {**os.environ, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=settings)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = parquet.read_table(tmp_path / "rows").to_pylist()
    pipe = tiny_pipeline()
    assert len(rows) == 8
    for row in rows:
        generator = torch.Generator().manual_seed(row["seed"])
        one = pipe(row["prompt"], generator=generator, guidance_scale=2.0, output_logprobs=True)
        assert np.array_equal(np.asarray(row["tokens"]).ravel(), one.tokens[0].numpy().ravel())
        assert np.array_equal(np.asarray(row["image"]).ravel(), np.asarray(one.images[0]).ravel())
        for name in ("logprobs", "model_logprobs"):
            expected = getattr(one.trace, name)[0].numpy()
            np.testing.assert_allclose(row[name], expected, rtol=0, atol=2e-5)
