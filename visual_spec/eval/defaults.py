"""What a benchmark or an evaluation measures of a model when no settings are named, and what counts as plain.

Read from the saved configuration and the registry of samplers alone, so that what cannot be measured is refused before
a model is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from visual_spec.records import Measured, Saved
from visual_spec.samplers.registry import DISTILLED, MASKED, all_samplers, fitting

if TYPE_CHECKING:
    from visual_spec.eval.settings import Setting
    from visual_spec.records import PipelineFacts
    from visual_spec.samplers.core.law import TokenLaw

# The configuration of a component of a pipeline, by its name.
Read = Callable[[str], Mapping[str, Any]]
# Plain decoding with other seeds says how far apart two sets from one law are.
_OTHER_SEEDS = "seed=1000000"
_COOLER = 0.9  # and with less noise: its temperature as a share of the model's own
# Of a next-scale model: scales that a refiner draws, and parts of the cache that are kept, as far as it has so many.
_REFINED = (4, 3, 2, 1)
_SHARES = (0.05, 0.1, 0.2, 0.5, 1.0)
_SHARE_OF_TWO = 0.1  # of both caches, where two models draw
# Of a model of continuous tokens: fewer calls, fewer levels of the head, and levels that fall from call to call (DiSA).
_FEWER_CALLS = (64, 32, 16)
_FEWER_LEVELS = (50, 25, 10, 5)
_FALLING = (50, 5)
_FINAL_NOISE = 0.05  # where a rule needs noise in the last level, and the model has none
_TOLERANCES = (0.05, 0.1, 0.2)
_LEVELS = (8, 16)  # of a chain that one call of the head scores


@dataclass(frozen=True)
class ModelSettings:
    """The settings of a model, as `visual_spec.eval.settings.parse_setting` reads them.

    Attributes:
        facts: what the model's pipeline is.
        plain: the setting that others are compared with.
        controls: plain decoding otherwise.
        others: what is compared with it.
    """

    facts: PipelineFacts
    plain: str
    controls: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def masked(self) -> bool:
        """Return whether the model fills in hidden codes."""
        return MASKED in self.facts.calls

    @property
    def law(self) -> dict[str, Any]:
        """The law's settings where none are given."""
        return dict(self.facts.default_settings)

    def law_with(self, **asked: Any) -> TokenLaw:
        """The model's own law, but for what is asked for; None asks for nothing.

        Raises:
            ValueError: a value out of its range.
        """
        from visual_spec.samplers.core.law import TokenLaw

        return TokenLaw(**{**self.law, **{name: value for name, value in asked.items() if value is not None}})


def settings_of_model(name: str, temperature: float | None = None) -> ModelSettings:
    """The settings of an embedded model, a folder or a Hub id.

    Args:
        temperature: in place of the model's own.

    Raises:
        ValueError: there is no pipeline, or one that is not measured.
    """
    from visual_spec.pipelines.loading import read_config, read_facts, read_family, read_index

    index, facts, measured = read_index(name), read_facts(name), read_family(name).measured
    if temperature is not None:
        facts = replace(facts, default_settings={**facts.default_settings, "temperature": temperature})
    if isinstance(measured, tuple):
        return listed_settings(facts, index, measured)
    module, _, function = measured.partition(":")
    if not function:  # one way to decode, and no data of ours to judge it by
        kind = index["_class_name"]
        raise ValueError(
            f"{name} holds a {kind}, which is not measured here; draw with it by `visual-spec generate --model "
            f"{name}`, or in Python: visual_spec.{kind}.from_pretrained({name!r})."
        )
    rows = getattr(importlib.import_module(f"visual_spec.{module}"), function)
    return rows(facts, index, partial(read_config, name))


def settings_for(
    facts: PipelineFacts, index: Mapping[str, Any] | None = None, read: Read | None = None
) -> ModelSettings:
    """The settings that the registry names for a model of tokens or columns, one call after the other.

    Args:
        facts: of its pipeline.
        index: the configuration of the pipeline, which says what it has; None: the model alone.
    """
    others = tuple(
        with_setting(entry.name, text)
        for entry in fitting(facts.calls)
        if not entry.plain and (not entry.needs or _holds(index or {}, entry.needs))
        for text in entry.settings
    )
    return _beside_plain(facts, others)


