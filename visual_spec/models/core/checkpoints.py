"""Official checkpoint files of any family: read them without running code in them, and account for every tensor.

Files are read with `torch.load(weights_only=True)` only, memory-mapped if their format allows it. Each model's module
documents the meaning of its keys.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import shlex
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from visual_spec.files.documents import json_text
from visual_spec.models.core.offload import align_weights
from visual_spec.models.core.saved import FLOATING, Difference, check_finite, short_name, some

# Keys under which the weights are stored: DDP training uses "model", DeepSpeed "module", Lightning "state_dict", FSDP a
# bare dict, Infinity's tokenizers "vae", VAR's training "trainer" with "var_wo_ddp" in it, its students' the averaged
# "ema_parameters" too, and Self-Forcing "generator_ema", beside which "generator" is the last step of training, and
# LongLive's LoRA "generator_lora". Averages are read where there is nothing else, unless the family's reader asks.
_CONTAINERS = (
    ("generator_ema",),
    ("generator",),
    ("generator_lora",),
    ("model",),
    ("model_state_dict",),
    ("module",),
    ("state_dict",),
    ("vae",),
    ("trainer", "ema_parameters"),
    ("trainer", "var_wo_ddp"),
    ("var_wo_ddp",),
    *((name,) for name in ("model_ema", "ema", "ema_model", "ema_state_dict", "state_dict_ema")),
)

# Parts of keys that name no part of the model: torch.compile, FSDP, activation checkpoints and Lightning Fabric wrap
# any module. Before all keys stands the name under which DDP, Lightning or a class of averages holds the model.
_WRAPPERS = {
    "_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_forward_module",
}  # fmt: skip
_HOLDERS = ("module", "model", "net", "network", "ema", "ema_model")


# A file may say a number several times (tied weights), but not this often.
_MOST_SAID, _FREE_BYTES = 8, 2**26

M = TypeVar("M", bound=nn.Module)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Checkpoint:
    """The content of a file.

    Attributes:
        path: path of the file.
        weights: tensors by official key.
        arguments: the training run's, if the file holds them.
    """

    path: Path
    weights: dict[str, Tensor]
    arguments: dict[str, Any] = field(default_factory=dict)


Source = str | os.PathLike | Checkpoint


# -- reading ----------------------------------------------------------------------------------------------------------


def read_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """Read a file without running any code in it.

    What training wrappers (DDP, FSDP, torch.compile, Lightning, averages) add to keys is removed.

    Args:
        path: a `torch.save` file (`.pt`, `.pth`, `.bin`) or a safetensors file, with official keys.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: the file is of another kind, damaged, needs pickle, or holds no plain weights; the message says
            what it is and what to do.
    """
    path = Path(path)
    return unpack_checkpoint(path, read_content(path))


_KEEP = '{"model": c["model"]}'


def read_content(path: Path, keep: str = _KEEP) -> Any:
    """Return the content of a file without running any code in it; dicts of tensors with bare keys (`bare_keys`).

    Args:
        keep: Python expression for the part of the content `c` to save again, shown if the file needs pickle.

    Raises:
        FileNotFoundError, IsADirectoryError, ValueError: as in `read_checkpoint`, but any content is accepted.
    """
    return _unwrapped(_content(path, keep), str(path))


def _unwrapped(content: object, name: str) -> object:
    if not isinstance(content, Mapping):
        return content
    return bare_keys({key: _unwrapped(value, name) for key, value in content.items()}, name)


def _content(path: Path, keep: str) -> object:
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a folder; name the checkpoint file in it, or load a folder that save_pretrained wrote with "
            "from_pretrained."
        )
    if path.exists() and not path.is_file():
        # Opening a FIFO would wait for a writer, and a device may never end.
        raise ValueError(
            f"{path} is no regular file, but a pipe, a socket or a device; copy it to a file first."
        )
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder.")
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return _load_safetensors(path)
    if start.startswith((b"PK\x03\x04", b"\x80")):
        return _load_torch(path, start.startswith(b"PK"), keep)
    raise ValueError(
        f"{path} is no checkpoint: it begins with {start[:12]!r}, and neither torch.save nor safetensors writes "
        "that. Pass an official .pt or .pth file; if this one was downloaded, look at it: it may be a web page."
    )


def write_content(path: Path, content: Mapping[str, object]) -> None:
    """Write tensors and plain values as `read_written` reads them; an error or a kill leaves `path` as it was."""
    from visual_spec.files.whole import whole_file

    with whole_file(path) as part, part.open("wb") as file:  # a path's name would get into the file
        torch.save(dict(content), file)


def read_written(path: Path) -> Any:
    """What `write_content` wrote, where every checksum in the file is right.

    Raises:
        ValueError: the file is damaged; names it.
        FileNotFoundError, IsADirectoryError, ValueError: as of `read_content`.
    """
    if path.is_file() and zipfile.is_zipfile(path):  # what is no archive any more `read_content` refuses
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except Exception as error:  # a damaged directory can raise any error
            damaged = str(error) or type(error).__name__
        if damaged is not None:
            raise ValueError(f"{path} is damaged ({damaged}: wrong checksum); remove it, or copy it again.")
    return _content(path, _KEEP)


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # a damaged header can raise any error
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(f"{path} is truncated or damaged ({reason}); copy or download it again.") from error


def _load_torch(path: Path, mapped: bool, keep: str) -> object:
    try:
        # Training runs save their argparse.Namespace beside the weights: plain attributes, no code.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    # Reading a damaged file can raise anything: IndexError, struct.error, TypeError, MemoryError ...
    except Exception as error:
        reason = " ".join(str(error).split())
        asked = re.search(r"(?:Unsupported global: GLOBAL|Unsupported class|GLOBAL) ([\w.]+)", reason)
        if isinstance(error, pickle.UnpicklingError) and (asked or "Unsupported operand" in reason):
            what = f"the Python object {asked[1]}" if asked else "Python objects other than tensors"
            # Double quotes inside, because the shell command uses single ones.
            literal = json_text(str(path), ensure_ascii=False)
            program = (
                f'import torch; c = torch.load({literal}, map_location="cpu", weights_only=False); '
                f'torch.save({keep}, "weights.pt")'
            )
            raise ValueError(
                f"{path} holds {what}, so reading it would need pickle, which can run any code; it is refused. If you "
                "trust where it comes from, save its tensors alone, and pass the new file: "
                f"python -c {shlex.quote(program)}"
            ) from error
        shown = reason[:160].strip() or type(error).__name__
        raise ValueError(
            f"{path} is truncated or damaged, or no PyTorch checkpoint ({shown}); compare its size with "
            "the original's, and copy or download it again."
        ) from error


def read_by(
    source: Source, unpack: Callable[[Path, object], Checkpoint | None], keep: str = _KEEP
) -> Checkpoint:
    """Return what `unpack` finds in a file, else what `unpack_checkpoint` does; a checkpoint as it is.

    Args:
        unpack: given path and content, the weights of its kind of file, or None.
        keep: as for `read_content`.

    Raises:
        ValueError, OSError: as in `read_content` and `unpack_checkpoint`.
    """
    if isinstance(source, Checkpoint):
        return source
    path = Path(source)
    content = read_content(path, keep)
    return unpack(path, content) or unpack_checkpoint(path, content)


def unpack_checkpoint(path: Path, content: object) -> Checkpoint:
    """Return the weights in the content of a file (`read_content`), and the arguments of the training run.

    Raises:
        ValueError: the content holds no plain weights.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}; pass a file with a dict of weights.")
    inner = next((held for place in _CONTAINERS if (held := _at(content, place)) is not None), content)
    tensors = {key: value for key, value in inner.items() if isinstance(value, Tensor)}
    if not tensors or (inner is content and len(tensors) < len(inner)):
        names = ", ".join(repr(".".join(place)) for place in _CONTAINERS)
        raise ValueError(
            f"{path} holds no weights: neither a dict of tensors under {names}, nor one by itself, but "
            f"{some(map(repr, content))}."
        )
    if empty := [key for key, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(
            f"{path} holds shapes without values (meta tensors: {some(empty)}); save a filled model."
        )
    arguments = content.get("args") if inner is not content else None
    return Checkpoint(
        path=path,
        weights=plain_weights(tensors, str(path)),
        arguments=vars(arguments) if isinstance(arguments, argparse.Namespace) else {},
    )


def _at(content: Any, place: tuple[str, ...]) -> Mapping | None:
    """The dict at a place, if there are tensors in it."""
    for name in place:
        content = content.get(name) if isinstance(content, Mapping) else None
    held = isinstance(content, Mapping) and any(isinstance(value, Tensor) for value in content.values())
    return content if held else None


# -- weights ----------------------------------------------------------------------------------------------------------


def bare_key(key: str) -> str:
    """A key without the names of what wraps single modules."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def bare_keys(tensors: Mapping[Any, Value], name: str) -> dict[Any, Value]:
    """Return a state dict, with other entries of its file if there are any, without what wrappers add to keys.

    Of a model beside its average by `ema_pytorch` the average stays.

    Raises:
        ValueError: two keys are equal without it; the message names them.
    """
    if not all(isinstance(key, str) for key in tensors):
        return dict(tensors)
    averaged = all(any(key.startswith(f"{one}_model.") for key in tensors) for one in ("online", "ema"))
    left = [key for key in tensors if key != "n_averaged"]  # torch's AveragedModel counts
    bare = {key: bare_key(key) for key in left if key.startswith("ema_model.") or not averaged}
    while holder := next((one for one in _HOLDERS if _all_in(bare.values(), f"{one}.")), ""):
        bare = {key: plain.removeprefix(f"{holder}.") for key, plain in bare.items()}
    keys: dict[str, str] = {}
    for key, plain in bare.items():
        if keys.setdefault(plain, key) != key:
            raise ValueError(f"{name} has {plain} twice, once as {key}; pass a file with one set of weights.")
    return {plain: tensors[key] for plain, key in keys.items()}


def _all_in(keys: Collection[str], start: str) -> bool:
    return bool(keys) and all(key.startswith(start) for key in keys)


def plain_weights(tensors: Mapping[Any, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors of a state dict in our form: with bare keys, dense, each with its own memory.

    Args:
        tensors: as read; not changed.
        name: name of their source, for errors.

    Raises:
        ValueError: a key is not a string, two keys are equal without wrapper prefixes, or a tensor has no dense values;
            the message names them.
    """
    strange = [key for key in tensors if not isinstance(key, str)]
    if strange:
        raise ValueError(
            f"{name} has keys that are no strings ({some(map(repr, strange))}); pass a state dict, as state_dict() "
            "of a model makes it."
        )
    weights: dict[str, Tensor] = {}
    for key, tensor in bare_keys(tensors, name).items():
        if tensor.is_quantized or tensor.layout != torch.strided:
            kind = f"quantised ({tensor.dtype})" if tensor.is_quantized else f"sparse ({tensor.layout})"
            raise ValueError(
                f"{name}: {key} is {kind}; save the model with dense weights of one floating dtype, and pass that file."
            )
        weights[key] = tensor.detach()
    _refuse_expanded(weights, name)
    return _untied(weights)


def _refuse_expanded(weights: Mapping[str, Tensor], name: str) -> None:
    """Refuse tensors that say far more numbers than are stored, before any of them is copied."""
    stored = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in weights.values()
    }
    said = sum(tensor.numel() * tensor.itemsize for tensor in weights.values() if not tensor.is_meta)
    if said > _MOST_SAID * sum(stored.values()) + _FREE_BYTES:
        key = max(weights, key=lambda key: weights[key].numel())
        raise ValueError(
            f"{name} stores {sum(stored.values())} bytes for weights of {said}: {key} {list(weights[key].shape)} "
            "repeats its numbers; save dense weights, each stored in full."
        )


