"""Checks of folders written by `save_pretrained`, made when they are loaded.

diffusers fills in a missing weight at random or leaves it out, drops an unknown one, and casts any dtype, all without
an error. A damaged folder would then draw wrong pictures.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self, cast

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models.modeling_utils import ModelMixin
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from visual_spec.files.reading import read_object
from visual_spec.models.core.offload import align_weights

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Names of dtypes in safetensors files.
_FLOATING = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_OTHERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_OTHERS |= {
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}

# What a config.json of transformers may name as `stored_as`.
_EIGHT_BITS = {"float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}
_DIRECTION = "parametrizations.weight.original1"  # of a weight-normed layer: any multiple means the same

# Settings that count parts of a model; each part has weights.
_COUNTS = ("num_layers", "num_blocks", "blocks_per_level")


def check_there(name: str | os.PathLike, file: str, options: Mapping[str, Any]) -> None:
    """Refuse what is neither a folder nor a Hub id. Libraries try an id for half a minute before they say so.

    Args:
        file: that what is loaded has, and that is fetched.
        options: of a `from_pretrained`.

    Raises:
        ValueError: a path at which there is nothing.
        OSError: as of `fetched`.
    """
    if Path(name).exists():
        return
    if isinstance(name, Path) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name := os.fspath(name)):
        raise ValueError(
            f"there is no folder {name}; pass one written by save_pretrained, or a Hub id 'owner/name'."
        )
    fetched(name, [str(PurePosixPath(options.get("subfolder") or "", file))], options)


def fetched(name: str, patterns: list[str], options: Mapping[str, Any], advice: str = "") -> str:
    """Return the folder of the files of a Hub repository that fit a pattern, fetched where they were not.

    Raises:
        OSError: nothing can be fetched under that id.
    """
    from huggingface_hub import snapshot_download

    passed_on = ("cache_dir", "force_download", "local_files_only", "token", "revision")
    options = {key: options[key] for key in passed_on if options.get(key) is not None}
    try:
        return snapshot_download(name, allow_patterns=patterns, **options)
    except (OSError, ValueError) as error:  # of huggingface_hub
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OSError(
            f"{name!r} could not be fetched from the Hub ({reason}). Pass an id that exists there, or a folder written "
            f"by save_pretrained{advice}."
        ) from error


class SavedModel(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """A diffusers model whose folder is checked when it is loaded, and which takes adapters of PEFT.

    Attributes:
        stored_as: dtypes in files that are accepted for floating ones of at least 16 bits, and cast on loading.
        reads: other classes whose folders hold the same weights.
    """

    stored_as: ClassVar[tuple[torch.dtype, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike | None, **kwargs: Any) -> Self:
        """Load as diffusers does, check the folder, and align the weights (`align_weights`).

        The folder may hold only what differs from another model (`visual_spec.models.core.low_rank`).

        Raises:
            ValueError: there is no such folder; the weights do not match the configuration, are not of a floating
                dtype, or are not finite; or no model can be built from the configuration. The message names the folder
                and the keys.
            OSError: nothing can be fetched under a Hub id.
        """
        if pretrained_model_name_or_path is not None:
            check_there(pretrained_model_name_or_path, "config.json", kwargs)
        folder = Path(pretrained_model_name_or_path or "") / (kwargs.get("subfolder") or "")
        if pretrained_model_name_or_path is not None and folder.is_dir():
            if _adapts(folder):
                with TemporaryDirectory() as whole:
                    _adapted(cls, folder).save_pretrained(whole)
                    return cls.from_pretrained(whole, **{**kwargs, "subfolder": None, "variant": None})
            check_folder(folder, cls, kwargs.get("variant"))
            stored = (
                {}
                if kwargs.get("quantization_config") is None
                else _read_headers(folder, kwargs.get("variant"))
            )
            if any(weight.dtype.itemsize == 1 for weight in stored.values()):
                # A quantiser reads numbers as they are stored, so it gets a copy in float32.
                with TemporaryDirectory() as copy:
                    cls.from_pretrained(folder, variant=kwargs.pop("variant", None)).save_pretrained(copy)
                    return cls.from_pretrained(copy, **{**kwargs, "subfolder": None})
        loaded = super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        align_weights(model)
        check_loaded(model, str(pretrained_model_name_or_path if not folder.is_dir() else folder))
        return loaded  # or a pair, with output_loading_info

    @cast(Any, functools.wraps(ModelMixin.save_pretrained))  # diffusers looks at the arguments
    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save as diffusers does, so that a kill in between leaves no half-written file (`written_whole`).

        Raises:
            ValueError: the model has adapters, or its weights were quantised, and its configuration does not say how.
        """
        from visual_spec.models.core.adapters import has_adapters

        kind = quantised_as(self)
        if kind is not None and self.config.get("quantization_config") is None:
            raise ValueError(
                f"the weights of {type(self).__name__} were quantised ({kind}) after it was loaded, and its "
                "configuration does not say how; to save it, quantise by from_pretrained(..., quantization_config=...)."
            )
        if has_adapters(self):
            raise ValueError(
                f"{type(self).__name__} has adapters, which are no part of its folder; write them by save_lora_weights "
                "and unload them, or fuse_lora and then unload_lora_weights to keep what they add."
            )
        if kwargs.get("push_to_hub") or (args and not args[0]):
            return super().save_pretrained(save_directory, *args, **kwargs)
        stale = r"diffusion_pytorch_model(-\d+-of-\d+\.safetensors|\.safetensors(\.index\.json)?)"
        from visual_spec.files.whole import written_whole

        with written_whole(save_directory, "" if kwargs.get("variant") else stale) as folder:
            super().save_pretrained(folder, *args, **kwargs)


