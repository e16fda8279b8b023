"""Samples drawn for an evaluation, and what was read off their pictures, kept so that nothing is done twice.

Of a music pipeline the samples are clips; read clip for picture below.

Sample i has prompt i and seed `seed + i`, so it depends on nothing else: neither on the batch, nor on how many
processes share the work, nor on interruptions. A folder holds the samples of one setting in two kinds of files, both
complete or absent: `draws-<first>-<end>.npz` (tokens, calls, divergence, seconds of a batch), which took the time, and
`judged-<first>-<end>.npz` (scores and features of its pictures), which another judge replaces.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from visual_spec.eval.files import write_atomically
from visual_spec.eval.quality.features import features_of
from visual_spec.eval.quality.music import clips_of, codes_of, plays
from visual_spec.eval.speed.measure import sampler_settings
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.models.next_scale.scale_budget import CacheBytes, cache_bytes
from visual_spec.pipelines.accelerate import make_row, parse_sampler
from visual_spec.pipelines.loading import load_drafter
from visual_spec.pipelines.scale_plan import ScalePlan
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.trace import MEASURE
from visual_spec.samplers.scales import ScaleTrace, ScaleWiseSampler, Stage, draws_guided

_LAW = ("guidance_scale", "guidance_until", "temperature", "top_k", "top_p")
_RANGE = re.compile(r"draws-(\d+)-(\d+)\.npz")


@dataclass(frozen=True)
class Setting:
    """A row: a sampler, the law it draws from, the seed of sample 0, and the drafter, None for the pipeline's own.

    `text` is the row as it was written, `plan` who draws which scales, where a pipeline decodes by scales.
    """

    text: str
    sampler: Any
    law: TokenLaw
    seed: int
    drafter: str | None = None
    plan: ScalePlan = ScalePlan()

    @property
    def pipeline_law(self) -> dict[str, Any]:
        """The law as the arguments of a pipeline call."""
        return {name: getattr(self.law, name) for name in _LAW}

    def describe(self) -> dict[str, Any]:
        """All that fixes the samples, but for the model and the prompts; JSON types only."""
        facts = {"sampler": sampler_settings(self.sampler), "law": self.pipeline_law, "seed": self.seed}
        if self.drafter is not None:
            facts["drafter"] = self.drafter
        return facts | ({"plan": self.plan.describe()} if self.plan.describe() else {})

    @contextmanager
    def on(self, pipe: Any, *, calibrated: bool = True) -> Iterator[None]:
        """Within, `pipe` has this sampler and drafter, and follows this plan; afterwards its own again.

        Args:
            calibrated: see `ScalePlan.on`.

        Raises:
            TypeError, ValueError: a sampler, drafter or plan that does not fit it.
        """
        before = pipe.sampler, pipe.drafter
        pipe.sampler = self.sampler
        if self.drafter is not None:
            pipe.drafter = _drafter(self.drafter, pipe.device, pipe.transformer.dtype)
        try:
            pipe.check_sampler()
            with self.plan.on(pipe, calibrated=calibrated):
                yield
        finally:
            pipe.sampler, pipe.drafter = before


@lru_cache(maxsize=8)
def _drafter(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    return load_drafter(name).to(device, dtype)


def parse_setting(text: str, law: TokenLaw, seed: int) -> Setting:
    """Read `name` or `name:setting=value,...`, such as `speculative-jacobi:window=32,acceptance=identical`.

    The settings are those of the sampler; guidance_scale, guidance_until, temperature, top_k, top_p and seed, which
    replace those of `law` and `seed`; and drafter, a name or folder that `load_drafter` takes (default: the pipeline's
    own). Those of `scale-wise` are also those of `ScalePlan`. `parse_sampler`
    says how values are written.

    Raises:
        ValueError: text of another form, a setting twice, an unknown sampler or setting, or a value it refuses.
    """
    name, settings = parse_sampler(text)
    # `masked` has a temperature of its own, which is a word: falling. That of the law is a number.
    own = [key for key, value in settings.items() if name == "masked" and isinstance(value, str)]
    changes = {key: settings.pop(key) for key in _LAW if key in settings and key not in own}
    own_seed, drafter = settings.pop("seed", seed), settings.pop("drafter", None)
    if isinstance(own_seed, bool) or not isinstance(own_seed, int) or own_seed < 0:
        raise ValueError(f"seed={own_seed!r} in sampler {text!r}; pass a whole number of at least 0")
    for key, value in changes.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key}={value!r} in sampler {text!r}; pass a number")
    sampler, plan = make_row(name, **settings)
    own_law = TokenLaw(**{**asdict(law), **changes})
    if isinstance(sampler, ScaleWiseSampler):
        if own_law.guidance_until is not None:
            raise ValueError(
                f"guidance_until in sampler {text!r}; it counts tokens, and guidance of a next-scale model grows from "
                "scale to scale. Leave it out."
            )
        if sampler.config["smooth"]:
            raise ValueError(
                f"smooth=true in sampler {text!r}; pictures are kept as tokens, which do not tell smooth ones."
            )
    return Setting(text.strip(), sampler, own_law, own_seed, drafter, plan)


@dataclass
class Judge:
    """What is read off a picture. `score`: (prompt, picture uint8 [H, W, 3]) -> {attribute: whether it holds}.

    A clip is float32 [samples].
    """

    score: Callable[[str, np.ndarray], dict[str, bool]]
    extractors: dict[str, nn.Module] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the extractors and their weights."""
        return " ".join([fingerprint(self.extractors.values()), *self.extractors])

    def __call__(self, prompts: Sequence[str], pictures: np.ndarray) -> dict[str, np.ndarray]:
        """`hits`, JSON of one score a picture, and for each extractor its features [N, D]."""
        scores = [self.score(prompt, picture) for prompt, picture in zip(prompts, pictures, strict=True)]
        plain = [{name: bool(hit) for name, hit in found.items()} for found in scores]
        found = {"hits": np.array(json.dumps(plain))}
        return found | {
            name: features_of(network, pictures).numpy() for name, network in self.extractors.items()
        }


