"""Every command on every embedded model: it does its work, or says in one line why not.

Decodes of pictures and clips are stopped after two calls: what is tested is that commands and models know each other.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from visual_spec.cli import main
from visual_spec.commands import serve as serving
from visual_spec.pipelines.embedded import embedded_folder, embedded_models
from visual_spec.samplers.core.base import STOP, Sampler

# What a command cannot do with a model, and the words that say so.
CANNOT = {
    **{(command, "motion_causal"): "ChunkVideoPipeline" for command in ("bench", "eval", "sample")},
    **{("convert", name): "Pipeline already" for name in embedded_models()},
    **{
        ("serve", name): "pass --engine ray" for name in embedded_models() if name not in ("shapes", "things")
    },
    **{
        (command, name): "serve draws pictures"
        for command in ("serve", "serve --engine ray")
        for name in embedded_models()
        if name.startswith(("motion", "tunes"))
    },
}
# What `bench` measures beside plain decoding.
SAMPLERS = dict.fromkeys(embedded_models(), "speculative-jacobi") | {
    "motion_masked": "frame-masked:steps=2",
    "shapes_any": "any-order:steps=4",
    "shapes_causal": "continuous:head_steps=5",
    "shapes_mar": "continuous:steps=2",
    "shapes_flexvar": "scale-wise:scales=1/4/16",
    "shapes_masked": "masked:steps=2",
    "shapes_nar": "ordered",
    "shapes_shuffle": "block-jacobi:window=4",
    "shapes_var": "scale-wise:smooth=true",
    "tunes": "column-jacobi",
    "tunes_masked": "masked:steps=1",
}
QUICK = {  # to measure, and to judge: one model of a medium
    "bench": ("motion_causal", "motion_masked", "shapes_mar", "shapes_masked"),
    "eval": ("motion_causal", "motion_masked", "shapes"),  # music is sampled, scored and shown below
}
PROMPTS = {
    "shapes_causal": "red circle",  # models of classes: their names
    "shapes_flexvar": "red circle",
    "shapes_mar": "red circle",
    "shapes_var": "red circle",
}


@pytest.fixture(autouse=True)
def two_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Samplers stop after two calls of the model, by the callback that every call takes."""
    decode = Sampler.__call__

    def stopped(self: Sampler, *args: Any, callback: Any = None, **settings: Any) -> Any:
        if getattr(getattr(args[0], "grid", None), "codebooks", 1) > 1:
            return decode(self, *args, callback=callback, **settings)  # music of no columns cannot be heard

        def stop(call: int, lengths: Any) -> Any:
            answer = callback(call, lengths) if callback is not None else None
            return STOP if call >= 1 else answer

        return decode(self, *args, callback=stop, **settings)

    monkeypatch.setattr(Sampler, "__call__", stopped)
    yield


def command_line(command: str, model: str, out: Path) -> list[str]:
    name, *flags = command.split()
    prompts = out.with_name("prompts.txt")
    prompt = PROMPTS.get(model, "a red circle")
    prompts.write_text(prompt + "\n")
    return [name, *flags] + {
        "generate": [prompt, "--model", model, "--out", str(out)],
        "bench": ["--model", model, "--samplers", SAMPLERS[model], "--batch-sizes", "1", "--prompts", "1",
                  "--warmup", "0", "--skip-uncached"],
        "eval": ["--model", model, "--samplers", SAMPLERS[model], "--samples", "4", "--batch-size", "4",
                 "--alone", "0", "--out", str(out)],
        "sample": ["--model", model, "--prompts", str(prompts), "--num", "1", "--batch-size", "1",
                   "--out", str(out)],
        "score": [str(out), "--json"],
        "report": [str(out), "--out", str(out.with_name("page.html"))],
        "convert": [str(embedded_folder(model)), "--out", str(out)],
        "models": [model],
        "serve": [model],
    }[name]  # fmt: skip


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens, and no engine starts: what `serve` asks before it does is what is tested."""
    monkeypatch.setattr(serving, "_required", lambda name: MagicMock())
    monkeypatch.setattr(serving, "_painter", lambda args: MagicMock())


@pytest.mark.parametrize(
    ("command", "name"),
    [
        pytest.param(command, name, marks=[] if name in QUICK.get(command, [name]) else [pytest.mark.slow])
        for command in (*"generate bench eval sample convert models serve".split(), "serve --engine ray")
        for name in embedded_models()
    ],
)
@pytest.mark.usefixtures("no_server")
def test_a_command_works_on_a_model_or_says_why_not(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(command_line(command, name, tmp_path / "out"))
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("visual-spec: error: ")]
    if (command, name) in CANNOT:
        assert status == 2 and len(lines) == 1 and CANNOT[command, name] in lines[0]
    else:
        assert status == 0 and not lines, said


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "tunes_masked" else [])
        for name in sorted(set(embedded_models()) - {"motion_causal"})
    ],
)
def test_samples_of_every_model_are_scored_and_shown(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("sample", "score", "report"):
        line = command_line(command, name, tmp_path / "out")
        if command == "sample":
            line[line.index("--num") + 1] = "4"  # the fewest that have three neighbours
        if command == "score":
            line += ["--reference", str(tmp_path / "out")]
        status = main(line)
        printed = capsys.readouterr()
        assert status == 0 and "error" not in printed.err, printed.err
    page = (tmp_path / "page.html").read_text()
    assert name in page and PROMPTS.get(name, "a red circle") in page


@pytest.mark.parametrize("command", ["score", "report"])
def test_samples_that_are_not_there_are_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command_line(command, "shapes", tmp_path / "nowhere")) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and str(tmp_path / "nowhere") in lines[0] and "Errno" not in lines[0]


@pytest.mark.parametrize("command", ["generate", "bench", "eval", "sample", "score"])
@pytest.mark.parametrize("count", ["0", "-1", "100000", "x"])
def test_a_number_of_threads_that_no_machine_has_use_of_is_refused(
    command: str, count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main([command, "x", "--threads", count])
    assert exit.value.code == 2 and f"--threads: {count} given" in capsys.readouterr().err


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_closed_output_is_no_error(closed: str) -> None:
    script = f'"{sys.executable}" -m visual_spec models {closed}'
    process = subprocess.run(["sh", "-c", script], stderr=subprocess.PIPE, timeout=300)
    assert (process.returncode, process.stderr) == (0, b"")
