"""Any causal language model of transformers that writes codes, as a next-token model.

Models of music, speech and pictures are often plain language models (Llama, Qwen) whose vocabulary holds the codes of a
tokenizer beside text: ACE-Step's and YuE2's, Orpheus, Llasa, CosyVoice's, Liquid, Emu3.5. They read a prompt, and write
codes up to an end. `CodeLanguageModel` scores the codes and the end only, so the head computes these rows alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.protocol import TokenGrid, wide
from visual_spec.models.core.transformers_cache import (
    ImagePrompt,
    Prompt,
    SlotCache,
    attention_mask,
    cache_argument,
)
from visual_spec.models.next_token.cached_decoder import CachedDecoder
from visual_spec.models.next_token.length_limits import (
    handled_window,
    length_limits,
    local_window,
    strange_layers,
)

Ranges = tuple[tuple[int, int], ...]

_TRIED, _NEW = 3, 8  # slots of the windows by which a model is tried, and new tokens of its texts
_LONGEST = 1024  # places of these texts at most
# Of the largest logit; types of fewer bits: 0.05. "eager" attention takes its softmax in float32 in any type.
_NEAR = {torch.float64: 1e-6, torch.float32: 1e-3}


def code_ranges(codes: object) -> Ranges:
    """Return half-open ranges of ids, from (first, last + 1) or several of them.

    Raises:
        ValueError: another kind of value, an empty range, or ranges that overlap; names it.
    """
    listed = [codes] if isinstance(codes, Sequence) and codes and isinstance(codes[0], int) else codes
    advice = "pass (first, last + 1), or a list of such pairs that do not overlap"
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise ValueError(f"codes={codes!r}; {advice}.")
    ranges = []
    for pair in listed:
        whole = isinstance(pair, Sequence) and [type(bound) for bound in pair] == [int, int]
        if not whole or not 0 <= pair[0] < pair[1]:
            raise ValueError(f"codes={codes!r}: {pair!r} is no range of ids; {advice}.")
        ranges.append(tuple(pair))
    ordered = sorted(ranges)
    if any(before[1] > after[0] for before, after in zip(ordered, ordered[1:], strict=False)):
        raise ValueError(f"codes={codes!r} overlap; {advice}.")
    return tuple(ordered)


class CodeLanguageModel(CachedDecoder):
    """The codes of a causal language model of transformers, which does not change.

    Token t is the t-th code in ascending order of ids. The end, if it is no code, is the last token.

    Args:
        model: of transformers, with a head over its vocabulary.
        codes: (first, last + 1), the ids of the codes, or several such ranges.
        end: the id that ends a text; None: texts fill the slots.
        new_tokens: L, most tokens of a text, its end included.
        normalised: logits are log-probabilities over the whole vocabulary, as transformers' guidance makes them before
            it mixes rows. Rules that look at the sign of a score see the difference. The whole head is then computed.

    Attributes:
        ids_of: long [V], the ids of the tokens.
        num_ids: number of ids that a text may hold.
        end: the token of the end, or None.

    Raises:
        ValueError: ids outside the vocabulary, too few slots, or attention that takes no mask.
    """

    family = "a language model of codes"

    def __init__(
        self, model: Any, codes: object, end: int | None = None, *, new_tokens: int, normalised: bool = False
    ) -> None:
        ranges = code_ranges(codes)
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        size = head.weight.shape[0]
        if ranges[-1][1] > size or (end is not None and not (isinstance(end, int) and 0 <= end < size)):
            raise ValueError(
                f"codes={codes!r} and end={end!r}, but the head knows {size} ids; pass ids below {size}."
            )
        ids = [code for first, stop in ranges for code in range(first, stop)]
        runs = list(ranges)
        if end is not None and end not in ids:
            ids.append(end)
            runs.append((end, end + 1))
        super().__init__(model.base_model, table, head, ids, TokenGrid(1, new_tokens))
        self.model = model
        self.runs = _joined(runs)
        self.ids_of = torch.tensor(ids)
        self.plain_draws: tuple[int, Tensor, torch.dtype] = (size, self.ids_of, torch.float32)
        self.num_ids = max(size, table.weight.shape[0])
        self.end = None if end is None else ids.index(end)
        self.normalised = normalised

    def score(self, features: Tensor) -> Tensor:
        config = self.model.config
        if self.normalised or type(self.head) is not nn.Linear or hasattr(self.head, "_hf_hook"):
            logits = self.head(features)
        else:
            weight, bias = self.head.weight, self.head.bias
            parts = [
                F.linear(features, weight[first:stop], None if bias is None else bias[first:stop])
                for first, stop in self.runs
            ]
            logits = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        # What models do to logits after their heads: Cohere, Granite, Gemma 2.
        logits = logits * (getattr(config, "logit_scale", None) or 1)
        logits = logits / (getattr(config, "logits_scaling", None) or 1)
        cap = getattr(config, "final_logit_softcapping", None)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if self.normalised:
            logits = wide(logits).log_softmax(-1)
        return logits if logits.shape[-1] == self.vocab_size else logits[..., self.image_rows]

    def text_of(self, condition: ImagePrompt) -> tuple[Tensor, Tensor]:
        """Return the ids of the prompts, long [B, T], and where they are no padding, bool [B, T]."""
        return condition.prompt.ids, condition.prompt.mask

    def texts(self, tokens: Tensor, pad: int | None) -> Tensor:
        """Return ids, long [B, N], of tokens [B, L]: up to the longest text's end, with `pad` after the others'."""
        ids = self.ids_of.to(tokens.device)[tokens]
        if self.end is None:
            return ids
        after = ((tokens == self.end).cumsum(1) - (tokens == self.end).long()) > 0
        ids = ids.masked_fill(after, int(self.ids_of[self.end]) if pad is None else pad)
        return ids[:, : int((~after).sum(1).max())]

    def _forward(
        self,
        cache: SlotCache,
        embeddings: Tensor,
        positions: Tensor,
        places: Tensor,
        visible: Tensor,
        prefix_mask: Tensor | None,
        **more: Tensor,
    ) -> Tensor:
        # Its own mask is cut by the number of places that are read.
        if local_window(self.decoder) is not None:
            visible = visible[..., : int(places.max()) + 1]
        width = handled_window(self.decoder.config)
        if width is None:
            return super()._forward(cache, embeddings, positions, places, visible, prefix_mask)
        near = visible
        if width < visible.shape[-1]:
            # Places of a row follow each other, padding included, as in the cache of transformers.
            held = torch.arange(visible.shape[-1], device=visible.device)
            near = visible & (held > places[..., None] - width)
        cache.at(places, visible.shape[-1])
        mask = attention_mask(near[:, None], embeddings, self._attention)
        kinds = set(getattr(self.decoder.config, "layer_types", None) or ())
        if len(kinds) > 1:  # one for each kind of layer
            full = attention_mask(visible[:, None], embeddings, self._attention)
            mask = {"full_attention": full, "sliding_attention": mask}
        inputs: dict[str, object] = {cache_argument(self.decoder): cache}
        inputs |= dict(inputs_embeds=embeddings, position_ids=positions, use_cache=True, attention_mask=mask)
        return self._joined(**inputs)


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that follow each other."""
    joined = runs[:1]
    for first, stop in runs[1:]:
        if first == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((first, stop))
    return joined