@dataclass
class Samples:
    """All samples of a setting, in order.

    tokens [N, L], of clips codes [N, K, T]; calls [N], moved_mass [N]; length: what a call commits one or more of, the
    tokens of a picture or the columns of a clip; of each batch its size, seconds by the clock, seconds of the processor
    and divergence; and what the judge said: hits, features {extractor: [N, D]}. moved_mass and divergence are those of
    `DivergenceMeter`, nan for a sampler that has none. Of a next-scale pipeline, of each batch: bytes of keys and
    values that were held and that were there at the peak, and whether the model's own law was drawn from; else none. On
    a GPU the most memory of each batch, else none.
    """

    tokens: np.ndarray
    calls: np.ndarray
    length: int
    moved_mass: np.ndarray
    batch_sizes: list[int]
    batch_seconds: list[float]
    batch_processor_seconds: list[float]
    batch_divergence: list[float]
    hits: list[dict[str, bool]]
    features: dict[str, Tensor]
    batch_cache_held: list[int]
    batch_cache_peak: list[int]
    batch_lossless: list[bool]
    batch_peak_memory: list[int]


class SampleFolder:
    """The files of one setting.

    Args:
        path: made if it is not there.
        settings: all that fixes the samples, JSON types only; kept in `settings.json`.

    Raises:
        ValueError: the folder holds samples of other settings; names what differs.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]):
        self.path = Path(path)
        settle(self.path / "settings.json", settings)

    def draws(self) -> list[tuple[int, int]]:
        """Half-open ranges of the samples that are there, in order."""
        matches = (_RANGE.fullmatch(path.name) for path in self.path.glob("draws-*.npz"))
        return sorted((int(match[1]), int(match[2])) for match in matches if match)

    def missing(self, first: int, end: int) -> tuple[int, int] | None:
        """The part of a block that is not there yet: the whole or its end, as files are written in order."""
        for there in self.draws():
            if there[0] <= first < there[1]:
                first = there[1]
        return (first, end) if first < end else None

    def complete(self, samples: int, judge: str) -> bool:
        """Whether all samples are there, and judged by the judge of this fingerprint."""
        ranges = [bounds for bounds in self.draws() if bounds[0] < samples]
        covered = {index for first, end in ranges for index in range(first, end)}
        return covered.issuperset(range(samples)) and all(
            self.judged_by(*bounds) == judge for bounds in ranges
        )

    def judged_by(self, first: int, end: int) -> str | None:
        """The fingerprint of the judge that saw a file of draws; None where none did."""
        found = self.read("judged", first, end, only="judge")
        return None if found is None else str(found["judge"])

    def write(self, kind: str, first: int, end: int, arrays: dict[str, Any]) -> None:
        """Write a file whole or not at all."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        write_atomically(self._file(kind, first, end), buffer.getvalue(), overwrite=True)

    def read(self, kind: str, first: int, end: int, only: str | None = None) -> dict[str, np.ndarray] | None:
        """Arrays of a file, all or one of them; None where there is no such file."""
        path = self._file(kind, first, end)
        if not path.exists():
            return None
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if only in (None, name)}

    def _file(self, kind: str, first: int, end: int) -> Path:
        return self.path / f"{kind}-{first:06d}-{end:06d}.npz"

    def samples(self, count: int) -> Samples:
        """The first `count` samples; call it when `complete`."""
        draws, judged, sizes = [], [], []
        for first, end in self.draws():
            if first >= count:
                break
            one, other = self.read("draws", first, end), self.read("judged", first, end)
            assert one is not None and other is not None, "not complete"
            draws.append(one)
            judged.append(other)
            sizes.append(end - first)
        names = [name for name in judged[0] if name not in ("hits", "judge")]

        def joined(files: list[dict[str, np.ndarray]], name: str) -> np.ndarray:
            return np.concatenate([file[name] for file in files])[:count]

        return Samples(
            tokens=joined(draws, "tokens"),
            calls=joined(draws, "calls"),
            length=int(draws[0].get("columns", draws[0]["tokens"].shape[-1])),
            moved_mass=joined(draws, "moved_mass"),
            batch_sizes=sizes,
            batch_seconds=[float(file["seconds"]) for file in draws],
            batch_processor_seconds=[float(file["processor_seconds"]) for file in draws],
            batch_divergence=[float(file["divergence"]) for file in draws],
            hits=[found for file in judged for found in json.loads(str(file["hits"]))][:count],
            features={name: torch.from_numpy(joined(judged, name)) for name in names},
            batch_cache_held=[int(file["cache_held"]) for file in draws if "cache_held" in file],
            batch_cache_peak=[int(file["cache_peak"]) for file in draws if "cache_peak" in file],
            batch_lossless=[bool(file["lossless"]) for file in draws if "lossless" in file],
            batch_peak_memory=[int(file["peak_memory"]) for file in draws if "peak_memory" in file],
        )


