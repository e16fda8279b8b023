"""Install visual_spec with the lowest versions that pyproject.toml allows, and generate with every embedded model.

    python scripts/lower_bounds.py
    python scripts/lower_bounds.py --use torch==2.13.0+cpu    another version in place of a lower bound

A virtual environment is made in a temporary folder and removed afterwards. It needs a package index, and with a CUDA
build of torch about 6 GB.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
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


def lower_bounds(pyproject: str) -> dict[str, str]:
    """The dependencies of pyproject.toml, each at its lower bound: {name: "name==version"}.

    Raises:
        ValueError: a dependency has no lower bound.
    """
    bounds = {}
    for requirement in tomllib.loads(pyproject)["project"]["dependencies"]:
        bound = re.match(r"([\w-]+)(\[.*\])?>=([\w.]+)", requirement)
        if bound is None:
            raise ValueError(f"{requirement!r} has no lower bound; write name>=version")
        bounds[bound[1]] = f"{bound[1]}=={bound[3]}"
    return bounds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--use", nargs="+", default=[], metavar="NAME==VERSION")
    arguments = parser.parse_args()
    wanted = lower_bounds((ROOT / "pyproject.toml").read_text())
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
        draw = [python, "-c", DRAW, json.dumps(PROMPTS), *wanted]
        if subprocess.run(draw, cwd=folder).returncode:
            sys.exit("the package does not work with these versions")


if __name__ == "__main__":
    main()
