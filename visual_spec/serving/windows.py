"""The pictures in an engine: from the logits of a batch to its tokens, and to the drafts of the next windows.

An engine mixes requests as it likes, from call to call. This part knows them by a handle, finds the two members of a
guided picture, and calls `verify_window` for all pictures of one law and width together. It knows no engine.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, Self

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

    A request draws its places, one after the other: the slots of one grid or more, and after each row of a grid a row
    end, if the model has one.

    Attributes:
        grids: the grids of a request, in the order in which they are drawn.
        first, stop: half-open range of the picture's token ids in the vocabulary of the engine.
        end: the id that ends a request early; a served picture holds none.
        row_end: the id after each row of a grid; None: there is none.
        prompt_tokens: length of the longest prompt; None: unknown.
        exact_prompt: whether all prompts have this length.
    """

    grids: tuple[TokenGrid, ...]
    first: int
    stop: int
    end: int
    row_end: int | None = None
    prompt_tokens: int | None = None
    exact_prompt: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any], end: int | None) -> Self:
        """Return it from what a model's configuration says.

        Args:
            settings: `{"grid": [height, width], "image_ids": [first, stop]}`; `grids`, a list, in place of `grid`; also
                `row_end`, `prompt_tokens` and `exact_prompt`.

        Raises:
            ValueError: a setting is missing, or not of this form; there is no id that ends a request.
        """
        try:
            first, stop = settings["image_ids"]
            sides = settings["grids"] if "grids" in settings else [settings["grid"]]
            grids = tuple(TokenGrid(height, width) for height, width in sides)
            if not grids:
                raise ValueError("no grid")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f'visual_spec={dict(settings)}; pass {{"grid": [height, width], "image_ids": [first, last + 1]}}.'
            ) from error
        row_end = settings.get("row_end")
        if end is None or first <= end < stop or end == row_end:
            raise ValueError(
                f"eos_token_id={end} with image_ids {first} to {stop - 1} and row_end={row_end}; a failed request ends "
                "with it, so set one that no picture holds."
            )
        return cls(
            grids,
            first,
            stop,
            end,
            row_end,
            settings.get("prompt_tokens"),
            settings.get("exact_prompt", False),
        )

    @functools.cached_property
    def places(self) -> list[tuple[int, int]]:
        """For each place of a request the number of its grid, and its slot there; -1 for a row end."""
        return [
            (number, row * grid.width + column if column < grid.width else -1)
            for number, grid in enumerate(self.grids)
            for row in range(grid.height)
            for column in range(grid.width + (self.row_end is not None))
        ]

    def slots(self, place: int, count: int) -> dict[int, tuple[list[int], list[int]]]:
        """Return what `count` places hold from `place` on: by grid, which of them are slots, and those slots."""
        inside: dict[int, tuple[list[int], list[int]]] = {}
        for offset, (number, slot) in enumerate(self.places[place : place + count]):
            if slot >= 0:
                offsets, slots = inside.setdefault(number, ([], []))
                offsets.append(offset)
                slots.append(slot)
        return inside

    def codes(self, ids: Sequence[int]) -> list[list[int]]:
        """Return the tokens of each grid of a request that drew these ids, without row ends."""
        drawn: list[list[int]] = [[] for _ in self.grids]
        for (number, slot), own in zip(self.places, ids, strict=False):
            if slot >= 0:
                drawn[number].append(own - self.first)
        return drawn


@dataclass(frozen=True)
class Rows:
    """The logits of one request in a batch.

    Attributes:
        handle: what the engine knows the request by.
        first: the first of its rows.
        place: the place that this row predicts (`Served.places`), and so the number of tokens drawn before it; the
            next rows predict the next places.
        fed: the drafts that were fed, ids of the engine: one for each row but the first.
        prompt: length of its prompt; None: not known.
    """

    handle: Hashable
    first: int
    place: int
    fed: Sequence[int]
    prompt: int | None = None

    @property
    def count(self) -> int:
        return 1 + len(self.fed)