def settle(path: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a folder, or compare them with those its samples were drawn under.

    Raises:
        ValueError: they differ; names where.
    """
    text = json.dumps(settings, indent=1) + "\n"
    if not path.exists():
        write_atomically(path, text, overwrite=True)
        return
    there, here = json.loads(path.read_text()), json.loads(text)
    differing = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    if differing:
        changes = "; ".join(f"{name}: {there.get(name)} there, {here.get(name)} here" for name in differing)
        raise ValueError(f"{path.parent} holds samples of other settings ({changes}); pass another folder")


def draw(pipe: Any, setting: Setting, prompts: Sequence[str], first: int) -> dict[str, np.ndarray]:
    """Draw one batch, the samples from index `first`, as the arrays of a file; leaves the pipeline its sampler."""
    with setting.on(pipe):
        busy = time.process_time()
        output = pipe(
            list(prompts),
            generator=[
                torch.Generator().manual_seed(setting.seed + first + place) for place in range(len(prompts))
            ],
            output_type="latent",
            **{name: value for name, value in setting.pipeline_law.items() if value is not None},
        )
        busy = time.process_time() - busy
        more = _scale_facts(pipe, setting, output.trace, len(prompts))
    trace = output.trace
    busy *= trace.seconds / (trace.seconds + trace.phase_seconds.get(MEASURE, 0.0))
    if trace.peak_memory is not None:
        more["peak_memory"] = np.array(trace.peak_memory)
    if plays(pipe):
        more["columns"] = np.array(trace.commit_call.shape[1])
    nothing = np.full(len(prompts), np.nan)
    return {
        "tokens": small_tokens(output.codes if plays(pipe) else output.tokens),
        "calls": trace.target_calls.cpu().numpy(),
        "moved_mass": nothing if trace.moved_mass is None else trace.moved_mass.double().cpu().numpy(),
        "divergence": np.array(np.nan if trace.divergence is None else trace.divergence),
        "seconds": np.array(trace.seconds),
        # On a processor that others use too, these tell more than the clock.
        "processor_seconds": np.array(busy),
        "prompts": np.array(json.dumps(list(prompts))),
        **more,
    }


def _scale_facts(pipe: Any, setting: Setting, trace: Any, batch_size: int) -> dict[str, np.ndarray]:
    """What is kept of the caches of a next-scale decode; nothing for other pipelines."""
    if not isinstance(trace, ScaleTrace):
        return {}
    # One cache is freed before the next is allocated, but for the first one's where distances are measured by it.
    stays = trace.divergence is not None
    dtype = pipe.transformer.dtype
    stages = pipe.stages(law=setting.law)
    first, *others = caches_of(stages, batch_size, setting.law.guided, dtype, measured=stays)
    together = [first.held + other.held if stays else other.held for other in others]
    at_work = [first.held + other.peak if stays else other.peak for other in others]
    measuring = [first.peak + other.held for other in others if stays]
    return {
        "cache_held": np.array(max([first.held, *together])),
        "cache_peak": np.array(max([first.peak, *at_work, *measuring])),
        "lossless": np.array(trace.lossless),
    }


def caches_of(
    stages: Sequence[Stage], batch_size: int, guided: bool, dtype: torch.dtype, *, measured: bool = False
) -> list[CacheBytes]:
    """Keys and values of each model of a schedule, by arithmetic, in the order in which they draw.

    Args:
        guided: in stages without a law of their own.
        measured: the first model scores all scales.
    """
    runs = [list(run) for _, run in groupby(stages, key=lambda stage: id(stage.model))]
    found = []
    for run in runs:
        stop = (runs[-1] if measured and run is runs[0] else run)[-1].scales.stop
        model: Any = run[0].model
        known = run[0].scales.start
        budget = getattr(model, "budget", None)
        config = (model if budget is None else model.model).config
        scored = stages if measured and run is runs[0] else run
        doubled = draws_guided(scored, guided)
        found.append(cache_bytes(config, budget, batch_size, doubled, dtype, known=known, stop=stop))
    return found


@torch.no_grad()
def encode(pipe: Any, prompts: Sequence[str], pictures: np.ndarray) -> dict[str, np.ndarray]:
    """True pictures uint8 [N, H, W, 3], or clips float32 [N, samples], as the arrays of a file.

    They are what a tokenizer, or a codec, makes of them; no call is spent.
    """
    if plays(pipe):
        tokens = codes_of(pipe, pictures)
    else:
        signed = torch.from_numpy(pictures).permute(0, 3, 1, 2)
        tokens = pipe.vq_model.encode_tokens(signed.to(pipe.device, pipe.vq_model.dtype) / 127.5 - 1)
    return {
        "tokens": small_tokens(tokens),
        "calls": np.zeros(len(prompts), np.int64),
        "moved_mass": np.full(len(prompts), np.nan),
        "divergence": np.array(np.nan),
        "seconds": np.array(0.0),
        "processor_seconds": np.array(0.0),
        "prompts": np.array(json.dumps(list(prompts))),
    }


def small_tokens(tokens: Tensor) -> np.ndarray:
    """Token ids as int16 where they fit, else int32."""
    values = tokens.cpu().numpy()
    return values.astype(np.int16 if values.max() < 2**15 else np.int32)


def shown_by(pipe: Any, tokens: np.ndarray) -> np.ndarray:
    """What tokens look like, see `pictures_of`, or sound like, see `music.clips_of`."""
    return clips_of(pipe, tokens) if plays(pipe) else pictures_of(pipe, tokens)


@torch.no_grad()
def pictures_of(pipe: Any, tokens: np.ndarray) -> np.ndarray:
    """Pictures uint8 [N, H, W, 3] of tokens [N, L], as the pipeline shows them."""
    images = pipe.decode_tokens(torch.from_numpy(tokens.astype(np.int64)).to(pipe.device), "pil")
    return np.stack([np.asarray(image) for image in images])


def judge_draws(
    pipe: Any, folder: SampleFolder, prompts: Sequence[str], judge: Judge, block: tuple[int, int]
) -> None:
    """Judge the pictures of the draws within a block that this judge has not seen yet.

    Pictures are made from the stored tokens and in the batches of the files, so an interruption changes nothing.

    Raises:
        ValueError: samples that were drawn for other prompts.
    """
    known = judge.fingerprint
    for first, end in folder.draws():
        if not block[0] <= first < block[1]:
            continue
        draws = folder.read("draws", first, end)
        assert draws is not None
        drawn_for = json.loads(str(draws["prompts"]))
        if drawn_for != list(prompts[first:end]):
            raise ValueError(
                f"sample {first} in {folder.path} and those after it have other prompts ({drawn_for[0]!r} there, "
                f"{prompts[first]!r} here); pass another folder"
            )
        if folder.judged_by(first, end) == known:
            continue
        found = judge(prompts[first:end], shown_by(pipe, draws["tokens"]))
        folder.write("judged", first, end, {**found, "judge": np.array(known)})
