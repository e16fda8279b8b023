"""The rows of an evaluation or a benchmark that names none: what a model can be decoded with, and what is plain.

Known from the saved configuration alone, so that what cannot be read is refused before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PLAIN = "autoregressive"
# Plain decoding with less noise, and once more with other seeds, which says how far apart two sets from one law are.
_CONTROLS = ("temperature=0.9", "seed=1000000")
# Scales that a refiner draws, and parts of the cache that are kept, as far as the model has so many.
_REFINED = (4, 3, 2, 1)
_NEXT_TOKEN = ("ImagePipeline", "ClassImagePipeline")
_MEASURED = (*_NEXT_TOKEN, "ScaleImagePipeline", "AudioPipeline")
# Of music: the codes of plain decoding, the column as the unit under each coupling, and relaxed tests of each code.
_COLUMN_ROWS = (
    "column-jacobi",
    *(
        f"column-jacobi:coupling={coupling},acceptance=exact"
        for coupling in ("gumbel", "maximal", "independent")
    ),
    "column-jacobi:coupling=maximal,acceptance=grouped,unit=codebook",
    "column-jacobi:coupling=maximal,acceptance=lantern,unit=codebook",
)
# And where the model has a drafter.
_DRAFTED_COLUMN_ROWS = ("drafted-columns", "drafted-columns:acceptance=identical")
_SHARES = (0.05, 0.1, 0.2, 0.5, 1.0)
_SHARE_OF_TWO = 0.1  # of both caches, where two models draw


@dataclass(frozen=True)
class Rows:
    """The rows of a model, as `visual_spec.eval.quality.samples.parse_setting` reads them.

    Attributes:
        plain: the one that others are compared with: one token or column after the other, all scales by one model, or
            a masked model as it was saved.
        controls: plain decoding otherwise.
        others: what is compared with it.
        law: guidance_scale, top_k and top_p of all of them, unless they are told others; of music temperature too.
        by_scales: whether the model is a next-scale one.
        plays: whether it plays music.
        masked: whether it fills in hidden codes.
    """

    plain: str
    controls: tuple[str, ...]
    others: tuple[str, ...]
    law: dict[str, Any]
    by_scales: bool = False
    plays: bool = False
    masked: bool = False


def rows_of_model(name: str) -> Rows:
    """The rows of an embedded model, a folder or a Hub id.

    Raises:
        ValueError: there is no pipeline, or one of another kind.
    """
    from visual_spec.pipelines.loading import read_config, read_index

    index = read_index(name)
    kind = index["_class_name"]
    if kind not in _MEASURED:
        raise ValueError(f"{name} holds a {kind}, which is not measured here; pass a {', '.join(_MEASURED)}.")
    if kind == "AudioPipeline":
        masked = bool(index.get("masked"))
        return music_rows(index, read_config(name, "sampler", "sampler_config.json") if masked else None)
    if kind in _NEXT_TOKEN:
        law = {"guidance_scale": 3.0, "top_k": 0, "top_p": 1.0}
        controls = tuple(f"{PLAIN}:{text}" for text in _CONTROLS)
        return Rows(PLAIN, controls, ("speculative-jacobi",), law)
    return scale_rows(index, read_config(name, "vq_model")["scales"])


def rows_of_masked(name: str | None, rows: Rows) -> Rows | None:
    """The rows of a masked model that stands beside another one; None: there is none.

    Args:
        rows: of the model beside it.

    Raises:
        ValueError: as `rows_of_model`; a model that is not masked, or beside one that is no model of columns.
    """
    if name is None:
        return None
    found = rows_of_model(name)
    if not found.masked or not rows.plays or rows.masked:
        raise ValueError(
            f"--masked {name} given; it takes a masked model of music, beside one of columns, such as --model tunes "
            "--masked tunes_masked."
        )
    return found


def scale_rows(index: Mapping[str, Any], scales: Sequence[int]) -> Rows:
    """The rows of a `ScaleImagePipeline`.

    They are the refiner alone, both models for some numbers of scales, parts of the large model's cache, and both
    together; parts that are too small for the model are left out.

    Args:
        index: the configuration of the pipeline.
        scales: of its models.
    """
    from visual_spec.pipelines.scale_plan import ScalePlan
    from visual_spec.samplers.scales import VAR_LAW

    count = len(scales)
    paired = _holds(index, "refiner")
    known = index.get("refiner_first_scale")  # what the refiner cannot draw is no row
    splits = [count - refined for refined in _REFINED if refined < count] if paired else []
    splits = [split for split in splits if known is None or split >= known]
    shares = [share for share in _SHARES if _fits(scales, share)]
    alone = [0] if paired and not known else []
    rows: list[dict[str, Any]] = [{"num_draft_scales": split} for split in alone + splits]
    rows += [{"num_draft_scales": "all", "cache_share": share} for share in shares]
    share = _SHARE_OF_TWO if _SHARE_OF_TWO in shares else shares[0]
    rows += [{"num_draft_scales": split, "cache_share": share} for split in splits[1:3]]
    plain = _text(ScalePlan.plain(index).describe())
    law = {
        name: index.get(f"default_{name}", getattr(VAR_LAW, name))
        for name in ("guidance_scale", "top_k", "top_p")
    }
    return Rows(
        plain, tuple(f"{plain},{text}" for text in _CONTROLS), tuple(map(_text, rows)), law, by_scales=True
    )


def music_rows(index: Mapping[str, Any], saved: Mapping[str, Any] | None = None) -> Rows:
    """The rows of an `AudioPipeline`: columns, or of a masked model the steps it was saved with and half of them.

    Args:
        index: the configuration of the pipeline.
        saved: that of its `MaskedSampler`, None for a model of columns.
    """
    law = {name: index[f"default_{name}"] for name in ("guidance_scale", "temperature", "top_k", "top_p")}
    if saved is None:
        cooler = f"columns:temperature={0.9 * law['temperature']:g}"
        others = _COLUMN_ROWS + _DRAFTED_COLUMN_ROWS * _holds(index, "drafter")
        return Rows("columns", (cooler, f"columns:{_CONTROLS[1]}"), others, law, plays=True)
    from visual_spec.samplers.masked import MaskedSampler

    usual = MaskedSampler().config
    settings = {
        name: saved[name]
        for name, value in usual.items()
        if not name.startswith("_") and saved.get(name, value) != value
    }
    steps = settings.get("steps", usual["steps"])
    fewer = [max(1, count // 2) for count in steps] if isinstance(steps, list) else max(1, steps // 2)
    plain, half = _masked_text(settings), _masked_text(settings | {"steps": fewer})
    controls = (f"{plain}{',' if ':' in plain else ':'}{_CONTROLS[1]}",)
    return Rows(plain, controls, (half,), law, plays=True, masked=True)


def _masked_text(settings: Mapping[str, Any]) -> str:
    # A list of one ends in the stroke that divides longer ones.
    values = {
        name: "/".join(map(str, value)) + ("/" if len(value) == 1 else "")
        if isinstance(value, list)
        else value
        for name, value in settings.items()
    }
    return "masked" + ":" * bool(values) + ",".join(f"{name}={value}" for name, value in values.items())


def _holds(index: Mapping[str, Any], component: str) -> bool:
    """Whether a pipeline was saved with this component: one that it lacks is null, missing, or a pair of nulls."""
    return tuple(index.get(component) or (None, None)) != (None, None)


def _fits(scales: Sequence[int], share: float) -> bool:
    from visual_spec.models.next_scale.scale_budget import ScaleBudget

    try:
        ScaleBudget.from_share(scales, 1, share)
    except ValueError:
        return False
    return True


def _text(settings: Mapping[str, Any]) -> str:
    return "scale-wise:" + ",".join(f"{name}={value}" for name, value in settings.items())