def _untied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory with others, or with themselves: a saved model could not tell them apart."""
    owners: dict[int, int] = {}
    for tensor in weights.values():
        place = tensor.untyped_storage().data_ptr()
        owners[place] = owners.get(place, 0) + 1
    return {
        key: tensor
        if owners[tensor.untyped_storage().data_ptr()] == 1
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
        else tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        for key, tensor in weights.items()
    }


def check_values(weights: Mapping[str, Tensor], name: str, source: str = "the original") -> None:
    """Refuse weights that are not of a floating dtype of at least 16 bits, or not finite, by ValueError.

    For weights on the meta device only the dtype is checked.

    Args:
        weights: by key.
        name: name of their source, for errors.
        source: what the message suggests instead.
    """
    for key, tensor in weights.items():
        if tensor.dtype not in FLOATING:
            raise ValueError(
                f"{name}: {key} is of {tensor.dtype}; weights are of {', '.join(map(short_name, FLOATING))}. "
                f"Nothing is cast without being asked; take {source}, or convert it yourself."
            )
    check_finite(weights, name, source)


def fill(
    model: M,
    weights: Mapping[str, Tensor],
    name: str,
    *,
    what: str = "",
    constants: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> M:
    """Give a model that was built on the meta device its weights. They stay mapped to the file unless cast,
    or copied because they share memory or stand at odd addresses (`align_weights`).

    Args:
        weights: exactly the model's state dict, except constants.
        name: name of their source, for errors.
        what: name of what they should fit, for errors; the model's class if empty.
        constants: buffers of official files that the model computes itself. They may be missing but not differ.
        dtype: to cast the weights to; None keeps theirs.

    Raises:
        ValueError: keys are missing, unexpected or mis-shaped (the message lists them), or a constant has another
            value; also as in `check_values`.
    """
    constants = {key: value for key, value in (constants or {}).items() if key in weights}
    shapes = shapes_of(model) | {key: tuple(value.shape) for key, value in constants.items()}
    if difference := Difference.between(weights, shapes):
        raise ValueError(f"{name} does not fit {what or type(model).__name__}: {difference}.")
    for key, constant in constants.items():
        stored = weights[key]
        if not stored.is_meta and not torch.equal(stored.double(), constant.double()):
            raise ValueError(
                f"{name}: {key} is a constant, and has other values than this library computes with; pass the "
                "official file."
            )
    weights = {key: value for key, value in weights.items() if key not in constants}
    check_values(weights, name)
    model.load_state_dict(_untied(weights), assign=True)
    assert not any(buffer.is_meta for key, buffer in model.named_buffers() if key not in weights)
    if dtype is not None:
        nn.Module.to(model, dtype)  # diffusers' own would warn about an empty list of modules
    align_weights(model)
    return model.eval()


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every key of a model."""
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}