@dataclass(frozen=True)
class Difference:
    """The difference between the keys of a file and an architecture's."""

    missing: list[str]
    unexpected: list[str]
    misshaped: list[str]
    similarity: tuple[float, float]

    @classmethod
    def between(cls, weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Difference:
        shared = weights.keys() & shapes.keys()
        union = len(weights.keys() | shapes.keys())
        wrong = sorted(key for key in shared if tuple(weights[key].shape) != shapes[key])
        return cls(
            missing=sorted(shapes.keys() - weights.keys()),
            unexpected=sorted(weights.keys() - shapes.keys()),
            misshaped=[f"{k} {list(weights[k].shape)} instead of {list(shapes[k])}" for k in wrong],
            similarity=((len(shared) - len(wrong)) / union, len(shared) / union),
        )

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshaped)

    def __str__(self) -> str:
        groups = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": self.misshaped}
        return "; ".join(f"{len(keys)} {what}: {some(keys)}" for what, keys in groups.items() if keys)


def check_loaded(model: torch.nn.Module, name: str) -> None:
    """Refuse a loaded model of any class whose weights are not all finite; `name` of its folder, for errors."""
    check_finite({key: value for key, value in model.state_dict().items() if value.dtype in FLOATING}, name)


def _adapts(folder: Path) -> bool:
    """Return whether a folder holds only what differs from another model, see `low_rank`."""
    return (folder / "adapter.json").is_file()


def _adapted(kind: type[SavedModel], folder: Path) -> SavedModel:
    """The whole model of class `kind` that such a folder makes."""
    from visual_spec.models.core.low_rank import whole_weights  # few models are stored so

    config, weights = read_settings(folder / "config.json"), whole_weights(folder)
    model = _built(folder, kind.__name__, lambda: kind.from_config(config))
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if difference := Difference.between(weights, shapes):
        raise ValueError(f"{folder} makes no {kind.__name__}: {difference}; copy or download it again.")
    model.load_state_dict(weights, assign=True)
    return model.eval()