@torch.no_grad()
def why_not(model: Any) -> str | None:
    """Return why a model cannot be read as a `CodeLanguageModel`, in words; None if it can.

    The model reads two texts by its own `forward`, and as a `CodeLanguageModel` by windows that stand at different
    places in the two; the logits must agree. The texts are longer than layers of sliding attention see, if that is less
    than `_LONGEST` places.
    """
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or table is None or getattr(model.config, "is_encoder_decoder", False):
        return "it is no decoder with one head over its vocabulary"
    decoder, size, new = model.base_model, head.weight.shape[0], _NEW
    if strange := strange_layers(decoder.config):
        return (
            f"its decoder has layers of {' and '.join(strange)}, and which places these see is not known here"
        )
    limits = [most for most, _ in length_limits(decoder, table)]
    if (local := local_window(decoder)) is not None:
        limits.append(local - _TRIED)
    sees = handled_window(decoder.config) or 1
    given = min(sees + 1 if sees < _LONGEST else 2, min(limits, default=_LONGEST) - new)
    if given < 1:
        return f"its decoder takes texts of at most {min(limits)} places"
    ids = torch.arange(2 * (given + new)).remainder(max(1, size - 2)) + min(2, size - 1)
    ids = ids.view(2, -1).to(table.weight.device)
    # Of a long prompt no logits are kept, if the model can leave them out.
    known = inspect.signature(type(model).forward).parameters
    few = {"logits_to_keep": new + 1} if "logits_to_keep" in known else {}
    try:
        own = model(input_ids=ids, **few).logits[:, -new - 1 :]
        read = CodeLanguageModel(model, (0, size), new_tokens=new)
        prompt = Prompt(ids[:, :given], torch.ones_like(ids[:, :given]))
        state = read.prefill(ImagePrompt(prompt), batch_size=2, guided=False, window=_TRIED)
        logits, wanted = [state.logits[:, None]], [own[:, :1]]
        for first in ((0, 0), (_TRIED, 1), (new - _TRIED, 2)):
            slots = torch.tensor(first, device=ids.device)[:, None] + torch.arange(_TRIED, device=ids.device)
            logits.append(read(state, ids.gather(1, given + slots), slots))
            wanted.append(own.gather(1, (1 + slots)[..., None].expand(-1, -1, size)))
        found, own = torch.cat(logits, 1), torch.cat(wanted, 1)
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError, NotImplementedError) as error:
        return f"its decoder does not take a window with a mask and a cache of ours ({_place_of(error)})"
    least = _NEAR.get(own.dtype, 0.05) * float(own.abs().max())
    apart = float((own.to(found) - found).abs().max())
    if not apart <= least:
        return (
            "its logits depend on more than the places that a slot sees, its decoder and its head (apart by "
            f"{apart:.2g})"
        )
    return None


def _place_of(error: BaseException) -> str:
    """Where an error was raised, in words: the class of the innermost module of the model."""
    place, trace = "", error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        place = type(module).__name__ if isinstance(module, nn.Module) else place
        trace = trace.tb_next
    return f"{place or 'it'} stops with {type(error).__name__}"
