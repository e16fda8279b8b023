"""Weights are moved to aligned memory: which ones, what they go on sharing, and how much memory that takes."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.helpers.odd_addresses import ODD, misplaced, put_at_odd_addresses
from tests.helpers.tiny import tiny_transformer
from visual_spec.models.core.checkpoints import fill, read_checkpoint
from visual_spec.models.core.offload import align_weights
from visual_spec.models.next_token.llamagen import LlamaGenTransformer


class Kept(Tensor):
    """A class of its own, as quantised and sharded weights have."""


def from_file(folder, **weights: Tensor) -> dict[str, Tensor]:
    """These weights mapped from a file, the first of them at an odd address."""
    save_file(weights, folder / "weights.safetensors")
    put_at_odd_addresses(folder)
    return load_file(folder / "weights.safetensors")


def test_what_is_tied_stays_tied_and_what_stands_well_stays_mapped(tmp_path):
    values = torch.arange(32.0)
    weights = from_file(tmp_path, first=values[:8], second=values[8:14], third=values[14:])
    assert [value.data_ptr() % 64 for value in weights.values()] == [ODD, 8, ODD - 8]
    model: Any = nn.Module()
    model.first = nn.Parameter(weights["first"])
    model.tied = model.first
    model.part = nn.Parameter(weights["first"][3:6])
    model.register_buffer("second", weights["second"].view(3, 2).T)
    model.register_buffer("well", weights["third"][8:])  # 32 bytes on: at a multiple of 64
    model.register_buffer("inner", torch.arange(40.0)[1:9])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first, well = model.first, model.well.data_ptr()
    assert sorted(misplaced(model)) == ["first", "inner", "part", "second"] and well % 64 == 0
    align_weights(model)
    assert misplaced(model) == ["part"]  # three numbers after `first`, of which it is a part
    assert model.first is first is model.tied and model.well.data_ptr() == well
    assert model.second.stride() == (1, 2)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        model.first[4] = -1
    assert model.part[1] == -1 and first.requires_grad


def test_weights_without_values_or_of_a_class_of_their_own_are_left_alone(tmp_path):
    weights = from_file(tmp_path, one=torch.ones(7), two=torch.ones(5))
    model: Any = nn.Module()
    model.meta = nn.Parameter(torch.empty(3, device="meta"))
    model.register_buffer("own", weights["one"].as_subclass(Kept))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("empty", torch.empty(0))
    places = {key: value.data_ptr() for key, value in model.named_buffers() if key != "sparse"}
    align_weights(model)
    assert model.meta.is_meta and type(model.own) is Kept and model.sparse.is_sparse
    assert {key: value.data_ptr() for key, value in model.named_buffers() if key != "sparse"} == places
    assert places["own"] % 64 == ODD


def test_a_model_of_an_official_file_owns_aligned_memory(tmp_path):
    """Official files are mapped, too, and several weights may be parts of one of theirs."""
    fused = torch.randn(9, 3)
    save_file({"fused": fused, "bias": torch.randn(3)}, tmp_path / "official.safetensors")
    put_at_odd_addresses(tmp_path)
    weights = read_checkpoint(tmp_path / "official.safetensors").weights
    with torch.device("meta"):
        model = nn.ModuleDict({"q": nn.Linear(3, 3), "k": nn.Linear(3, 3), "v": nn.Linear(3, 3)})
    q, k, v = weights["fused"].chunk(3)
    biases = {f"{name}.bias": weights["bias"] for name in "qkv"}
    fill(model, {"q.weight": q, "k.weight": k, "v.weight": v, **biases}, "official")
    assert misplaced(model) == []
    assert torch.equal(torch.cat([model[name].weight for name in "qkv"]), fused)  # pyright: ignore
    assert len({value.data_ptr() for value in model.state_dict().values()}) == 6


@pytest.mark.parametrize("size", ["whole", "shards"])
def test_every_load_of_a_folder_computes_what_the_saved_model_does(size, tmp_path):
    saved = tiny_transformer().double()
    saved.save_pretrained(tmp_path, **({} if size == "whole" else {"max_shard_size": "20KB"}))
    assert put_at_odd_addresses(tmp_path) > (size == "shards")
    loads: Any = [LlamaGenTransformer.from_pretrained(tmp_path, torch_dtype=torch.float64) for _ in range(2)]
    assert misplaced(*loads) == []
    x = torch.randn(5, saved.config["dim"]).double()
    for name, layer in saved.named_modules():
        if isinstance(layer, nn.Linear) and layer.in_features == x.shape[1]:
            assert all(torch.equal(load.get_submodule(name)(x), layer(x)) for load in loads)


# The file is mapped, so its pages count as resident while they are read, but the system may drop them: what has to fit
# is memory without a file.
PEAK = """
import sys, threading, torch
from visual_spec.models.core.checkpoints import fill, read_checkpoint

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

peak, working = 0, True
def watch():
    global peak
    while working:
        peak = max(peak, resident())

with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(32)])
before = resident()
thread = threading.Thread(target=watch)
thread.start()
fill(model, read_checkpoint(sys.argv[1]).weights, "file")
working = False
thread.join()
print((peak - before) / 2**27, sum(w.data_ptr() % 64 for w in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_aligning_takes_the_memory_of_one_model(tmp_path):
    # 2**27 bytes
    weights = {f"{layer}.weight": torch.full((1024, 1024), float(layer)) for layer in range(32)}
    save_file(weights, tmp_path / "weights.safetensors")
    put_at_odd_addresses(tmp_path)
    told = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "weights.safetensors")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    share, misplaced = map(float, told.split())
    assert 0.9 < share < 1.2 and misplaced == 0