def check_folder(folder: Path, model: Any, variant: str | None = None) -> None:
    """Refuse a folder whose weights do not fit the model that its config.json describes. Reads headers only.

    diffusers and transformers report missing and unexpected keys, but not what component of a pipeline they belong to,
    only after loading, and they cast any dtype. A model of transformers may be stored in 8 bits where its config.json
    says so: `"stored_as": "float8_e4m3fn"` (e4m3), or `["float8_e4m3fn", "int8"]`; whole numbers only in the directions
    of weight-normed layers, whose scale is free.

    Args:
        folder: a folder written by `save_pretrained`. Folders without safetensors files, or with weights quantised in
            a format of diffusers or transformers, are not checked.
        model: the class, ours or one of diffusers or transformers. Ours refuse settings of another kind than they
            declare.
        variant: as for `from_pretrained`.

    Raises:
        ValueError: a file is damaged or missing; no model can be built from the configuration; or weights are missing,
            unexpected, mis-shaped or of other dtypes.
    """
    if _adapts(folder):  # it is checked when it is whole
        return
    of_diffusers = issubclass(model, ModelMixin)
    config = read_settings(folder / "config.json")
    weights = _read_headers(folder, variant, "diffusion_pytorch_model" if of_diffusers else "model")
    if not weights or _is_quantised(folder, config):
        return

    def build() -> torch.nn.Module:
        if of_diffusers:
            return model.from_config(config)
        settings = model.config_class.from_dict(config)
        # Encodec derives its number of codebooks from a bandwidth.
        _check_counts(folder, {"num_quantizers": getattr(settings, "num_quantizers", 0)}, weights)
        return model(settings)

    _check_counts(folder, _counts(config, of_diffusers), weights)
    built = _built(folder, model.__name__, build)
    held = sum(value.numel() for value in weights.values())
    made = sum(value.numel() for value in built.buffers())
    if made > 64 * max(held, 2**20):  # tables that are computed, such as positions'
        raise ValueError(
            f"{folder}/config.json makes tables of {made} numbers for weights of {held}; copy or download it again."
        )
    # Tied weights are stored once.
    tied = {key for key in getattr(built, "all_tied_weights_keys", None) or {} if key not in weights}
    expected = {key: value for key, value in built.state_dict().items() if key not in tied}
    shapes = {key: tuple(value.shape) for key, value in expected.items()}
    if difference := Difference.between(weights, shapes):
        raise ValueError(
            f"{folder} does not hold the {model.__name__} of its config.json: {difference}; copy or download it again."
        )
    castable = {*FLOATING, *_eight_bits(model, config)}
    for key, value in weights.items():
        cast = castable if key.endswith(_DIRECTION) else castable - {torch.int8}
        if value.dtype != expected[key].dtype and not (
            expected[key].dtype in FLOATING and value.dtype in cast
        ):
            raise ValueError(
                f"{folder}: {key} is of {value.dtype}, where the model computes with floating weights of at least 16 "
                "bits; nothing is cast without being asked. Copy or download it again."
            )


def _built(folder: Path, name: str, build: Callable[[], Any]) -> Any:
    """The model that the configuration of a folder describes, without memory for its weights."""
    try:
        with torch.device("meta"):
            return build()
    except Exception as error:  # constructors raise anything for values of a wrong kind
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{folder}/config.json makes no {name}: {reason}") from error


def _counts(config: Mapping[str, object], of_diffusers: bool) -> dict[str, object]:
    """What the configuration says of how many parts the model has; each part has weights."""
    if of_diffusers:
        return {name: config.get(name) for name in _COUNTS}
    named = {
        name: value
        for name, value in config.items()
        if name.startswith("num_") and name.endswith(("layers", "blocks", "codebooks"))
    }
    return named | {f"len({name})": len(value) for name, value in config.items() if isinstance(value, list)}


def _eight_bits(model: type, config: Mapping[str, object]) -> Iterable[torch.dtype]:
    """The dtypes of 8 bits in which a model of this class and configuration may be stored."""
    if issubclass(model, SavedModel):
        return model.stored_as
    if issubclass(model, ModelMixin):
        return (torch.float8_e4m3fn,)  # diffusers' classes cannot say so
    named = config.get("stored_as")
    named = named if isinstance(named, list) else [named]
    return (dtype for name, dtype in _EIGHT_BITS.items() if name in named)


def _new_name(key: str) -> str:
    """Return the present name of a key; older versions of PyTorch named weight norms differently."""
    return re.sub(
        r"weight_([gv])$", lambda part: f"parametrizations.weight.original{'gv'.index(part[1])}", key
    )


