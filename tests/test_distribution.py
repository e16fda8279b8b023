"""What a wheel and a source distribution hold, told from the files and from pyproject.toml, without building them."""

import fnmatch
import hashlib
import re
import runpy
import subprocess
import sys
import tomllib
import zlib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "visual_spec"
WEIGHTS = ROOT / "weights"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MEBIBYTE = 2**20


def packaged(package: Path = PACKAGE) -> list[Path]:
    """All files of a package, caches not counted."""
    paths = (path for path in package.rglob("*") if "__pycache__" not in path.parts)
    return sorted(path for path in paths if path.is_symlink() or path.is_file())


def test_every_file_of_the_package_is_in_the_wheel():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["visual_spec"]
    kept = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert not [path for path in packaged() if path.suffix != ".py" and path not in kept]


def test_the_wheel_of_the_code_is_small():
    files = packaged()
    assert not [path for path in files if path.is_symlink()], "a wheel holds a copy of what a link points to"
    packed = sum(len(zlib.compress(path.read_bytes(), 1)) for path in files)
    assert packed < 3e6


def test_the_package_of_weights_holds_every_file_once():
    project = tomllib.loads((WEIGHTS / "pyproject.toml").read_text())
    (name,) = project["tool"]["setuptools"]["packages"]
    patterns = project["tool"]["setuptools"]["package-data"][name]
    files = packaged(WEIGHTS / name)
    kept = {path for pattern in patterns for path in (WEIGHTS / name).glob(pattern)}
    assert [path.name for path in files if path not in kept] == ["__init__.py"]
    assert PROJECT["project"]["optional-dependencies"]["models"] == [f"{project['project']['name']}>=0.1"]
    assert not [path for path in files if path.is_symlink()], "a wheel holds a copy of what a link points to"
    assert sum(path.stat().st_size for path in files) < 55 * MEBIBYTE
    same = defaultdict(list)
    for path in files:
        if path.stat().st_size > 10_000:
            same[hashlib.sha256(path.read_bytes()).digest()].append(path.relative_to(WEIGHTS).as_posix())
    assert not [paths for paths in same.values() if len(paths) > 1]


def test_the_source_distribution_holds_what_it_is_tested_and_trained_with():
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines() if line[:1] != "#"]
    single = {name for command, *names in lines if command == "include" for name in names}
    trees = {folder: patterns for command, folder, *patterns in lines if command == "recursive-include"}
    assert single >= {"Makefile", "constraints.txt"}
    for folder in ("tests", "scripts", "docs", "benchmarks"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"]
        missed = [path for path in files if not any(fnmatch.fnmatch(path.name, p) for p in trees[folder])]
        assert files and not missed


def test_every_trainer_is_a_command_and_messages_name_those_that_are_there():
    """`python scripts/train NAME` in a checkout, and `python -m visual_spec.training.NAME` of a wheel."""
    found = subprocess.run(
        [sys.executable, "scripts/train", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    commands = set(re.findall(r"\w+", found.stdout.split("one of")[1]))
    assert {"ar", "mar", "codec"} <= commands and not commands & {"codebook", "motion_tokens"}
    known = {"scripts/train ": commands}
    known["-m visual_spec.training."] = {path.stem for path in (PACKAGE / "training").glob("[a-z]*.py")}
    for path in [*packaged(), *(ROOT / "scripts").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]:
        if path.suffix not in (".py", ".md") or path.name == "LOG.md":
            continue
        for home, names in known.items():
            told = set(re.findall(rf"python {re.escape(home)}([a-z]\w+)", path.read_text()))
            assert told <= names, path
    for name in ("drafter", "column_drafter", "distilled", "flashar"):
        assert (
            'if __name__ == "__main__":\n    run_trainer(main)'
            in (PACKAGE / "training" / f"{name}.py").read_text()
        )


def test_every_lower_bound_is_stated():
    bounds = runpy.run_path(str(ROOT / "scripts" / "lower_bounds.py"))["lower_bounds"]
    found = bounds((ROOT / "pyproject.toml").read_text())
    assert len(found) == len(PROJECT["project"]["dependencies"]) and found["diffusers"] == "diffusers==0.37"
    extras = set(PROJECT["project"]["optional-dependencies"]) - {"models", "vllm", "docs", "dev"}
    found = bounds((ROOT / "pyproject.toml").read_text(), sorted(extras))
    assert {"torchmetrics[image]", "ray[serve]", "peft", "torchao", "gradio", "pytest-xdist"} <= set(found)
