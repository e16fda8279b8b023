"""Phones to speech by MaskGCT, in the voice of a clip (Wang et al., ICLR 2025).

Phones become semantic codes, those become acoustic codes, and a codec makes waves of them. The program that turns text
into phones stays outside: the caller gives phone ids.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import SeamlessM4TFeatureExtractor, Wav2Vec2BertModel

from visual_spec.models.core.checkpoints import Source
from visual_spec.models.core.offload import at_hand
from visual_spec.models.masked.maskgct import (
    AcousticCondition,
    AcousticDecoder,
    AcousticNetwork,
    SemanticCondition,
    SemanticDecoder,
    SemanticNetwork,
    check_codes,
    check_networks,
)
from visual_spec.models.masked.maskgct_checkpoint import (
    load_acoustic_codec,
    load_acoustic_network,
    load_semantic_codec,
    load_semantic_network,
)
from visual_spec.models.masked.maskgct_codec import AcousticCodec, SemanticCodec
from visual_spec.pipelines.audio_files import Waves, prepare_clip, write_audio
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.output import AudioPipelineOutput
from visual_spec.pipelines.steps import (
    DecodeProgress,
    Generators,
    StepCallback,
    StepListener,
    check_each,
    listed,
    planned_steps,
)
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.checks import check_logprobs
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.trace import DecodeTrace, SampleResult
from visual_spec.samplers.masked.presets import PRESETS
from visual_spec.samplers.registry import check_sampler

Phones = Tensor | np.ndarray | Sequence[int] | Sequence[Tensor | np.ndarray | Sequence[int]]

_LISTENER_RATE = 16_000  # Hz, of the speech model
_OFFICIAL = {  # the files of the networks and codecs, by the kinds of `maskgct_checkpoint`
    "semantic network": "t2s_model/model.safetensors",
    "first acoustic network": "s2a_model/s2a_model_1layer/model.safetensors",
    "acoustic network": "s2a_model/s2a_model_full/model.safetensors",
    "acoustic encoder": "acoustic_codec/model.safetensors",
    "acoustic decoder": "acoustic_codec/model_1.safetensors",
    "semantic codec": "semantic_codec/model.safetensors",
}
_LONGEST = 4096  # frames of a prompt and what follows, of which the networks know the positions


@dataclass
class SpeechPipelineOutput(AudioPipelineOutput):
    """Spoken clips. As `AudioPipelineOutput`; its trace is of the semantic codes.

    Args:
        audios: float32 [B, 1, N], zero after the end of a clip, or (`latent`) the codes.
        codes: LongTensor [B, K, T], zero after the end of a clip.
        lengths: frames of each clip.
        semantic_codes: LongTensor [B, S], zero after the end of a clip; without the prompt's.
        acoustic_trace: of the acoustic codes; None of a call that was ended before them.
    """

    lengths: list[int]
    semantic_codes: Tensor
    acoustic_trace: DecodeTrace | None

    def save(self, path: str | os.PathLike, index: int = 0, *, overwrite: bool = False) -> Path:
        """As `AudioPipelineOutput.save`, without what is after the end of the clip."""
        if self.audios is self.codes:
            return super().save(path, index, overwrite=overwrite)
        samples = self.audios.shape[-1] * self.lengths[index] // max(self.codes.shape[-1], 1)
        return write_audio(path, self.audios[index][..., :samples], self.sampling_rate, overwrite=overwrite)


class MaskgctPipeline(VisualPipeline):
    """Speaks phones in the voice of a clip.

    Args:
        semantic: scores semantic codes.
        acoustic_first, acoustic_rest: score the first acoustic codebook, and the others.
        codec: of the acoustic codes.
        sampler, acoustic_sampler: how the two kinds of codes are decoded, each a `MaskedSampler`.
        speech_encoder: whose features become semantic codes, w2v-BERT 2.0 as transformers loads it. None here or for
            `semantic_codec`: give prompts as codes.
        semantic_codec: makes codes of the features.
        default_guidance_scale, default_temperature, default_top_k: of semantic codes, where a call is given none.
        default_acoustic_temperature, default_acoustic_top_k: of acoustic ones.

    Raises:
        ValueError: networks or codecs of other codes than the rest.

    Example:
        >>> pipe = MaskgctPipeline.from_official("MaskGCT", speech_encoder)
        >>> pipe(phones, prompt_phones, prompt_audio=clip, sampling_rate=16000).save("speech.wav")
    """

    model_cpu_offload_seq = "speech_encoder->semantic_codec->semantic->acoustic_first->acoustic_rest->codec"
    _optional_components = ["speech_encoder", "semantic_codec"]
    _callback_tensor_inputs = ["lengths"]
    _output_types = ("np", "pt", "latent")
    _sample = "clip"
    _each = "samples"
    _needed = ()

    semantic: SemanticNetwork
    acoustic_first: AcousticNetwork
    acoustic_rest: AcousticNetwork
    codec: AcousticCodec
    acoustic_sampler: Any
    speech_encoder: Wav2Vec2BertModel | None
    semantic_codec: Any

    @registers
    def __init__(
        self,
        semantic: SemanticNetwork,
        acoustic_first: AcousticNetwork,
        acoustic_rest: AcousticNetwork,
        codec: AcousticCodec,
        sampler: SchedulerMixin,
        acoustic_sampler: SchedulerMixin,
        speech_encoder: Wav2Vec2BertModel | None = None,
        semantic_codec: SemanticCodec | None = None,
        default_guidance_scale: float = 3.5,
        default_temperature: float = 0.9,
        default_top_k: int = 164,
        default_acoustic_temperature: float = 1.5,
        default_acoustic_top_k: int = 21,
    ):
        check_networks(acoustic_first, acoustic_rest)
        for part, setting, wanted in [
            (semantic, "vocab_size", "semantic_codes"),
            (semantic_codec, "vocab_size", "semantic_codes"),
            (codec, "codebooks", "codebooks"),
            (codec, "vocab_size", "vocab_size"),
        ]:
            if part is not None and part.config[setting] != acoustic_rest.config[wanted]:
                raise ValueError(
                    f"{type(part).__name__} has {part.config[setting]} {wanted}, and acoustic_rest is made for "
                    f"{acoustic_rest.config[wanted]}; load all of one model."
                )

    @classmethod
    def from_official(
        cls,
        folder: str | os.PathLike,
        speech_encoder: Wav2Vec2BertModel | None = None,
        *,
        statistics: Source | None = None,
        num_heads: int = 16,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> Self:
        """A pipeline around official files.

        Args:
            folder: a copy of `amphion/MaskGCT`.
            speech_encoder: `facebook/w2v-bert-2.0`, as transformers loads it; None: prompts are given as codes.
            statistics: `wav2vec2bert_stats.pt`, which lies in the repository of the code; needed with a speech encoder.
            num_heads: of all networks, which cannot be read off the weights.
            dtype: of all weights; None keeps each file's own.
            settings: of the class.

        Raises:
            ValueError, OSError: a file that is missing or none of these; says what it is.
        """
        if (speech_encoder is None) != (statistics is None):
            raise ValueError(
                "one of speech_encoder and statistics given; pass both to read prompts from waves, or none."
            )
        files: dict[str, Source] = {kind: Path(folder) / path for kind, path in _OFFICIAL.items()}
        if statistics is None:
            del files["semantic codec"]
        else:
            files["statistics"] = statistics
        parts = load_parts(files, num_heads=num_heads, dtype=dtype)
        return cls(**parts, **published_samplers(), speech_encoder=speech_encoder, **settings)

    @property
    def sampling_rate(self) -> int:
        """Samples per second."""
        return self.codec.config["sampling_rate"]

    @property
    def frame_rate(self) -> float:
        """Frames of codes per second, semantic and acoustic ones."""
        return self.codec.frame_rate

    # -- input ---------------------------------------------------------------------------------------------------------

    def phone_ids(self, phones: object) -> list[Tensor]:
        """Return phone ids, long [P] of each sample.

        Raises:
            ValueError: text, or no ids of this model.
        """
        rows = list(phones) if isinstance(phones, Sequence) and not isinstance(phones, str) else [phones]
        if rows and all(type(row) is int for row in rows):
            rows = [rows]
        if any(isinstance(row, str) for row in rows):
            raise ValueError(
                "text given, but MaskGCT reads phone ids; turn the text into phones with the program that the model "
                "was trained with (Amphion's g2p), and call the pipeline from Python."
            )
        most = self.semantic.config["phones"] - 1
        phone_ids = []
        for row in rows:
            ids = torch.as_tensor(row)
            bad = ids.ndim != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool
            if bad or int(ids.min()) < 0 or int(ids.max()) >= most:
                raise ValueError(
                    f"phones {row!r} given; pass a list of ids from 0 to {most - 1} for each sample."
                )
            phone_ids.append(ids.long())
        if not phone_ids:
            raise ValueError("no phones given; pass a list of ids for each sample.")
        return phone_ids

    @torch.no_grad()
    def encode_clip(self, audio: Waves, sampling_rate: int | None) -> tuple[Tensor, Tensor]:
        """Return the semantic codes, long [Q], and the acoustic ones, long [P, K], of a clip.

        Args:
            audio: [N] or [C, N], array or tensor.
            sampling_rate: of the clip, in Hz.

        Raises:
            ValueError: as `prepare_clip`; or a pipeline without a speech encoder.
        """
        if self.speech_encoder is None or self.semantic_codec is None:
            raise ValueError(
                "this pipeline has no speech_encoder and semantic_codec; set them, or give prompt_semantic and "
                "prompt_acoustic, the codes of the clip."
            )
        heard = prepare_clip(audio, sampling_rate, rate=_LISTENER_RATE, channels=1)
        waves = prepare_clip(audio, sampling_rate, rate=self.sampling_rate, channels=1)
        if len(heard) != 1:
            raise ValueError(f"{len(heard)} clips given as one prompt; pass a list of clips.")
        # The settings of w2v-BERT 2.0; the padding value reaches the last frame of a clip of odd length.
        extract = SeamlessM4TFeatureExtractor(padding_value=1.0)
        inputs = extract(heard[0, 0].numpy(), sampling_rate=_LISTENER_RATE, return_tensors="pt")
        device = self._execution_device
        with at_hand(self.speech_encoder):
            features = self.speech_encoder(
                input_features=inputs["input_features"].to(device, self.speech_encoder.dtype),
                attention_mask=inputs["attention_mask"].to(device),
                output_hidden_states=True,
            ).hidden_states[self.semantic_codec.config["feature_layer"]]
        semantic = self.semantic_codec.encode(features)[0]
        return semantic, self.codec.encode(waves.to(device))[0].transpose(0, 1)

    def _prompts(
        self,
        count: int,
        audio: Waves | list[Waves] | None,
        sampling_rate: int | None,
        prompt_semantic: Tensor | list[Tensor] | None,
        prompt_acoustic: Tensor | list[Tensor] | None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Codes of the prompts, one a sample."""
        if (audio is None) == (prompt_semantic is None) or (prompt_semantic is None) != (
            prompt_acoustic is None
        ):
            raise ValueError(
                "pass the prompt as prompt_audio, or as both prompt_semantic and prompt_acoustic."
            )
        semantic, acoustic = listed(prompt_semantic), listed(prompt_acoustic)
        if audio is not None:
            pairs = [self.encode_clip(clip, sampling_rate) for clip in listed(audio)]
            semantic, acoustic = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if len(semantic) != len(acoustic):
            raise ValueError(
                f"{len(semantic)} semantic and {len(acoustic)} acoustic prompts; pass both of each."
            )
        check_each(len(semantic), "prompts", count, "samples")
        semantic, acoustic = semantic * (count // len(semantic)), acoustic * (count // len(acoustic))
        books = self.acoustic_rest.config["codebooks"]
        if any(codes.ndim != 1 for codes in semantic) or any(
            codes.shape[1:] != (books,) for codes in acoustic
        ):
            shapes = [
                (tuple(codes.shape), tuple(other.shape))
                for codes, other in zip(semantic, acoustic, strict=True)
            ]
            raise ValueError(
                f"prompts of shapes {shapes} given; pass semantic codes [Q], and acoustic ones [P, {books}]."
            )
        check_codes("prompt_semantic", semantic, self.semantic.config["vocab_size"])
        check_codes("prompt_acoustic", acoustic, self.acoustic_rest.config["vocab_size"])
        device = self._execution_device
        return [codes.to(device) for codes in semantic], [codes.to(device) for codes in acoustic]

    def _lengths(
        self,
        seconds: float | Sequence[float] | None,
        phones: list[Tensor],
        prompt_phones: list[Tensor],
        prompts: list[Tensor],
        heard: list[Tensor],
    ) -> list[int]:
        """Semantic codes to decode, of each sample."""
        if seconds is None:  # as many a phone as the prompt has
            counts = [
                len(codes) * len(own) // len(before)
                for own, before, codes in zip(phones, prompt_phones, prompts, strict=True)
            ]
        else:
            each = list(seconds) if isinstance(seconds, Sequence) else [seconds] * len(phones)
            if len(each) != len(phones):
                raise ValueError(
                    f"{len(each)} lengths for {len(phones)} samples; pass one for all, or one for each."
                )
            counts = [int(one * self.frame_rate) for one in each]
        for codes, frames, count in zip(prompts, heard, counts, strict=True):
            # The two kinds of codes of a prompt may differ by a frame.
            least, most = max(1, len(frames) - len(codes) + 1), _LONGEST - len(codes)
            if not least <= count <= most:
                raise ValueError(
                    f"audio_length_in_s makes {count} frames after a prompt of {len(codes)}; pass {least} to {most} "
                    f"frames, of {1 / self.frame_rate:g} s."
                )
        return counts

    def check_call(self, phones: object = None, *args: Any, **kwargs: Any) -> None:
        self.phone_ids(phones)  # first of all: a command passes text
        super().check_call(phones, *args, **kwargs)

    # -- speaking ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(
        self,
        phones: Phones,
        prompt_phones: Phones,
        *,
        prompt_audio: Waves | list[Waves] | None = None,
        sampling_rate: int | None = None,
        prompt_semantic: Tensor | list[Tensor] | None = None,
        prompt_acoustic: Tensor | list[Tensor] | None = None,
        audio_length_in_s: float | Sequence[float] | None = None,
        guidance_scale: float | None = None,
        guidance_rescale: float = 0.75,
        temperature: float | None = None,
        top_k: int | None = None,
        acoustic_temperature: float | None = None,
        acoustic_top_k: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "np",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        output_logprobs: bool = False,
    ) -> SpeechPipelineOutput:
        """Speak.

        Args:
            phones: phone ids of what is to be said: a list, or one for each sample.
            prompt_phones: phones of the words in the prompt; one list for all samples, or one for each.
            prompt_audio, sampling_rate: the clip whose voice speaks, [N] or [C, N], and its rate in Hz; one for all
                samples, or a list of one for each.
            prompt_semantic, prompt_acoustic: its codes in place of the clip, long [Q] and [P, K], as `encode_clip`
                gives them; likewise one or a list.
            audio_length_in_s: of what is said, without the prompt; one for all, or one for each. None: as long a phone
                as in the prompt.
            guidance_scale: of the features of all networks, see `SemanticCondition`; the published 2.5 is 3.5 here.
            guidance_rescale: see `SemanticCondition`.
            temperature, top_k, acoustic_temperature, acoustic_top_k: the laws of the codes. None: the defaults.
            generator: one `torch.Generator` for the batch, or a list of one per sample. With a list, a clip depends on
                its own generator only.
            output_type, return_dict: "np", "pt", or "latent" for the codes [B, K, T]; False returns a tuple.
            callback_on_step_end: called as (pipe, step, timestep, kwargs) after every target call of both stages, whose
                steps are counted on; `timestep` is the number of codes that the slowest sample has in its stage. It
                returns None, or `kwargs` unchanged. After `pipe._interrupt = True` the call ends, with clips of no
                length.
            callback_on_step_end_tensor_inputs: which tensors `kwargs` holds: "lengths", codes committed [B].
            output_logprobs: keep the log-probability of each code in both traces: semantic [B, S], acoustic
                [B, T, K]; nan after the end of a clip. `model_logprobs` are under the guided networks: guidance moves
                features, no law.

        Raises:
            ValueError, TypeError: bad input, before any decoding.
            FloatingPointError: a network gave non-finite logits; names the slot.
        """
        rows, before = self.phone_ids(phones), self.phone_ids(prompt_phones)
        check_each(len(before), "prompt_phones", len(rows), "samples")
        before = before * (len(rows) // len(before))
        own = self.default_settings()
        law = TokenLaw(
            temperature=own["temperature"] if temperature is None else temperature,
            top_k=own["top_k"] if top_k is None else top_k,
        )
        guidance = own["guidance_scale"] if guidance_scale is None else guidance_scale
        acoustic = {"temperature": acoustic_temperature, "top_k": acoustic_top_k}
        for name, value in acoustic.items():
            acoustic[name] = self.config[f"default_acoustic_{name}"] if value is None else value
        listener = StepListener(self, callback_on_step_end, callback_on_step_end_tensor_inputs)
        self.check_inputs(rows, 1, law, generator, output_type)
        check_sampler(self.acoustic_sampler, self.calls)
        if output_logprobs:
            check_logprobs(self.sampler)
            check_logprobs(self.acoustic_sampler)
        with self.running():
            semantic, heard = self._prompts(
                len(rows), prompt_audio, sampling_rate, prompt_semantic, prompt_acoustic
            )
            lengths = self._lengths(audio_length_in_s, rows, before, semantic, heard)
            said = [torch.cat(pair) for pair in zip(before, rows, strict=True)]
            condition = SemanticCondition(said, semantic, lengths, guidance, guidance_rescale)
            laws = law, TokenLaw(**acoustic)
            trace, semantic, codes, frames, acoustic_trace = self.draw_codes(
                condition, heard, laws, generator, listener, output_logprobs
            )
            audios = codes if output_type == "latent" else self._waves(codes, frames, output_type)
        made: Any = (audios, self.sampling_rate, codes, trace, frames, semantic, acoustic_trace)
        return SpeechPipelineOutput(*made) if return_dict else made[:4]

    def draw_codes(
        self,
        condition: SemanticCondition,
        heard: list[Tensor],
        laws: tuple[TokenLaw, TokenLaw],
        generator: Generators,
        listener: StepListener,
        output_logprobs: bool = False,
    ) -> tuple[DecodeTrace, Tensor, Tensor, list[int], DecodeTrace | None]:
        """Decode semantic codes, and acoustic ones of them, beside progress bars.

        Args:
            heard: the acoustic codes [P, K] of each prompt.
            laws: of both stages.
            listener: what tells the callback about steps.
            output_logprobs: as of the samplers.

        Returns:
            The trace of the semantic codes, these [B, S], the acoustic ones [B, K, T], the frames of each clip, and the
            trace of the acoustic codes, None where the call was ended before them.
        """
        count, longest = len(condition.prompts), max(condition.lengths)
        first_stage = self.sampler, SemanticDecoder(self.semantic, longest), laws[0]
        second, decoder = self.acoustic_sampler, self._acoustic_decoder(longest)
        if isinstance(second, Sampler):  # refused before the first stage draws
            second.check(decoder, laws[1], count, {})
        self._guidance_scale = condition.guidance_scale
        stages = (first_stage, (second, decoder, laws[1]))
        self._num_timesteps = sum(planned_steps(sampler, one, {}, longest) for sampler, one, _ in stages)
        result = self._decode_stage(*first_stage, condition, generator, listener, 0, output_logprobs)
        self.last_trace = trace = result.trace
        semantic, acoustic_trace, frames = result.tokens, None, [0] * count
        books = self.acoustic_rest.config["codebooks"]
        codes = torch.zeros(count, books, 0, dtype=torch.long, device=semantic.device)
        if not trace.stopped:
            rows = [row[:length] for row, length in zip(semantic, condition.lengths, strict=True)]
            whole = [torch.cat(pair) for pair in zip(condition.prompts, rows, strict=True)]
            sounds = AcousticCondition(whole, heard, condition.guidance_scale, condition.guidance_rescale)
            decoder, first = self._acoustic_decoder(max(sounds.lengths)), int(trace.target_calls.max())
            result = self._decode_stage(
                second, decoder, laws[1], sounds, generator, listener, first, output_logprobs
            )
            acoustic_trace = result.trace
            if not acoustic_trace.stopped:
                codes, frames = result.tokens.transpose(1, 2), sounds.lengths
        return trace, semantic, codes, frames, acoustic_trace

    def _acoustic_decoder(self, num_frames: int) -> AcousticDecoder:
        return AcousticDecoder(self.acoustic_first, self.acoustic_rest, num_frames)

    def _waves(self, codes: Tensor, frames: list[int], output_type: str) -> Tensor | np.ndarray:
        """Waves [B, 1, N] of codes [B, K, T], of each sample its `frames`."""
        waves = [
            self.codec.decode(row[None, :, :length])[0, 0].float().cpu() if length else torch.zeros(0)
            for row, length in zip(codes, frames, strict=True)
        ]
        audios = pad_sequence(waves, batch_first=True)[:, None]
        return audios if output_type == "pt" else audios.numpy()

    def _decode_stage(
        self,
        sampler: Any,
        decoder: SemanticDecoder | AcousticDecoder,
        law: TokenLaw,
        condition: SemanticCondition | AcousticCondition,
        generator: Generators,
        listener: StepListener,
        first: int,
        output_logprobs: bool,
    ) -> SampleResult:
        """Run one stage, whose calls count on from `first`."""
        frames, count = decoder.grid.width, len(condition.prompts)
        known = decoder.known_tokens(condition.lengths, self._execution_device)

        def listen(step: int, lengths: Tensor) -> str | Tensor | None:
            return listener.of_tokens(first + step, lengths)

        with self.progress_bar(total=count * frames) as bar:  # type: ignore[call-arg]
            progress = DecodeProgress(bar, frames, listen, unit="codes")
            result = sampler(
                decoder,
                condition,
                law=law,
                batch_size=count,
                generator=generator,
                callback=progress,
                known_tokens=known,
                **({"output_logprobs": True} if output_logprobs else {}),
            )
            progress.finish()
        return result


def published_samplers() -> dict[str, Any]:
    """The samplers of both stages, as published."""
    return {
        "sampler": PRESETS["maskgct"].sampler(),
        "acoustic_sampler": PRESETS["maskgct-acoustic"].sampler(),
    }


def load_parts(
    files: Mapping[str, Source], *, num_heads: int = 16, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Components of official files by their kind, of those that there are; other arguments as of `from_official`.

    Raises:
        ValueError, OSError: a codec without its other half, or a file that is none of these; says what it is.
    """
    networks = {
        "semantic": ("semantic network", load_semantic_network),
        "acoustic_first": ("first acoustic network", load_acoustic_network),
        "acoustic_rest": ("acoustic network", load_acoustic_network),
    }
    codecs = {
        "codec": ("acoustic encoder", "acoustic decoder", load_acoustic_codec),
        "semantic_codec": ("semantic codec", "statistics", load_semantic_codec),
    }
    for one, other, _ in codecs.values():
        if (one in files) != (other in files):
            raise ValueError(f"one of MaskGCT's {one} and {other} given; pass both, which make one model.")
    parts: dict[str, Any] = {
        name: load(files[kind], num_heads=num_heads, dtype=dtype)
        for name, (kind, load) in networks.items()
        if kind in files
    }
    return parts | {
        name: load(files[one], files[other], dtype=dtype)
        for name, (one, other, load) in codecs.items()
        if one in files
    }
