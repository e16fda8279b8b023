"""Install visual_spec and its extras with the lowest versions that pyproject.toml allows, or with the newest, generate
with every embedded model, and run the tests that meet other packages.

    python scripts/lower_bounds.py
    python scripts/lower_bounds.py --newest
    python scripts/lower_bounds.py --use torch==2.13.0+cpu    another version in place of a lower bound

A virtual environment is made in a temporary folder and removed afterwards. It needs a package index, and with a CUDA
build of torch about 8 GB. Extras for documents and for vLLM, which has an environment of its own, are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ("eval", "audio", "scale", "serve", "video", "lora", "app")
NEW = ("quant",)  # needs a newer torch than the others, and would raise theirs: with the newest versions only
RUNNERS = ("pytest", "pytest-xdist", "httpx")  # of the extra dev
# What takes objects of other packages, or hands them on.
TESTS = """
    tests/test_package.py tests/test_app.py tests/models/core tests/models/next_token tests/training/test_waves.py
    tests/eval/quality/test_score.py tests/serving/test_endpoint.py tests/serving/test_operating.py
    tests/serving/test_http.py tests/pipelines/test_adapters.py
    tests/pipelines/test_audio_clips.py tests/pipelines/test_depth_decoders.py tests/pipelines/test_diffusers_video.py
    tests/pipelines/test_embedded.py tests/pipelines/test_quantised_loading.py tests/pipelines/test_saving.py
    tests/pipelines/test_transformers_codes.py tests/pipelines/test_transformers_generate.py
    tests/pipelines/test_transformers_models.py tests/pipelines/test_transformers_music.py
""".split()
NEW_TESTS = [
    "tests/pipelines/test_transformers_speech.py"
]  # of models that the lowest transformers does not have
PROMPTS = {
    "image": "a large red circle on a plain sky background",
    "audio": "a slow sad organ melody in A minor",
    "video": "a large red circle moves left on a plain sky background",
}
DRAW = """
import json, sys, visual_spec
from importlib.metadata import version
from visual_spec.pipelines.embedded import embedded_models
from visual_spec.pipelines.loading import load_pipeline
print({name: version(name) for name in sys.argv[2:]})
for name in visual_spec.__all__:
    getattr(visual_spec, name)
prompts = json.loads(sys.argv[1])
for name in embedded_models():
    pipe = load_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    asked = 0 if hasattr(pipe, "label_ids") else prompts[pipe.medium]
    pipe(asked)
    print(name, pipe.last_trace.summary())
"""


def lower_bounds(pyproject: str, extras: Sequence[str] = ()) -> dict[str, str]:
    """The dependencies of pyproject.toml and of extras, each at its lower bound: {name: "name==version"}.

    Raises:
        ValueError: a dependency has no lower bound.
    """
    bounds = {}
    for requirement in _requirements(pyproject, extras):
        bound = re.match(r"([\w-]+(\[.*\])?)>=([\w.]+)", requirement)
        if bound is None:
            raise ValueError(f"{requirement!r} has no lower bound; write name>=version")
        known, version = bounds.get(bound[1], ""), f"{bound[1]}=={bound[3]}"
        bounds[bound[1]] = max(known, version, key=_numbers)  # an extra may ask for more
    return bounds


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("==")[2])]


def _requirements(pyproject: str, extras: Sequence[str]) -> list[str]:
    """What the project and its extras require, and for extras what runs the tests."""
    project = tomllib.loads(pyproject)["project"]
    optional = project["optional-dependencies"]
    runners = [one for one in optional["dev"] if re.split(r"[>=\[]", one)[0] in RUNNERS] if extras else []
    return [*project["dependencies"], *(one for name in extras for one in optional[name]), *runners]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--newest", action="store_true", help="the newest versions in place of the lowest")
    parser.add_argument("--use", nargs="+", default=[], metavar="NAME==VERSION")
    arguments = parser.parse_args()
    pyproject = (ROOT / "pyproject.toml").read_text()
    wanted = lower_bounds(pyproject, EXTRAS)
    if arguments.newest:
        wanted = {one: one for one in lower_bounds(pyproject, EXTRAS + NEW)}
    wanted |= {text.split("==")[0]: text for text in arguments.use}
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        ours = [str(ROOT), str(ROOT / "weights")]
        install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *ours, *wanted.values()]
        print("installing", *wanted.values(), flush=True)
        if subprocess.run(install, cwd=folder).returncode:
            sys.exit("these versions cannot be installed together; raise the bounds that pip names")
        # Not from the repository, whose folder would hide the installed package.
        names = [name.partition("[")[0] for name in wanted]
        if subprocess.run(
            [python, "-c", DRAW, json.dumps(PROMPTS, allow_nan=False), *names], cwd=folder
        ).returncode:
            sys.exit("the package does not work with these versions")
        tests = [
            python,
            "-m",
            "pytest",
            "-n",
            "logical",
            "--maxprocesses",
            "8",
            "--parameter-sets",
            "1",
            *TESTS,
            *(NEW_TESTS if arguments.newest else ()),
        ]
        if subprocess.run(tests, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode:
            sys.exit("the tests above fail with these versions")


if __name__ == "__main__":
    main()
