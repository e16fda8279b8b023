"""The pictures in an engine: from the logits of a batch to its tokens, and to the drafts of the next windows.

An engine mixes requests as it likes, from call to call. This part knows them by a handle, finds the two members of a
guided picture, and calls `verify_window` for all pictures of one law and width together. It knows no engine.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.served import WindowMemory, verify_window
from visual_spec.serving.request import CONDITIONAL, UNCONDITIONAL, PictureRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """What a served model says of its tokens.

    Attributes:
        grid: the tokens of a picture.
        first, stop: half-open range of the picture's token ids in the vocabulary of the engine.
        end: the id that ends a request early; a served picture holds none.
        prompt_tokens: length of the longest prompt; None: unknown.
        exact_prompt: whether all prompts have this length.
    """

    grid: TokenGrid
    first: int
    stop: int
    end: int
    prompt_tokens: int | None = None
    exact_prompt: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any], end: int | None) -> Self:
        """Return it from `{"grid": [height, width], "image_ids": [first, stop]}` of a model's configuration.

        Raises:
            ValueError: a setting is missing, or not of this form; there is no id that ends a request.
        """
        try:
            (height, width), (first, stop) = settings["grid"], settings["image_ids"]
            grid = TokenGrid(height, width)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f'visual_spec={dict(settings)}; pass {{"grid": [height, width], "image_ids": [first, last + 1]}}.'
            ) from error
        if end is None or first <= end < stop:
            raise ValueError(
                f"eos_token_id={end} with image_ids {first} to {stop - 1}; a failed request ends with it, so set one "
                "outside the image ids."
            )
        return cls(grid, first, stop, end, settings.get("prompt_tokens"), settings.get("exact_prompt", False))


@dataclass(frozen=True)
class Rows:
    """The logits of one request in a batch.

    Attributes:
        handle: what the engine knows the request by.
        first: the first of its rows.
        slot: the slot that this row predicts; the next rows predict the next slots.
        fed: the drafts that were fed, ids of the engine: one for each row but the first.
        prompt: length of its prompt; None: not known.
    """

    handle: Hashable
    first: int
    slot: int
    fed: Sequence[int]
    prompt: int | None = None

    @property
    def count(self) -> int:
        return 1 + len(self.fed)


class Windows:
    """The pictures in an engine.

    Args:
        served: what the model says of its tokens.
        num_drafts: drafts of a picture that a call tests, W - 1; 0: plain decoding.

    Attributes:
        calls: calls so far that held a picture.
    """

    def __init__(self, served: Served, num_drafts: int) -> None:
        self.served, self.num_drafts = served, num_drafts
        self.calls = 0
        self._requests: dict[Hashable, PictureRequest] = {}
        self._memories: dict[Hashable, WindowMemory] = {}
        self._drafts: dict[Hashable, list[int]] = {}

    def join(self, handle: Hashable, request: PictureRequest | None) -> None:
        """A request enters, under a handle that an earlier one may have had; None: it is not for us."""
        self.leave([handle])
        if request is not None:
            self._requests[handle] = request

    def leave(self, handles: Iterable[Hashable]) -> None:
        """Forget requests."""
        for handle in handles:
            for table in (self._requests, self._memories, self._drafts):
                table.pop(handle, None)

    @property
    def handles(self) -> set[Hashable]:
        """Those of all requests."""
        return set(self._requests)

    def next_drafts(self, handle: Hashable) -> list[int]:
        """Return the drafts for the slots after the committed ones, ids of the engine; none for a strange request."""
        return self._drafts.get(handle, [])

    def force(self, logits: Tensor, batch: Sequence[Rows]) -> Tensor:
        """Put all mass of the rows of pictures on the token that is drawn there; in place.

        Args:
            logits: [N, V of the engine], raw.
            batch: the requests of the batch, those that are not for us included.
        """
        ids = self.draw(logits, batch)
        ours = (ids >= 0).nonzero()[:, 0]
        logits[ours] = -torch.inf
        logits[ours, ids[ours]] = 0.0
        return logits

    def draw(self, logits: Tensor, batch: Sequence[Rows]) -> Tensor:
        """Return the token of each row, long [N], -1 where a row is not of a picture; and draft the next windows.

        A picture whose other member is not in the batch with the same slots ends: it gets `Served.end`.
        """
        ids = torch.full((len(logits),), -1, dtype=torch.long, device=logits.device)
        groups: dict[tuple[TokenLaw, int], list[tuple[Rows, Rows]]] = defaultdict(list)
        members = {self._place(rows): rows for rows in batch if rows.handle in self._requests}
        self.calls += bool(members)
        for rows in members.values():
            request = self._requests[rows.handle]
            other = members.get(self._place(rows, other=True)) if request.pair is not None else rows
            if self._ends(rows, request, other) or other is None:
                ids[rows.first : rows.first + rows.count] = self.served.end
            elif request.role == CONDITIONAL:
                groups[request.law, rows.count].append((rows, other))
        for (law, count), pictures in groups.items():
            self._draw(ids, logits, law, count, pictures)
        return ids

    def settle(self, batch: Sequence[Rows], slots: Tensor, sampled: Tensor, num_sampled: Tensor) -> None:
        """Note what a call drew, and draft the next windows; see `WindowMemory.settle`. Ids are those of the model."""
        if not self.num_drafts:
            return
        grid, served = self.served.grid, self.served
        memories = [self._memories.get(rows.handle) for rows in batch]
        fresh = WindowMemory.begin(1, grid.num_tokens, self.num_drafts + 1, slots.device)
        memory = WindowMemory.join([fresh if known is None else known for known in memories])
        memory.settle(slots, sampled, num_sampled)
        drafts = (memory.drafts(self.num_drafts, grid) + served.first).tolist()
        for rows, own, following in zip(batch, memory.split(), drafts, strict=True):
            self._memories[rows.handle], self._drafts[rows.handle] = own, following

    def _draw(
        self, ids: Tensor, logits: Tensor, law: TokenLaw, count: int, pictures: list[tuple[Rows, Rows]]
    ) -> None:
        served, device, size = self.served, logits.device, len(pictures)
        own = [rows for rows, _ in pictures]
        offsets = torch.arange(count, device=device)
        firsts = torch.tensor([[rows.first for rows in pair] for pair in pictures], device=device)
        index = firsts.t()[..., None] + offsets  # [2, B, W]
        both = index if law.guided else index[:1]
        slots = torch.tensor([rows.slot for rows in own], device=device)[:, None] + offsets  # [B, W]
        fed = torch.tensor([rows.fed for rows in own], dtype=torch.long, device=device).view(size, count - 1)
        keys = torch.tensor([self._requests[rows.handle].key for rows in own], device=device)
        sampled, num_sampled, *_ = verify_window(
            logits[both.flatten(0, 1), served.first : served.stop],
            fed - served.first,
            keys,
            slots,
            law,
            pairs=torch.arange(2 * size, device=device).view(2, size).t() if law.guided else None,
            num_drafts=0,
        )
        ids[index] = (sampled + served.first).expand_as(index)
        self.settle(own, slots, sampled, num_sampled)
        if self.num_drafts:
            for rows, other in pictures:
                self._drafts[other.handle] = self._drafts[rows.handle]

    def _place(self, rows: Rows, other: bool = False) -> Hashable:
        """What the rows of a request share with nobody; `other`: what those of the other member have."""
        request = self._requests[rows.handle]
        if request.pair is None:
            return rows.handle
        role = request.role
        if other:
            role = UNCONDITIONAL if role == CONDITIONAL else CONDITIONAL
        return "pair", request.pair, role, rows.slot, rows.count

    def _ends(self, rows: Rows, request: PictureRequest, other: Rows | None) -> bool:
        """Whether a request ends here; says why, unless its picture is complete."""
        served = self.served
        if served.exact_prompt and rows.prompt not in (None, served.prompt_tokens):
            logger.warning(
                "a prompt of %s tokens; this model reads %s. The request ends here.",
                rows.prompt,
                served.prompt_tokens,
            )
            return True
        if other is None:
            logger.warning(
                "pair %r: its %s request is in the batch at slot %d without the other; guidance needs both in every "
                "call, so the picture ends here. Send both together, keep max_num_seqs even, and do not abort one.",
                request.pair,
                request.role,
                rows.slot,
            )
            return True
        return rows.slot >= served.grid.num_tokens