def listed_settings(
    facts: PipelineFacts, index: Mapping[str, Any], rows: Sequence[Measured]
) -> ModelSettings:
    """The settings that a family lists.

    Args:
        facts: of its pipeline.
        index: the configuration of the pipeline, which says what it has.
    """
    from visual_spec.pipelines.sampler_text import parse_sampler, write_sampler

    saved = parse_sampler(facts.fast_sampler)[1]
    settings: list[str] = []
    for row in rows:
        if row.part and not _holds(index, row.part):
            continue
        for values in product(*row.settings.values()):
            named = {
                name: saved.get(name, value.otherwise) if isinstance(value, Saved) else value
                for name, value in zip(row.settings, values, strict=True)
            }
            settings.append(write_sampler(row.sampler, named))
    return _beside_plain(facts, settings)


def _beside_plain(facts: PipelineFacts, others: Iterable[str]) -> ModelSettings:
    """Settings beside plain decoding, which is controlled with other seeds and, but for a student, with less noise."""
    plain = facts.plain_sampler
    if DISTILLED in facts.calls:
        return ModelSettings(facts, plain, (with_setting(plain, _OTHER_SEEDS),), tuple(others))
    cooler = f"temperature={_COOLER * facts.default_settings.get('temperature', 1.0):g}"
    controls = (with_setting(plain, cooler), with_setting(plain, _OTHER_SEEDS))
    return ModelSettings(facts, plain, controls, tuple(dict.fromkeys(others)))


def settings_beside(name: str | None, settings: ModelSettings) -> ModelSettings | None:
    """The settings of a masked model that is measured beside another one; None: there is none.

    Args:
        settings: of the model beside it.

    Raises:
        ValueError: as `settings_of_model`; a model that is not masked, or beside one of another medium.
    """
    if name is None:
        return None
    known = settings_of_model(name)
    refuse_unpaired(name, settings.facts, known.facts)
    return known


def refuse_unpaired(name: str, first: PipelineFacts, masked: PipelineFacts) -> None:
    """Refuse, by ValueError, a `--masked` that is not masked, or not of the tokens of a first model that is ordered."""
    same = (first.medium, first.unit) == (masked.medium, masked.unit)
    if not same or MASKED in first.calls or MASKED not in masked.calls:
        raise ValueError(
            f"--masked {name} given; it takes a masked model beside one of the same tokens that decodes in order, such "
            "as --model shapes --masked shapes_masked or --model tunes --masked tunes_masked."
        )


def settings_under(
    texts: Iterable[str], known: ModelSettings, beside: ModelSettings | None, seed: int, **law: Any
) -> list[Setting]:
    """Settings as they are written, each once, under the law of their model but for what is asked for.

    Args:
        known: the settings of the model.
        beside: of the masked model beside it, under its own law.

    Raises:
        ValueError: a setting that cannot be read, or a law out of range.
    """
    from visual_spec.eval.settings import parse_setting

    laws = [one.law_with(**law) for one in (known, beside or known)]
    return [parse_setting(text, laws[is_masked(text)], seed) for text in dict.fromkeys(texts)]


def scale_settings(facts: PipelineFacts, index: Mapping[str, Any], read: Read) -> ModelSettings:
    """The settings of a `ScaleImagePipeline`.

    They are the refiner alone, both models for some numbers of scales, parts of the large model's cache, and both
    together; parts that are too small for the model are left out.

    Args:
        facts: of the pipeline.
        index: its configuration.
        read: of a component its configuration; the tokenizer's says the scales.
    """
    from visual_spec.pipelines.sampler_text import write_sampler

    scales: Sequence[int] = read("vq_model")["scales"]
    count = len(scales)
    paired = _holds(index, "refiner")
    known = index.get("refiner_first_scale")  # what the refiner cannot draw is not measured
    splits = [count - refined for refined in _REFINED if refined < count] if paired else []
    splits = [split for split in splits if known is None or split >= known]
    shares = [share for share in _SHARES if _fits(scales, share)]
    alone = [0] if paired and not known else []
    settings: list[dict[str, object]] = [{"num_draft_scales": split} for split in alone + splits]
    settings += [{"num_draft_scales": "all", "cache_share": share} for share in shares]
    share = _SHARE_OF_TWO if _SHARE_OF_TWO in shares else shares[0]
    settings += [{"num_draft_scales": split, "cache_share": share} for split in splits[1:3]]
    return _beside_plain(facts, (write_sampler("scale-wise", one) for one in settings))