def read_settings(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises:
        ValueError: there is no such file, or it is no regular one, too large, no JSON, or no object; names it.
    """
    if not path.exists():
        raise ValueError(f"{path} is missing; copy or download it again.")
    try:
        return read_object(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; copy or download it again.") from error


def _is_quantised(folder: Path, config: Mapping[str, object]) -> bool:
    """Return whether weights are quantised in a format of diffusers or transformers, which check them."""
    how = config.get("quantization_config")
    if how is not None and not isinstance(how, dict):
        raise ValueError(
            f"{folder}/config.json says quantization_config={str(how)[:60]!r}, which is no object; copy or download it "
            "again."
        )
    return how is not None


def _check_counts(folder: Path, counts: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
    """Refuse counts of parts that exceed the number of weights, before as many parts are built."""
    for name, number in counts.items():
        if isinstance(number, int | float) and number > len(weights):
            raise ValueError(
                f"{folder}/config.json says {name}={number}, and its weights are {len(weights)} in all."
            )


def _read_headers(
    folder: Path, variant: str | None, stem: str = "diffusion_pytorch_model"
) -> dict[str, Tensor]:
    """Return the weights of a folder without their values, on the meta device; of transformers by new names."""
    files = re.compile(rf"{stem}{re.escape('.' + variant) if variant else ''}(-\d+-of-\d+)?\.safetensors")
    headers: dict[str, Tensor] = {}
    for path in sorted(path for path in folder.glob("*.safetensors") if files.fullmatch(path.name)):
        if not path.is_file():
            raise ValueError(f"{path} is no regular file.")
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    part = file.get_slice(key)
                    dtype = {**_FLOATING, **_OTHERS}.get(part.get_dtype(), torch.complex128)
                    name = _new_name(key) if stem == "model" else key
                    headers[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
        except Exception as error:  # a damaged header can raise any error
            reason = " ".join(str(error).split())[:160]
            raise ValueError(
                f"{path} is truncated or damaged ({reason}); copy or download it again."
            ) from error
    return headers


def check_finite(weights: Mapping[str, Tensor], name: str, source: str = "the original") -> None:
    """Refuse floating weights with nan or infinity, by ValueError. Those on the meta device have no values to check."""
    for key, whole in weights.items():
        for part in (part for part in stored_parts(whole) if part.is_floating_point()):
            tensor = part.float() if part.itemsize == 1 else part  # of e4m3, which can be nan
            # A sum checks all values without a second tensor of the same size; if the sum overflows, check again.
            wide = torch.promote_types(tensor.dtype, torch.float32)
            if not tensor.is_meta and not tensor.sum(dtype=wide).isfinite() and not tensor.isfinite().all():
                bad = int((~tensor.isfinite()).sum())
                raise ValueError(
                    f"{name} is damaged: {bad} of {tensor.numel()} values of {key} are nan or infinite in "
                    f"{short_name(part.dtype)}; copy or download {source} again."
                )


def stored_parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors in which a weight is kept: itself, or those inside of a subclass.

    A weight that torchao quantised calls itself floating, but has no sum and no bytes. It consists of whole numbers and
    of scales.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in stored_parts(getattr(tensor, name))]


def quantised_as(*models: torch.nn.Module) -> str | None:
    """Return the types of weights that torchao, bitsandbytes or the like quantised; None where all are plain."""
    kinds = set()
    for weight in (weight for model in models for weight in model.parameters()):
        packed = any(part.itemsize == 1 or not part.is_floating_point() for part in stored_parts(weight))
        if packed and type(weight) is not torch.nn.Parameter:
            held = getattr(weight, "target_dtype", None)  # of numbers that are kept in more bits
            kinds.add(type(weight).__name__ + (f" of {short_name(held)}" if held is not None else ""))
    return ", ".join(sorted(kinds)) or None


def some(names: Iterable[object], count: int = 4) -> str:
    """Return a list of names for an error: the first few, and how many more."""
    words = list(map(str, names))
    more = f" and {len(words) - count} more" if len(words) > count else ""
    return ", ".join(words[:count]) + more


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
