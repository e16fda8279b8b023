"""What all pipelines share: what they are, where they compute, and what each of their calls checks and reports."""

import inspect
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LoraBaseMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import Tensor

from visual_spec.families import all_pipelines, family_of
from visual_spec.models.core.offload import align_weights
from visual_spec.models.core.saved import quantised_as
from visual_spec.models.core.settings import LAW_DEFAULTS, whole
from visual_spec.pipelines.saved_index import LoadsPipelines
from visual_spec.pipelines.steps import ONLY_CHECKED, Checked, Generators, Laws, Streams
from visual_spec.records import AsSaved, PipelineFacts
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.checks import check_logprobs
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import check_generators
from visual_spec.samplers.core.trace import IDENTICAL, PLAIN
from visual_spec.samplers.registry import all_samplers, check_sampler


def _fact(name: str, meaning: str) -> property:
    """A property of a pipeline that its `facts` tell."""
    return property(lambda pipe: getattr(pipe.facts, name), doc=meaning)


class VisualPipeline(Streams, LoadsPipelines, LoraBaseMixin, DiffusionPipeline):
    """A `DiffusionPipeline` around a token sampler.

    Every constructor refuses a component that could not be saved (TypeError). `from_pretrained` takes the name of an
    embedded model ("shapes"), a folder written by `save_pretrained`, or a Hub id ("owner/name").
    """

    __call__: Callable[..., Any]  # of each class
    _lora_loadable_modules = ["transformer"]
    transformer: Any
    sampler: Any
    drafter: Any = None
    last_trace: Any = None
    _guidance_scale: float | list[float] | None = None  # of the call that runs, or ran last
    _num_timesteps: int = 0
    _steps_made: int = 0
    _interrupt: bool = False
    _is_running: bool = False
    _own_sampler: Any = None  # that it was made or loaded with
    _facts: tuple[object, PipelineFacts] | None = None  # with the settings that they were read of
    _fitting_drafter = "an EagleDrafter trained for this model (python -m visual_spec.training.drafter)"
    _output_types: tuple[str, ...] = ("pil", "np", "pt", "latent")
    _sample = "picture"  # what it makes, where a generator belongs to each
    _each = "num_images_per_prompt"  # the argument of a call that says how many of each
    _needed: tuple[str, ...] = ("transformer", "sampler")  # components that a call needs

    # -- what it is ----------------------------------------------------------------------------------------------------

    @classmethod
    def facts_of(cls, settings: Mapping[str, object], sampler: Mapping[str, object]) -> PipelineFacts:
        """What a pipeline of this class is, with these settings and this sampler: what the table of its families says.

        Args:
            settings: of the pipeline, as in its model_index.json.
            sampler: the configuration of its sampler, as it is saved.
        """
        kind = next((one.__name__ for one in cls.__mro__ if one.__name__ in all_pipelines()), None)
        if kind is None:
            raise NotImplementedError(f"{cls.__name__} does not say what it is; give it a method facts_of.")
        family = family_of(kind, settings, sampler)
        return PipelineFacts(
            medium=all_pipelines()[kind].medium,
            unit=family.unit,
            calls=family.calls,
            plain_sampler=_written(family.plain, sampler),
            fast_sampler=_written(family.fast or family.plain, sampler),
            shorter_sampler=family.shorter,
            default_settings=cls._saved_law(settings),
            comparable=family.comparable,
            stored_as=family.stored_as,
        )

    @property
    def facts(self) -> PipelineFacts:
        """What this pipeline is, with the sampler that it has now. Read again when the settings of either change."""
        as_saved = _as_saved(self.sampler)
        if self._facts is None or self._facts[0] != (self.config, as_saved):
            self._facts = (self.config, as_saved), self.facts_of(self.config, as_saved)
        return self._facts[1]

    @property
    def plain(self) -> Sampler:
        """The sampler of the model's plain decoding, as the sampler that it was made or saved with defines its law."""
        own = self._own_sampler
        facts = self.facts if own is self.sampler else self.facts_of(self.config, _as_saved(own))
        plain = {entry.name: entry.class_name for entry in all_samplers()}.get(facts.plain_sampler)
        if plain == type(own).__name__ and own.keeps == IDENTICAL:  # it decodes plainly itself
            return own
        from visual_spec.pipelines.sampler_text import plain_beside

        return plain_beside(facts.plain_sampler, own)

    medium = _fact("medium", 'What it makes: "image", "video" or "audio".')
    unit = _fact("unit", 'What a call commits, in the plural: "tokens", "columns" or "scales".')
    calls = _fact("calls", "The kinds of calls that its model answers (`visual_spec.samplers.registry`).")
    plain_sampler = _fact("plain_sampler", "Its plain decoding, as on the command line.")
    fast_sampler = _fact(
        "fast_sampler", "What `visual_spec.accelerate` sets when no sampler is named, as on the command line."
    )
    comparable = _fact(
        "comparable", "Whether an accelerated decoding is compared with the plain one; masked models are not."
    )
    stored_as = _fact("stored_as", 'What keeps a sample: its token "ids", or the finished "canvas".')

    def default_settings(self) -> dict[str, Any]:
        """The law's settings where a call names none: guidance_scale, temperature, top_k and top_p."""
        return dict(self.facts.default_settings)

    @classmethod
    def _saved_law(cls, settings: Mapping[str, object]) -> dict[str, Any]:
        """The law's settings that were saved, or the constructor's (`default_<name>`), or `TokenLaw`'s."""
        usual = inspect.signature(cls.__init__).parameters
        law = {}
        for name in LAW_DEFAULTS:
            key = f"default_{name}"
            own = usual[key].default if key in usual else getattr(TokenLaw, name)
            law[name] = settings.get(key, own) if key in usual else own
        return law

    def make_law(
        self,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance_until: int | None = None,
        **others: Any,
    ) -> TokenLaw:
        """The law of a token.

        Args:
            guidance_scale, temperature, top_k, top_p, guidance_until, others: as for `TokenLaw`; None is the default of
                this pipeline.

        Raises:
            ValueError: a value out of its range.
        """
        named = dict(guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p)
        chosen = {**named, "guidance_until": guidance_until, **others}
        asked = {name: value for name, value in chosen.items() if value is not None}
        return TokenLaw(**{**self.facts.default_settings, **asked})

    @property
    def guidance_scale(self) -> float | list[float] | None:
        """Guidance of the call that runs, or ran last; the default before the first call."""
        own = self._guidance_scale
        return self.default_settings().get("guidance_scale") if own is None else own

    @property
    def num_timesteps(self) -> int:
        """How often the call that ran last called its callback.

        While a call runs: how often it will, where the sampler's settings say it; else the tokens or columns of a
        sample.
        """
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        """Whether the call that runs is to end: set `pipe._interrupt = True` in a callback or in another thread.

        It ends after the target call at work, and returns what is there. The next call clears it.
        """
        return self._interrupt

    # -- saving, moving and adapters -----------------------------------------------------------------------------------

    def save_config(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """As `ConfigMixin.save_config`; `save_pretrained` calls it. Also writes `pipeline.py` and a model card."""
        from visual_spec.pipelines.card import write_companions

        super().save_config(save_directory, push_to_hub, **kwargs)
        write_companions(self, Path(save_directory))

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As `DiffusionPipeline.save_pretrained`. A kill in between leaves no half-written file, and components of two
        saves are never taken for one pipeline (`written_whole`).

        Raises:
            NotADirectoryError: there is a file at `save_directory`.
        """
        if kwargs.get("push_to_hub"):
            return super().save_pretrained(save_directory, *args, **kwargs)
        from visual_spec.files.whole import written_whole
        from visual_spec.pipelines.card import COMPANIONS

        with written_whole(save_directory) as folder:
            for name in COMPANIONS:  # somebody's own stay as they are
                if (Path(save_directory) / name).is_file():
                    shutil.copy2(Path(save_directory) / name, folder / name)
            super().save_pretrained(folder, *args, **kwargs)

    def register_modules(self, **kwargs: Any) -> None:
        """Add components; refuses those that `save_pretrained` would drop without a word.

        Raises:
            TypeError: a component is no ModelMixin, PreTrainedModel or SchedulerMixin.
        """
        for name, component in kwargs.items():
            # Components that are not loaded come as None, or as the pair (None, None) that stands for it.
            if component is None or isinstance(component, (tuple, list)):
                continue
            if not hasattr(component, "save_pretrained"):
                raise TypeError(
                    f"{name} is a {type(component).__name__}, which cannot be saved with the pipeline; pass a "
                    "diffusers ModelMixin or SchedulerMixin, or a transformers PreTrainedModel."
                )
        super().register_modules(**kwargs)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "sampler" and self._own_sampler is None:
            self.__dict__["_own_sampler"] = value
        if isinstance(value, torch.nn.Module):
            align_weights(value)  # other libraries' loaders leave weights where the file has them
        # A component that began as None stays "(None, None)" in diffusers' configuration, and so is lost at the next
        # save; registering it anew records its class.
        recorded = (self.__dict__.get("_internal_dict") or {}).get(name)
        if recorded is not None and isinstance(value, (str, int, float, dict)):
            named = ", or name it to visual_spec.accelerate(pipe, name)" if name == "sampler" else ""
            raise TypeError(f"{name} is {value!r}; pass the object itself{named}.")
        if value is not None and isinstance(recorded, (tuple, list)) and list(recorded) == [None, None]:
            self.register_modules(**{name: value})
        else:
            super().__setattr__(name, value)

    def enable_group_offload(self, *args: Any, **kwargs: Any) -> None:
        """As `DiffusionPipeline.enable_group_offload`; on disk with a folder for each component.

        diffusers names the files of all components alike, and one would read what another wrote.
        """
        taken = (
            inspect.signature(DiffusionPipeline.enable_group_offload).bind(self, *args, **kwargs).arguments
        )
        folder = taken.get("offload_to_disk_path")
        if folder is None:
            return super().enable_group_offload(*args, **kwargs)
        taken = {name: value for name, value in taken.items() if name != "self"}
        left_out = taken.get("exclude_modules") or []
        left_out = [left_out] if isinstance(left_out, str) else list(left_out)
        modules = [name for name, part in self.components.items() if isinstance(part, torch.nn.Module)]
        for name in modules:
            others = [other for other in modules if other != name]
            own = {"offload_to_disk_path": str(Path(folder) / name), "exclude_modules": left_out + others}
            if name not in left_out:
                super().enable_group_offload(**taken | own)

    def load_lora_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        pretrained_model_name_or_path_or_dict: str | os.PathLike | Mapping[str, Tensor],
        adapter_name: str | None = None,
        *,
        weight_name: str | None = None,
    ) -> None:
        """Add a LoRA adapter to the transformer, and make it the active one.

        The rest is as in diffusers (`set_adapters`, `disable_lora`, `unload_lora_weights` ...). Samplers that are
        lossless, or identical to plain decoding, are so for the adapted model's own law.

        Args:
            pretrained_model_name_or_path_or_dict: a `.safetensors` file of diffusers or PEFT, a folder or Hub id with
                one, or its tensors.
            weight_name: the file, where a folder holds several.

        Raises:
            ImportError, OSError: PEFT is not installed, or there is no such file.
            ValueError: the transformer takes no adapters, or not this one; names the layers.
        """
        from visual_spec.pipelines.lora import load_adapter

        load_adapter(self.transformer, pretrained_model_name_or_path_or_dict, adapter_name, weight_name)

    def save_lora_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, save_directory: str | os.PathLike, adapter_name: str = "default"
    ) -> None:
        """Write an adapter as a file for `load_lora_weights`; an error leaves what is there."""
        from visual_spec.files.whole import written_whole

        with written_whole(save_directory) as folder:
            self.transformer.save_lora_adapter(os.fspath(folder), adapter_name)

    def fuse_lora(self, components: Sequence[str] = ("transformer",), **kwargs: Any) -> None:
        """Add the active adapters to the weights, so that calls are as fast as without.

        Raises:
            ValueError: weights are quantised, and what an adapter adds would be rounded away.
        """
        for name in components:
            if (kind := quantised_as(getattr(self, name))) is not None:
                raise ValueError(
                    f"the weights of {name} are quantised ({kind}); leave the adapter unfused, or fuse it before they "
                    "are quantised."
                )
        super().fuse_lora(components=list(components), **kwargs)

    def unfuse_lora(self, components: Sequence[str] = ("transformer",), **kwargs: Any) -> None:
        """Take them off again."""
        super().unfuse_lora(components=list(components), **kwargs)

    def update_weights(
        self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], component: str = "transformer"
    ) -> None:
        """Write new weights over a component's own, as training makes them, without a new model, graph or cache.

        Numbers are copied in place, after all of them were checked: an error changes nothing. They are those of a
        pipeline that was made with them, so the next call draws the same tokens as such a one. Joined projections, tied
        weights and compiled or recorded calls follow; so do weights quantised by `quantization_config`, which are
        quantised anew. A drafter stays as it is: one that falls out of date costs calls, and changes no token or law.

        Args:
            weights: a state dict of the same keys and shapes, or pairs of a key and a tensor (the `load_weights` of
                vLLM and of verl), which are copied as they come: until the end there are twice the weights. Tensors may
                be on any device and of any floating type of at least 16 bits, which is cast to the component's; those
                that are sharded (DTensor) are made whole, by all processes together. What DDP, FSDP, torch.compile and
                PEFT add to keys is ignored. Of tied weights one key is enough.
            component: such as "vq_model", "text_encoder" or "drafter".

        Raises:
            ValueError: missing, unexpected, mis-shaped or mis-typed keys, all in one error; numbers that are not
                finite; weights that cannot be written where they are (fused adapters, groups offloaded to disk).
            TypeError: something else than tensors by name.
            RuntimeError: a call of this pipeline is at work, such as a stream that was not read to its end.
        """
        from visual_spec.pipelines.weights import replace_weights

        models = {name: one for name, one in self.components.items() if isinstance(one, torch.nn.Module)}
        if component not in models:
            raise ValueError(f"component={component!r}; pass one of {', '.join(models)}.")
        if self._is_running:
            raise RuntimeError("a call of this pipeline is at work; update its weights when it has ended.")
        replace_weights(models[component], weights, component)

    # -- a call --------------------------------------------------------------------------------------------------------

    def check_call(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what a call with these arguments refuses before any computation.

        Raises:
            ValueError, TypeError: names what was given, what is allowed, and what to do.
        """
        before = ONLY_CHECKED.set(True)
        try:
            self(*args, **kwargs)
        except Checked:
            pass
        finally:
            ONLY_CHECKED.reset(before)

    def check_inputs(
        self, source: Sized, each: int, law: Laws, generator: Generators, output_type: str
    ) -> None:
        """Refuse what cannot be drawn or played, before any computation.

        Args:
            source: what the samples are drawn from: `Texts`, a list of class numbers, ...
            each: samples of each of them.
            law: of a token.
            generator, output_type: as in `__call__`.

        Raises:
            ValueError, TypeError: names what was given, what is allowed, and what to do.
        """
        self.check_complete(*self._needed)
        self._check_kind()  # whether the sampler decodes this very model, it checks itself
        self.check_drafter()
        whole(self._each, each)
        if output_type not in self._output_types:
            raise ValueError(f"output_type={output_type!r}; pass one of {', '.join(self._output_types)}.")
        check_generators(generator, len(source) * each, self._sample)

    def check_logprobs(self, asked: bool) -> None:
        """Refuse `output_logprobs` of a sampler that does not keep them; ValueError."""
        if asked:
            check_logprobs(self.sampler)

    @contextmanager
    def running(self) -> Generator[None]:
        """What computes in a call runs inside: it counts the steps, and sends offloaded models back at its end."""
        if ONLY_CHECKED.get():
            raise Checked
        self._interrupt, self._steps_made, self._is_running = False, 0, True
        before = PLAIN.set(lambda: self.plain)
        try:
            yield
        finally:
            self._is_running = False
            PLAIN.reset(before)
        self._num_timesteps = self._steps_made
        self.maybe_free_model_hooks()

    def check_complete(self, *names: str) -> None:
        """Refuse to draw or play without one of these components.

        Raises:
            ValueError: names those that are missing.
        """
        missing = [name for name in names if getattr(self, name, None) is None]
        if missing:
            raise ValueError(
                f"this pipeline was loaded without its {' and '.join(missing)}; set pipe.{missing[0]}, or load it "
                "whole. Without it, it encodes prompts only."
            )

    def check_sampler(self) -> None:
        """Refuse a sampler that does not decode this model, or one that lacks its drafter; the sampler looks, too.

        Raises:
            TypeError: `pipe.sampler` is of another kind; names those that fit.
            ValueError: it drafts with a second model, and there is none; or it refuses this model or another part.
        """
        self._check_kind()
        self.check_drafter()
        if isinstance(self.sampler, Sampler) and (parts := self._decoded()) is not None:
            # Under a law without settings: what a call asks for is checked in the call.
            model, others = parts
            self.sampler.check(model, TokenLaw(), 1, others)

    def _check_kind(self) -> None:
        try:
            check_sampler(self.sampler, self.calls)
        except TypeError:  # what the model answers may be known by the sampler alone that it came with
            check_sampler(self.sampler, self.facts_of(self.config, _as_saved(self._own_sampler)).calls)

    def _setting(self, name: str) -> Any:
        """A setting of the sampler; None where it has no such setting."""
        return getattr(self.sampler, "config", {}).get(name)

    def _check_parts(self) -> None:
        """Refuse components that do not fit each other. Runs at the end of a constructor."""

    def _decoded(self) -> tuple[object, dict[str, Any]] | None:
        """The model that the sampler decodes, and what it takes beside; None where that is not known before a call."""
        return None

    def check_drafter(self) -> None:
        """Refuse a sampler that lacks its drafter.

        Raises:
            ValueError: it drafts with a second model, and there is none; says what fits.
        """
        if getattr(self.sampler, "needs_drafter", False) and self.drafter is None:
            raise ValueError(
                f"{type(self.sampler).__name__} needs a drafter, and this pipeline has none; set pipe.drafter, to "
                f"{self._fitting_drafter} or a smaller model of the same tokens."
            )


def _as_saved(sampler: object) -> dict[str, Any]:
    """The configuration of a sampler as its file holds it."""
    return {**getattr(sampler, "config", {}), "_class_name": type(sampler).__name__}


def _written(choice: str | AsSaved, sampler: Mapping[str, object]) -> str:
    """The text of a family's sampler beside the saved one."""
    if isinstance(choice, str):
        return choice
    from visual_spec.pipelines.sampler_text import as_saved

    return as_saved(choice, sampler)