def masked_settings(facts: PipelineFacts, index: Mapping[str, Any], read: Read) -> ModelSettings:
    """The settings of a masked model of sound: decoding as it was saved, and with half of the steps."""
    from visual_spec.pipelines.sampler_text import parse_sampler, write_sampler
    from visual_spec.samplers.masked.masked import MaskedSampler

    plain = facts.plain_sampler
    name, settings = parse_sampler(plain)
    steps = settings.get("steps", MaskedSampler().config["steps"])
    half = [max(1, count // 2) for count in steps] if isinstance(steps, list) else max(1, steps // 2)
    fewer = write_sampler(name, {**settings, "steps": half})
    return ModelSettings(facts, plain, (with_setting(plain, _OTHER_SEEDS),), (fewer,))


def continuous_settings(facts: PipelineFacts, index: Mapping[str, Any], read: Read) -> ModelSettings:
    """The settings of a model of continuous tokens: its rivals at lower cost, and every rule of speculation.

    Rules that compare densities may need noise that the model's chain does not have, or none. Then plain decoding with
    that noise is measured too, because it is their law.

    Args:
        facts: of the pipeline.
        index: its configuration.
        read: of a component its configuration.
    """
    from visual_spec.models.core.continuous import ChainSettings
    from visual_spec.pipelines.sampler_text import parse_sampler, write_sampler

    config = read("transformer")
    name, own = parse_sampler(facts.plain_sampler)
    usual = ChainSettings()

    def value(setting: str) -> Any:
        choice = own.get(setting)
        return config.get(setting, getattr(usual, setting)) if choice is None else choice

    levels, eta, final_noise = (value(setting) for setting in ("head_steps", "eta", "final_noise"))
    # A causal model says in which order; it draws one token a call.
    causal = "order" in config
    calls = config["grid_size"] ** 2 if own.get("steps") is None else own["steps"]
    falling = {"head_steps": min(_FALLING[0], levels), "last_head_steps": min(_FALLING[1], levels)}
    fewer = [] if causal else [{"steps": count} for count in _FEWER_CALLS if count < calls]
    rivals = [
        *fewer,
        *({"head_steps": count} for count in _FEWER_LEVELS if count < levels),
        *({**one, **falling} for one in ({}, *fewer)),
    ]

    # What each kind of rule asks of the chain, as far as the model's own does not have it.
    deterministic = eta == 0 or (eta is None and config.get("head_kind") == "flow")
    steps = {"eta": 1} if deterministic else {}
    last = {} if final_noise else {"final_noise": _FINAL_NOISE}
    still = {} if deterministic and not final_noise else {"eta": 0, "final_noise": 0}
    laws = [one for one in (steps, last, {**steps, **last}, still) if one]
    # Speculation draws one token a call, as far as nothing is accepted.
    chain = {
        key: part
        for key, part in own.items()
        if key in ("order", "guidance", "head_steps", "eta", "final_noise")
    }
    texts = [write_sampler(name, {**own, **one}) for one in [*rivals, *laws]]
    texts += [write_sampler("head-speculation", {**own, **steps, "levels": one}) for one in _LEVELS]
    texts.append(write_sampler("continuous-jacobi", {"rule": "chain", **chain, **last}))
    texts += [
        write_sampler("continuous-jacobi", {"rule": "aligned", "tolerance": one, **chain})
        for one in _TOLERANCES
    ]
    if _holds(index, "drafter"):
        needs = {
            "chain": last, "path": {**steps, **last}, "ode": still, "aligned": {}, "cspd": {**steps, **last},
            "cspd-release": steps,
        }  # fmt: skip
        for rule, more in needs.items():
            for tolerance in [{"tolerance": one} for one in _TOLERANCES] if rule == "aligned" else [{}]:
                if rule != "cspd-release" or not causal:
                    settings = {"rule": rule, **tolerance, **chain, **more}
                    texts.append(write_sampler("speculative-continuous", settings))
    return _beside_plain(facts, texts)


def is_masked(text: str) -> bool:
    """Return whether a setting decodes a masked model."""
    name = text.partition(":")[0].strip()
    return any(entry.name == name and entry.calls == MASKED for entry in all_samplers())


def with_setting(text: str, setting: str) -> str:
    """A setting with one more value, or with none if `setting` is empty."""
    return text + ("," if ":" in text else ":") * bool(setting) + setting


def _holds(index: Mapping[str, Any], component: str) -> bool:
    """Whether a pipeline was saved with this component. One that it lacks is null, missing, or a pair of nulls."""
    return tuple(index.get(component) or (None, None)) != (None, None)


def _fits(scales: Sequence[int], share: float) -> bool:
    from visual_spec.models.next_scale.scale_budget import ScaleBudget

    try:
        ScaleBudget.from_share(scales, 1, share)
    except ValueError:
        return False
    return True
