"""Files of any kind: what is read, what is refused, and what becomes of the tensors in them."""

import ast
import os
import pickle
import random
import shlex
import subprocess
import zipfile
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import AveragedModel

from tests.helpers.official import CLASS_SHAPES, random_weights
from tests.helpers.refusals import refuses
from tests.models.continuous.tiny import tiny_mar
from visual_spec.models.continuous.mar_checkpoint import load_mar_checkpoint
from visual_spec.models.core.checkpoints import check_values, fill, plain_weights, read_checkpoint


def write(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


class Bomb:
    """What unpickling would run."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def damaged(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def cut(path: Path) -> bytes:
    return path.read_bytes()[: path.stat().st_size // 2]


def test_a_truncated_file_is_told(tmp_path):
    new = write(tmp_path / "new.pt", {"model": random_weights(CLASS_SHAPES)})
    torch.save(random_weights(CLASS_SHAPES), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(random_weights(CLASS_SHAPES), tmp_path / "other.safetensors")
    for path in (new, tmp_path / "old.pt", tmp_path / "other.safetensors"):
        part = damaged(tmp_path / f"cut-{path.name}", cut(path))
        refuses(ValueError, rf"{part.name}.*truncated", read_checkpoint, part)


def test_pickles_are_refused_and_nothing_in_them_runs(tmp_path):
    touched = tmp_path / "touched"
    for path in (
        write(tmp_path / "new.pt", {"model": random_weights(CLASS_SHAPES), "other": Bomb(touched)}),
        damaged(tmp_path / "old.pkl", pickle.dumps({"model": Bomb(touched)}, protocol=2)),
    ):
        refuses(ValueError, r"pickle.*torch\.save", read_checkpoint, path)
    assert not touched.exists()


def test_other_kinds_of_files_are_named(tmp_path):
    page = damaged(tmp_path / "page.pt", b"<!DOCTYPE html><html>Sign in</html>")
    refuses(ValueError, "DOCTYPE", read_checkpoint, page)
    pointer = damaged(
        tmp_path / "lfs.pt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    refuses(ValueError, "Git LFS.*`git lfs pull`", read_checkpoint, pointer)
    refuses(ValueError, "no checkpoint", read_checkpoint, damaged(tmp_path / "empty.pt", b""))
    with zipfile.ZipFile(tmp_path / "archive.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refuses(ValueError, "PyTorch", read_checkpoint, tmp_path / "archive.pt")
    refuses(IsADirectoryError, "save_pretrained", read_checkpoint, tmp_path)
    with pytest.raises(FileNotFoundError):
        read_checkpoint(tmp_path / "nowhere.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "loss": torch.zeros(1)}, "'epoch', 'loss'"),
        ({"model": {}}, "no weights"),
        ([torch.zeros(1)], r"weights\.pt.*list"),
    ],
)
def test_files_without_weights_are_told(tmp_path, content, message):
    refuses(ValueError, message, read_checkpoint, write(tmp_path / "weights.pt", content))


def test_the_line_for_the_shell_keeps_the_name_of_the_file_to_itself(tmp_path):
    """A name may hold quotes and commands: the shell must hand it to Python as it is."""
    name = "we'ights \"$(touch ran)`touch ran`.pt"
    path = write(tmp_path / name, {"model": random_weights(CLASS_SHAPES), "other": Bomb(tmp_path / "ran")})
    with pytest.raises(ValueError, match="refused") as error:
        read_checkpoint(path)
    line = str(error.value).split("pass the new file: ")[1]
    shown = subprocess.run(
        ["sh", "-c", line.replace("python -c", "printf %s", 1)], capture_output=True, text=True
    )
    assert not (tmp_path / "ran").exists() and not Path("ran").exists()
    program = shown.stdout
    assert shlex.split(line) == ["python", "-c", program]
    strings = [node.value for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Constant)]
    assert str(path) in strings


@pytest.mark.parametrize("container", ["zip", "legacy", "safetensors"])
def test_damaged_files_are_refused_by_one_line_that_names_them(tmp_path, container):
    """Bytes changed, cut and doubled anywhere: whatever the reader stumbles over comes out as one kind of error."""
    rng = random.Random(container)
    weights = {f"layers.{i}.weight": torch.ones(2, 3) for i in range(3)}
    whole = tmp_path / "whole"
    if container == "safetensors":
        save_file(weights, whole)
    else:
        content = {"model": weights, "steps": 3, "args": {"lr": 0.1}}
        torch.save(content, whole, _use_new_zipfile_serialization=container == "zip")
    start, refused = whole.read_bytes(), 0
    path = tmp_path / "weights.pt"
    for _ in range(250):
        data = bytearray(start)
        for _ in range(rng.choice([1, 3, 20])):
            place = rng.randrange(len(data))
            data[place] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            read_checkpoint(path)
        except ValueError as error:
            refused += 1
            assert str(error).startswith(str(path)) and "\n" not in str(error)
    assert refused > 50


def test_errors_of_the_unpickler_that_are_no_unpickling_errors(tmp_path):
    """A stack that is empty, an opcode cut in half, a key that is a list."""
    for number, code in enumerate(
        [b"a.", b"J\x01", b"}(]K\x01u.", b"K\x01K\x02s.", b"]K\x01b.", b"X\xff\xff"]
    ):
        path = damaged(tmp_path / f"{number}.pt", b"\x80\x02" + code)
        refuses(ValueError, rf"{number}.pt.*truncated", read_checkpoint, path)


def test_pipes_and_devices_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    for path in (tmp_path / "pipe.pt", Path("/dev/zero")):
        refuses(ValueError, f"{path}.*regular file", read_checkpoint, path)


# -- tensors -----------------------------------------------------------------------------------------------------------


class Tiny(torch.nn.Module):
    """Holds a network under a name, as a module of Lightning or an average does."""

    def __init__(self, **networks: Any):
        super().__init__()
        for name, network in networks.items():
            self.add_module(name, network)


def wrapped_forms(network: torch.nn.Sequential) -> dict[str, Any]:
    """What tools write of a network: the classes that wrap make the keys, where they run in one process."""
    plain = network.state_dict()
    noise = {key: torch.full_like(value, 7) for key, value in plain.items()}
    average = AveragedModel(network)
    return {
        "DDP": Tiny(module=network).state_dict(),
        "compile": cast(Any, torch.compile(network)).state_dict(),
        "compile of DDP": cast(Any, torch.compile(Tiny(module=network))).state_dict(),
        "DDP of compile": Tiny(module=cast(Any, torch.compile(network))).state_dict(),
        "activation checkpoints": {key.replace(".", "._checkpoint_wrapped_module.", 1): value
                                   for key, value in plain.items()},
        "FSDP": {f"_fsdp_wrapped_module.{key}": value for key, value in plain.items()},
        "FSDP of layers": {key.replace(".", "._fsdp_wrapped_module._checkpoint_wrapped_module.", 1): value
                           for key, value in plain.items()},
        "Lightning": {"state_dict": Tiny(model=cast(Any, torch.compile(network))).state_dict(), "epoch": 3},
        "torch's average": average.state_dict(),
        "Lightning and average": {"state_dict": Tiny(net=average.module).state_dict()},
        "ema_pytorch": {"model": {**Tiny(online_model=network).state_dict(), **{
            f"online_model.{key}": value for key, value in noise.items()}, "initted": torch.tensor(True),
            **Tiny(ema_model=network).state_dict(), "step": torch.tensor(3)}},
        "average alone": {"ema": Tiny(module=network).state_dict(), "decay": 0.99},
    }  # fmt: skip


def test_what_wrappers_add_to_keys_is_left_out_for_every_reader(tmp_path):
    network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    plain = network.state_dict()
    for name, content in wrapped_forms(network).items():
        found = read_checkpoint(write(tmp_path / "w.pt", content)).weights
        assert found.keys() == plain.keys(), name
        assert all(torch.equal(found[key], value) for key, value in plain.items()), name
    # A family that looks for a container of its own has its weights so, too.
    model = tiny_mar()
    averaged = AveragedModel(cast(Any, torch.compile(model))).state_dict()
    assert all(key == "n_averaged" or key.startswith("module._orig_mod.") for key in averaged)
    write(tmp_path / "mar.pth", {"model": {"module.mask_token": torch.zeros(1)}, "model_ema": averaged})
    found = load_mar_checkpoint(tmp_path / "mar.pth", num_heads=2).state_dict()
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())


def test_views_that_are_negated_or_conjugated_are_read_as_their_values(tmp_path):
    """A file of safetensors holds what lies in memory, which such a view has with another sign."""
    pair = torch.randn(3, 4, dtype=torch.complex64)
    for view in (pair.conj().imag.T, pair.conj().imag, pair.conj().imag[:, :2]):
        assert view.is_neg()
        found = plain_weights({"a": view}, "a state dict")
        save_file(found, tmp_path / "a.safetensors")
        assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], view.clone() * 1)


def test_prefixes_of_wrappers_are_left_out(tmp_path):
    plain = {"blocks.0.weight": torch.ones(2), "module.bias": torch.zeros(1)}
    # A compiled layer inside; and a prefix that not all keys have is part of a name.
    compiled = {"blocks.0._orig_mod.weight": torch.ones(2), "module.bias": torch.zeros(1)}
    assert read_checkpoint(write(tmp_path / "w.pt", compiled)).weights.keys() == plain.keys()
    twice = {**plain, "blocks.0._orig_mod.weight": torch.ones(2)}
    refuses(ValueError, r"w\.pt.*blocks\.0", read_checkpoint, write(tmp_path / "w.pt", twice))


def test_weights_of_the_training_of_var_are_found(tmp_path):
    weights = {"pos_start": torch.ones(1, 1, 4)}
    path = write(
        tmp_path / "ar-ckpt-last.pth", {"epoch": 3, "trainer": {"config": {}, "var_wo_ddp": weights}}
    )
    assert read_checkpoint(path).weights.keys() == weights.keys()


def test_tensors_that_share_memory_are_told_apart(tmp_path):
    table = torch.arange(6.0).reshape(2, 3)
    content = {
        "embed": table,
        "head": table,
        "row": table[1],
        "wide": torch.ones(1, 3).expand(2, 3),
        "t": table.T,
    }
    found = read_checkpoint(write(tmp_path / "tied.pt", content)).weights
    assert all(torch.equal(found[key], value) for key, value in content.items())
    places = [tensor.untyped_storage().data_ptr() for tensor in found.values()]
    assert len(set(places)) == len(places) and all(tensor.is_contiguous() for tensor in found.values())
    save_file(found, tmp_path / "apart.safetensors")


STRANGE = {
    "sparse": (torch.eye(3).to_sparse(), r"embed is sparse \(torch.sparse_coo\)"),
    "quantised": (
        torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
        r"embed is quantised \(torch.qint8\)",
    ),
    "meta": (torch.eye(3, device="meta"), "meta tensors: embed"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STRANGE)
def test_tensors_without_dense_values_are_named(tmp_path, name):
    tensor, message = STRANGE[name]
    with pytest.raises(ValueError, match=f"w.pt.*{message}|w.pt.*damaged"):
        read_checkpoint(write(tmp_path / "w.pt", {"embed": tensor}))


def test_keys_that_are_no_strings_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"w\.pt.*\(3, None\)"):
        read_checkpoint(
            write(tmp_path / "w.pt", {"model": {"a": torch.ones(1), 3: torch.ones(1), None: torch.ones(1)}})
        )


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_weights_of_other_dtypes_are_not_cast_silently(dtype):
    with pytest.raises(ValueError, match=f"head.*{dtype}.*float16, bfloat16, float32"):
        check_values({"body": torch.ones(2), "head": torch.ones(2).to(dtype)}, "file")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weights_that_are_not_finite_are_counted(bad, dtype):
    values = torch.full((5, 7), torch.finfo(dtype).max, dtype=dtype)  # whose sum overflows
    check_values({"head": values}, "file")
    values[2, 3] = values[0, 1] = bad
    refuses(ValueError, "2.*35.*nan", check_values, {"head": values}, "file")


def test_a_model_is_filled_whole_or_not_at_all():
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    weights = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    for wrong, message in [
        ({"bias": None}, "Linear: 1"),
        ({"more": torch.ones(1)}, "1 unexpected: more"),
        ({"bias": torch.ones(3)}, r"1.*bias \[3\].*\[2\]"),
        ({"bias": torch.full((2,), torch.nan)}, "file.*2.*2"),
        ({"zero": torch.ones(4)}, "zero.*constant"),
        ({"zero": torch.zeros(3)}, r"1.*zero \[3\].*\[4\]"),
    ]:
        given = {key: value for key, value in {**weights, **wrong}.items() if value is not None}
        refuses(ValueError, message, fill, model, given, "file", constants={"zero": torch.zeros(4)})
        assert model.weight.is_meta
    filled = fill(model, {**weights, "zero": torch.zeros(4)}, "file", constants={"zero": torch.zeros(4)})
    assert torch.equal(filled(torch.ones(1, 3)), torch.full((1, 2), 4.0)) and not filled.training
    assert fill(model, weights, "file", dtype=torch.bfloat16).weight.dtype == torch.bfloat16


def test_weights_that_repeat_their_numbers_are_refused_before_they_are_copied(tmp_path):
    """A file of 1 KB that says 1e10 numbers."""
    torch.save({"model": {"a": torch.ones(1).expand(10**10), "b": torch.ones(2)}}, tmp_path / "bomb.pt")
    assert (tmp_path / "bomb.pt").stat().st_size < 10_000
    refuses(ValueError, r"a \[10000000000\] repeats", read_checkpoint, tmp_path / "bomb.pt")
    large = torch.ones(3, 5)
    torch.save({"model": {"a": large, "tied": large, "row": large[0]}}, tmp_path / "tied.pt")
    assert torch.equal(read_checkpoint(tmp_path / "tied.pt").weights["tied"], large)
