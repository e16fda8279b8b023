"""Every trainer as a command: its options are those of its dataclasses, and its run and record those of the loop."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import numpy as np
import pytest
import torch

from visual_spec.training.loop import (
    Descent,
    OutOptions,
    RunOptions,
    Trainer,
    option,
    read_options,
    run_trainer,
)

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "scripts.train": ROOT / "scripts" / "train",
    "visual_spec.training": ROOT / "visual_spec" / "training",
}
TRAINERS = [
    f"{package}.{path.stem}"
    for package, folder in FOLDERS.items()
    for path in sorted(folder.glob("[a-z]*.py"))
    if "\ndef main() -> None:" in path.read_text()
]


@dataclass(frozen=True)
class Settings:
    steps: int = 6
    rate: float = 0.5
    compile: bool = False


@dataclass(kw_only=True)
class Options(RunOptions):
    start_from: Path | None = option("a folder", None)
    kind: str = option("of two", "one", choices=["one", "two"])


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_shows_its_options(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--help"])
    module = importlib.import_module(name)
    with pytest.raises(SystemExit) as stop:
        module.main()
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(f"--{name} " in out for name in ("out", "steps", "batch_size", "seed"))


@pytest.mark.parametrize("name", TRAINERS)
def test_a_folder_that_is_not_there_is_named_before_anything_is_loaded(name, monkeypatch, capsys):
    module = importlib.import_module(name)
    kinds = [
        kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, OutOptions)
    ]
    options = max(kinds, key=lambda kind: len(fields(kind)))  # the trainer's own
    paths = [
        field for field in fields(options) if "Path" in str(field.type) and field.name not in options.writes
    ]
    needed = [word for one in paths if one.default is MISSING for word in (f"--{one.name}", str(ROOT))]
    for one in paths:
        words = ["x", "--out", "a", *needed, f"--{one.name}", "nofolder"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stop:
            run_trainer(module.main)
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said == f"x: error: --{one.name} nofolder: there is no such folder.\n"


def test_options_fill_dataclasses(monkeypatch, capsys):
    words = ["x", "--out", "a", "--start-from", str(ROOT), "--rate", "0.25", "--compile"]
    monkeypatch.setattr(sys, "argv", words)
    options, settings = read_options("text", Options, Settings)
    assert (options.out, options.start_from, options.device) == (Path("a"), ROOT, "cpu")
    assert settings == Settings(rate=0.25, compile=True)
    monkeypatch.setattr(sys, "argv", ["x", "--out", "a", "--kind", "three"])
    with pytest.raises(SystemExit):
        read_options("text", Options, Settings)
    assert "three" in capsys.readouterr().err
    assert {field.name for field in fields(Options)} == {"out", "device", "start_from", "kind"}


def interrupt() -> None:
    raise KeyboardInterrupt


def run(
    out: Path, stop: int | None = None, fail: Callable[[], object] = interrupt
) -> tuple[torch.nn.Linear, dict, list]:
    """A run on a straight line; it fails at step `stop`."""
    torch.manual_seed(0)
    model, settings, seen = torch.nn.Linear(1, 1), Settings(), []
    descend = Descent([torch.optim.SGD(model.parameters(), lr=settings.rate)], settings.steps, settings.rate)

    def batches(step: int):
        if step == stop:
            fail()
        dice = torch.Generator().manual_seed(step)
        return step, torch.rand(4, 1, generator=dice)

    def loss(step: int, x: torch.Tensor):
        found = (model(x) - 3 * x).square().mean()
        return 2 * found, found, step, "more"

    trainer = Trainer(model, settings, out, descend, every=2, curve_every=1)
    judged = {"right": 1}
    record = trainer.run(
        loss, batches, lambda: judged, lambda: seen.append("saved"), after=lambda *told: seen.append(told)
    )
    return model, record, seen


def test_a_run_records_resumes_and_tidies_up(tmp_path):
    whole, record, seen = run(tmp_path / "whole")
    assert seen == [*((step, step, "more") for step in range(6)), "saved"]
    assert list(record) == ["settings", "parameters", "seconds", "right", "loss"]
    assert record["parameters"] == 2 and [step for step, _ in record["loss"]] == list(range(6))
    assert (tmp_path / "whole" / "training.json").exists() and not (tmp_path / "whole" / "resume.pt").exists()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", stop=5)
    assert (tmp_path / "cut" / "resume.pt").exists()
    resumed, other, seen = run(tmp_path / "cut")
    assert [told[0] for told in seen[:-1]] == [4, 5]  # from the last save on
    assert torch.equal(resumed.weight, whole.weight) and other["loss"] == record["loss"]


def device_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("fail", [device_out_of_memory, lambda: torch.empty(2**60), lambda: np.empty(2**57)])
def test_out_of_memory_is_one_line_and_leaves_the_last_state(fail, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scripts/train.py"])
    for stop, kept in (
        (1, "nothing is saved"),
        (5, f"{tmp_path / 'resume.pt'} holds the state after step 4"),
    ):
        with pytest.raises(SystemExit) as ended:
            run_trainer(lambda: run(tmp_path, stop, fail))  # pyright: ignore[reportArgumentType]  # noqa: B023
        said = capsys.readouterr().err
        assert ended.value.code == 2 and said.count("\n") == 1
        assert said.startswith("train: error: out of memory (") and f"smaller --batch_size; {kept}" in said
    assert [told[0] for told in run(tmp_path)[2][:-1]] == [4, 5]
