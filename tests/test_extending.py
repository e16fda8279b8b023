"""docs/EXTENDING.md as it stands: a package of samplers, a rule and a family; a model one class, a metric one entry."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "EXTENDING.md").read_text()
SAMPLER, SAMPLERS, RULE, MODEL, USE, SAVED, FAMILIES, STATISTIC, ANY_ORDER = re.findall(
    r"```python\n(.*?)```", PAGE, flags=re.S
)
(ENTRY_POINTS,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.S)
(METRIC_ENTRY,) = (
    re.sub(r"^\+", "", text, flags=re.M).rstrip()
    for text in re.findall(r"```diff\n(.*?)```", PAGE, flags=re.S)
)

# What a newcomer does with the new sampler, the new family and the new metric, in one process.
START = """
import contextlib, io, json, sys
from pathlib import Path
import numpy as np
import torch
from PIL import Image
torch.set_num_threads(1)
import visual_spec
from visual_spec.cli import main
from mine.copies import CopySampler

assert Path(visual_spec.__file__).is_relative_to(Path.cwd()), visual_spec.__file__

def run(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(list(arguments))
    assert status == 0, (arguments, out.getvalue())
    return out.getvalue()
"""


NEW_SAMPLER = """
sampler = CopySampler(4)
assert visual_spec.CopySampler is CopySampler

assert "CopySampler" in run("models")
prompt = "a large red circle on a plain sky background"
out = run("generate", prompt, "--sampler", "copies:num_drafts=4", "--compare", "--out", "pictures", "--json")
found = json.loads(out.splitlines()[-1])
assert found["sampler"] == {"name": "copies", "num_drafts": 4, "acceptance": "identical"}
assert found["comparison"][0]["identical"] and found["comparison"][0]["calls"] < 256
curve = run("bench", "--curve", "--samplers", "copies", "--guidance-scales", "1", "--prompts", "1")
assert "copies" in curve
sizes = "--samples", "4", "--batch-size", "1", "--alone", "0"
run("eval", "--samplers", "copies", "--controls", "--out", "quality", *sizes)
assert any("copies" in path.name for path in Path("quality").iterdir())

pipe = visual_spec.ImagePipeline.from_pretrained("shapes")
pipe.sampler = sampler
pipe.save_pretrained("saved")
loaded = visual_spec.ImagePipeline.from_pretrained("saved").sampler
assert type(loaded) is CopySampler and loaded.config["num_drafts"] == 4
assert visual_spec.accelerate(pipe, "copies").sampler.config["num_drafts"] == 8

out = run("generate", prompt, "--sampler", "near-copies:share=0.9", "--compare", "--out", "near", "--json")
found = json.loads(out.splitlines()[-1])["comparison"][0]
assert "lossy, measured divergence" in found["output_law"] and found["calls"] < 256

# Registered by nobody: by its path, and from a folder once it is imported.
Path("theirs.py").write_text("import mine.copies\\nclass TheirSampler(mine.copies.CopySampler): pass")
out = run("generate", prompt, "--sampler", "theirs:TheirSampler:num_drafts=3", "--compare", "--out", "own", "--json")
found = json.loads(out.splitlines()[-1])
assert found["sampler"]["num_drafts"] == 3 and found["comparison"][0]["identical"]
from theirs import TheirSampler
pipe.sampler = TheirSampler(5)
pipe.save_pretrained("own_saved")
assert visual_spec.ImagePipeline.from_pretrained("own_saved").sampler.config["num_drafts"] == 5

from tests.exactness.test_every_sampler import enumerated, total_variation
from visual_spec.samplers import registry

found, law = enumerated(registry.by_name("copies"))
assert total_variation(found.law, law) < 1e-10
"""


FAMILY = """
from tests.helpers.tiny import tiny_vq_model
from visual_spec.eval.defaults import settings_of_model
from mine.recurrent import RecurrentTransformer
from visual_spec.pipelines.embedded import describe
from visual_spec.pipelines.loading import load_pipeline, read_family

assert "Recurrent" in run("models")
torch.manual_seed(0)
official = RecurrentTransformer(dim=24).eval()
torch.save(official.state_dict(), "recurrent.pt")
run("convert", "recurrent.pt", "--out", "model")
converted = RecurrentTransformer.from_pretrained("model").state_dict()
assert all(torch.equal(converted[name], weight) for name, weight in official.state_dict().items())
torch.save({**official.state_dict(), "other": torch.zeros(1)}, "wrong.pt")
assert main(["convert", "wrong.pt", "--out", "wrong"]) == 2
tokenizer = tiny_vq_model(codebook_size=16, image_size=16)
sampler = visual_spec.AutoregressiveSampler()
visual_spec.ClassImagePipeline(RecurrentTransformer().eval(), tokenizer, sampler).save_pretrained("folder")
pipe = load_pipeline("folder")
assert type(pipe.transformer) is RecurrentTransformer and pipe.calls == ("raster",)
assert describe(visual_spec.pipelines.embedded.Path("folder"))["calls"] == ("raster",)
assert read_family("folder").name == "Recurrent" and pipe.fast_sampler == "speculative-jacobi"
assert settings_of_model("folder").plain == "autoregressive"
pipe("2", generator=torch.Generator().manual_seed(0))
out = run("generate", "0", "2", "--model", "folder", "--compare", "--out", "recurrent", "--json")
rows = json.loads(out.splitlines()[-1])["comparison"]
assert all(row["identical"] for row in rows) and len(rows) == 2
"""


METRIC = """
from visual_spec.eval.quality.features import features_of, load_shapes_features

rng, pictures = np.random.default_rng(0), {}
for name, count in (("drawn", 4), ("true", 6)):
    Path(name).mkdir()
    pictures[name] = rng.integers(0, 256, (count, 128, 128, 3), np.uint8)
    for index, pixels in enumerate(pictures[name]):
        Image.fromarray(pixels).save(Path(name, f"{index}.png"))
out = run("score", "drawn", "--reference", "true", "--metrics", "centre", "--json")
(figure,) = [one for name, one in json.loads(out.splitlines()[-1])["figures"].items() if name == "centre"]
network = load_shapes_features()
drawn, true = (features_of(network, pictures[name]) for name in ("drawn", "true"))
apart = (drawn.double() - true.double().mean(0)).square().sum(1).sqrt()
reach = 1.959964 * apart.std() / 2
wanted = [apart.mean(), apart.mean() - reach, apart.mean() + reach]
assert np.allclose([figure[name] for name in ("value", "low", "high")], wanted, rtol=1e-4), (figure, wanted)
assert figure["samples"] == 4 and figure["reference_samples"] == 6 and figure["interval"] == "normal law"
"""


def add_entry(file: Path, table: str, entry: str) -> None:
    """Add an entry at the end of a table of the package."""
    text = file.read_text()
    start = re.search(rf"^{table}\b.* = [({{]$", text, flags=re.M)
    assert start is not None
    end = re.compile(r"^[)}]$", flags=re.M).search(text, start.end()).start() - 1  # pyright: ignore
    file.write_text(f"{text[:end]}\n{entry}{text[end:]}")


def install(folder: Path) -> None:
    """The package `mine` of the page, as pip would leave it in a folder of packages."""
    package, facts = folder / "mine", folder / "mine-1.0.dist-info"
    package.mkdir()
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    points = re.sub(r'project\.entry-points\.|"', "", ENTRY_POINTS)  # as setuptools writes them
    (facts / "entry_points.txt").write_text(points)
    (package / "__init__.py").touch()
    (package / "copies.py").write_text(SAMPLER)
    (package / "rules.py").write_text(RULE)
    (package / "recurrent.py").write_text(f"{MODEL}\n\n{SAVED}")
    (package / "table.py").write_text(f"{SAMPLERS}\n\n{FAMILIES}")


@pytest.mark.slow
def test_a_package_brings_a_sampler_a_rule_and_a_family_and_a_metric_is_one_entry(tmp_path):
    install(tmp_path)
    package = tmp_path / "visual_spec"
    shutil.copytree(ROOT / "visual_spec", package)  # with what is compiled
    (tmp_path / "weights").symlink_to(ROOT / "weights")
    assert len(SAMPLER.strip().splitlines()) <= 60
    statistics = package / "eval" / "quality" / "statistics.py"
    statistics.write_text(f"{statistics.read_text()}\n\n{STATISTIC}")
    add_entry(package / "eval" / "quality" / "metric_table.py", "METRICS", METRIC_ENTRY)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1"}
    code = START + NEW_SAMPLER + FAMILY + METRIC
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_new_model_decodes_with_every_next_token_sampler():
    names: dict = {}
    exec(compile(MODEL, "EXTENDING.md", "exec"), names)  # dataclasses look their module up by name
    torch.manual_seed(0)
    exec(compile(USE, "EXTENDING.md", "exec"), names)  # asserts the same tokens
    copies: dict = {}
    exec(compile(SAMPLER, "EXTENDING.md", "exec"), copies)
    request = dict(law=names["TokenLaw"](guidance_scale=2.0), batch_size=2)
    for acceptance in ("identical", "exact"):
        generator = torch.Generator().manual_seed(0)
        sampler = copies["CopySampler"](4, acceptance)
        found = sampler(names["model"], names["classes"], generator=generator, **request)
        assert torch.equal(found.tokens, names["plain"].tokens) or acceptance == "exact"
        assert found.trace.identical == (acceptance == "identical") and found.trace.lossless


def test_a_new_any_order_model_is_decoded():
    """The page asserts the same tokens; the model also differs by class and knows what it was fed."""
    names: dict = {}
    torch.manual_seed(0)
    exec(compile(ANY_ORDER, "EXTENDING.md", "exec"), names)
    trace = names["fast"].trace
    assert trace.identical and trace.target_calls.sum() < 32
    order = list(range(15, -1, -1))
    found = [
        names["AnyOrderSampler"](order)(
            names["model"], torch.tensor([label]), law=names["TokenLaw"](temperature=0.0)
        ).tokens
        for label in range(3)
    ]
    assert len({tuple(tokens[0].tolist()) for tokens in found}) == 3
