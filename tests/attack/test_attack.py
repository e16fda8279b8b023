"""A small attack in every run of the tests, and planted faults that the large one must see (`scripts/attack.py`)."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.attack import inputs, kills, outcome
from tests.attack.ground import Ground, generate
from tests.attack.outcome import ACCEPTED, ESCAPED, REFUSED, SLOW, WRONG, Case, attempt


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield Ground(tmp_path_factory.mktemp("ground"), patch)


@pytest.mark.filterwarnings("ignore")
def test_a_few_malformed_inputs_of_every_kind(ground, tmp_path):
    found = [attempt(case, tmp_path / str(n)) for n, case in enumerate(inputs.cases(ground, 7, 0.01))]
    assert {one.case.kind for one in found} == set(inputs.COUNTS)
    assert [one for one in found if one.what not in (REFUSED, ACCEPTED)] == []


def test_the_numbers_of_inputs_are_those_that_are_promised(ground):
    made = list(inputs.cases(ground, 0))
    assert len(made) >= 1000 and len({(case.kind, case.name) for case in made}) > 900
    again = [case.name for case in inputs.cases(ground, 0)]
    assert again == [case.name for case in made]  # reproducible
    assert [case.name for case in inputs.cases(ground, 1)] != again


def command(*arguments: str) -> Any:
    return lambda folder: list(arguments)


def fail() -> None:
    raise KeyError("vq_model")


def babble() -> None:
    print("error: one", file=sys.stderr)
    raise ValueError("two")


def spin() -> None:
    while True:
        pass


def test_planted_faults_are_seen(ground, tmp_path, monkeypatch):
    monkeypatch.setattr(outcome, "SECONDS", 0.2)
    planted = {
        "an exception": (lambda folder: fail, ESCAPED),
        "two lines": (lambda folder: babble, ESCAPED),
        "an end without a word": (lambda folder: lambda: sys.exit(3), ESCAPED),
        "no end": (lambda folder: spin, SLOW),
        "nothing refused": (lambda folder: lambda: None, WRONG),
        "one line": (command("convert", "no-such-file", "--out", str(tmp_path / "x")), REFUSED),
        "usage and one line": (command("generate"), REFUSED),
    }
    for number, (name, (prepare, expected)) in enumerate(planted.items()):
        case = Case("planted", name, prepare, lambda folder: "accepted:")
        assert attempt(case, tmp_path / str(number)).what == expected, name
    fine = Case("planted", "fine", lambda folder: lambda: None, lambda folder: True)
    assert attempt(fine, tmp_path / "fine").what == ACCEPTED


def test_another_sample_is_no_right_one(ground, tmp_path):
    """A pipeline that draws something else without an error."""

    def prepare(folder: Path) -> list[str]:
        return generate("pictures", ground.folder / "pictures", folder / "out", "--temperature", "3")

    case = Case("planted", "warm", prepare, lambda folder: inputs.same(ground, "pictures", folder))
    found = attempt(case, tmp_path / "warm")
    assert found.what == WRONG and "another sample was made" in found.said


def test_half_written_files_are_seen(ground, tmp_path):
    out = Path(shutil.copytree(ground.folder / "pictures", tmp_path / "work" / "out"))
    np.savez_compressed(tmp_path / "work" / "features.npz", features=np.arange(1000.0))
    (out / "picture.png").write_bytes(ground.output("pictures"))
    assert kills.half_written(tmp_path / "work") == []
    for name in ("out/picture.png", "out/transformer/config.json", "features.npz"):
        path = tmp_path / "work" / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert any(name in found for found in kills.half_written(tmp_path / "work"))
        path.write_bytes(whole)
    (out / "vq_model" / "config.json").unlink()
    assert any("vq_model" in found for found in kills.half_written(tmp_path / "work"))
    # Under a temporary name anything may stand.
    (tmp_path / "work" / ".out.host-1-x.tmp").mkdir()
    shutil.copytree(ground.folder / "pictures", out, dirs_exist_ok=True)
    (tmp_path / "work" / ".out.host-1-x.tmp" / "model_index.json").write_text("{")
    assert kills.half_written(tmp_path / "work") == []


def test_a_work_that_does_not_resume_is_seen(tmp_path):
    """One that writes its result in place, and takes what it finds for whole."""

    def careless(folder: Path) -> None:
        path = folder / "result.json"
        if path.exists():
            return
        with path.open("w") as file:
            file.write('["half a list"')
            file.flush()
            kills.time.sleep(60)  # far longer than until the kill, so that a busy machine kills it here too
            file.write("]")

    work = kills.Work(careless, lambda folder: (folder / "result.json").read_text())
    (tmp_path / "killed").mkdir()
    assert kills.run(work, tmp_path / "killed", 2.0) is None
    assert kills.half_written(tmp_path / "killed")[0].startswith("result.json")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_kills_of_every_kind_of_work(ground, tmp_path):
    found = list(kills.attack(ground, tmp_path, seed=3, kills=1))
    assert [name for name, _ in found] == ["generate", "eval", "training", "convert", "save", "sample"]
    assert [wrong for _, wrong in found] == [""] * 6