class _Part(NamedTuple):
    """The slots of one grid in the rows of a picture; `other`: the rows of its other member, or the same."""

    rows: Rows
    other: Rows
    number: int
    offsets: list[int]
    slots: list[int]


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
        self._memories: dict[Hashable, tuple[int, WindowMemory]] = {}  # and of which grid
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
        """The handles of all requests."""
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

        A picture whose other member is not in the batch with the same places ends: it gets `Served.end`.
        """
        ids = torch.full((len(logits),), -1, dtype=torch.long, device=logits.device)
        groups: dict[tuple[TokenLaw, int, int], list[_Part]] = defaultdict(list)
        members = {self._place(rows): rows for rows in batch if rows.handle in self._requests}
        self.calls += bool(members)
        pictures = []
        for rows in members.values():
            request = self._requests[rows.handle]
            other = members.get(self._place(rows, other=True)) if request.pair is not None else rows
            ids[rows.first : rows.first + rows.count] = self.served.end
            if self._ends(rows, request, other) or other is None or request.role != CONDITIONAL:
                continue
            pictures.append((rows, other))
            for number, (offsets, slots) in self.served.slots(rows.place, rows.count).items():
                groups[request.law, number, len(slots)].append(_Part(rows, other, number, offsets, slots))
        drawn = [(parts, *self._draw(ids, logits, law, parts)) for (law, *_), parts in groups.items()]
        self._force_row_ends(ids, pictures)
        if self.num_drafts and pictures:
            committed = self._committed(ids, [rows for rows, _ in pictures])
            for parts, slots, sampled in drawn:
                self._note(parts, slots, sampled, committed)
            self._redraft({rows.handle: rows.place + committed[rows.handle] for rows, _ in pictures})
            for rows, other in pictures:
                self._drafts[other.handle] = self._drafts[rows.handle]
        return ids

    def settle(self, rows: Rows, slots: Tensor, sampled: Tensor, num_sampled: Tensor) -> None:
        """Note what an engine drew for a request by itself, and draft its next window.

        Args:
            slots: long [1, W], the slots that the call predicted.
            sampled: long [1, W], tokens of the model.
            num_sampled: long [1], how many of them are final.
        """
        if self.num_drafts:
            committed = int(num_sampled)
            part = _Part(rows, rows, 0, list(range(slots.shape[1])), slots[0].tolist())
            self._note([part], slots, sampled, {rows.handle: committed})
            self._redraft({rows.handle: rows.place + committed})

    def _draw(self, ids: Tensor, logits: Tensor, law: TokenLaw, parts: list[_Part]) -> tuple[Tensor, Tensor]:
        """Draw the slots of parts that are of one law, grid and width. Returns slots and tokens, long [B, W]."""
        served, device, size = self.served, logits.device, len(parts)
        index = torch.tensor(
            [
                [[rows.first + offset for offset in part.offsets] for rows in (part.rows, part.other)]
                for part in parts
            ],
            device=device,
        ).transpose(0, 1)  # [2, B, W]
        both = index if law.guided else index[:1]
        slots = torch.tensor([part.slots for part in parts], device=device)  # [B, W]
        fed = [[part.rows.fed[offset] for offset in part.offsets[:-1]] for part in parts]
        drafts = torch.tensor(fed, dtype=torch.long, device=device).view(size, -1)
        number = parts[0].number
        keys = torch.tensor([self._requests[part.rows.handle].key(number) for part in parts], device=device)
        sampled, *_ = verify_window(
            logits[both.flatten(0, 1), served.first : served.stop],
            drafts - served.first,
            keys,
            slots,
            law,
            pairs=torch.arange(2 * size, device=device).view(2, size).t() if law.guided else None,
            num_drafts=0,
        )
        ids[index] = (sampled + served.first).expand_as(index)
        return slots, sampled

    def _force_row_ends(self, ids: Tensor, pictures: Sequence[tuple[Rows, Rows]]) -> None:
        if self.served.row_end is None:
            return
        ends = [
            rows.first + offset
            for pair in pictures
            for rows in pair
            for offset, (_, slot) in enumerate(self.served.places[rows.place : rows.place + rows.count])
            if slot < 0
        ]
        ids[torch.tensor(ends, dtype=torch.long, device=ids.device)] = self.served.row_end

    @staticmethod
    def _committed(ids: Tensor, batch: Sequence[Rows]) -> dict[Hashable, int]:
        """How many tokens of each request the engine keeps: the drafts that are what their rows drew, and one more."""
        drawn, committed = ids.tolist(), {}
        for rows in batch:
            right = map(int.__eq__, rows.fed, drawn[rows.first :])
            committed[rows.handle] = 1 + sum(1 for _ in takewhile(bool, right))
        return committed

    def _note(
        self, parts: Sequence[_Part], slots: Tensor, sampled: Tensor, committed: Mapping[Hashable, int]
    ) -> None:
        number = parts[0].number
        held = [self._memories.get(part.rows.handle, (number,))[0] for part in parts]
        # A grid begins when one of its slots is committed; until then the last one is drafted.
        keep = [
            index
            for index, part in enumerate(parts)
            if held[index] == number or part.offsets[0] < committed[part.rows.handle]
        ]
        parts, slots, sampled = [parts[index] for index in keep], slots[keep], sampled[keep]
        if not parts:
            return
        memory = WindowMemory.join([self._memory(part.rows.handle, number, slots.device) for part in parts])
        final = [sum(offset < committed[part.rows.handle] for offset in part.offsets) for part in parts]
        memory.settle(slots, sampled, torch.tensor(final, device=slots.device))
        for part, own in zip(parts, memory.split(), strict=True):
            self._memories[part.rows.handle] = number, own

    def _redraft(self, following: Mapping[Hashable, int]) -> None:
        """Draft the next window of requests whose next place is known; none past the grid of that place."""
        groups: dict[tuple[int, int], list[Hashable]] = defaultdict(list)
        spans: dict[Hashable, list[int]] = {}
        for handle, place in following.items():
            known, memory = self._memories.get(handle, (-1, None))
            ahead = self.served.places[place : place + self.num_drafts]
            spans[handle] = [slot for number, slot in ahead if number == known]
            self._drafts[handle] = []
            if memory is not None and spans[handle]:
                groups[known, sum(slot >= 0 for slot in spans[handle])].append(handle)
        row_end = -1 if self.served.row_end is None else self.served.row_end
        for (number, count), handles in groups.items():
            memory = WindowMemory.join([self._memories[handle][1] for handle in handles])
            drafts = (memory.drafts(count, self.served.grids[number]) + self.served.first).tolist()
            for handle, own, ids in zip(handles, memory.split(), drafts, strict=True):
                self._memories[handle] = number, own
                left = iter(ids)
                self._drafts[handle] = [next(left) if slot >= 0 else row_end for slot in spans[handle]]

    def _memory(self, handle: Hashable, number: int, device: torch.device) -> WindowMemory:
        known, memory = self._memories.get(handle, (-1, None))
        if memory is not None and known == number:
            return memory
        return WindowMemory.begin(1, self.served.grids[number].num_tokens, self.num_drafts + 1, device)

    def _place(self, rows: Rows, other: bool = False) -> Hashable:
        """Return what the rows of a request share with nobody; `other`: what the other member's rows have."""
        request = self._requests[rows.handle]
        if request.pair is None:
            return rows.handle
        role = request.role
        if other:
            role = UNCONDITIONAL if role == CONDITIONAL else CONDITIONAL
        return "pair", request.pair, role, rows.place, rows.count

    def _ends(self, rows: Rows, request: PictureRequest, other: Rows | None) -> bool:
        """Return whether a request ends here; says why, unless its picture is complete."""
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
                "pair %r: its %s request is in the batch at place %d without the other; guidance needs both in every "
                "call, so the picture ends here. Send both together, keep max_num_seqs even, and do not abort one.",
                request.pair,
                request.role,
                rows.place,
            )
            return True
        return rows.place >= len(served.places)
