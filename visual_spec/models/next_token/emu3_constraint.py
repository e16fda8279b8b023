"""The constraint of Emu3's documented `generate`, a `prefix_allowed_tokens_fn`, read as the layout of one picture.

Emu3 (Wang et al. 2024) draws a picture of fixed height and width: rows of image tokens with a forced token after each,
and forced tokens at the end. transformers leaves this layout to a function of the caller, which is asked at every step
which tokens are allowed. Here it is asked before the picture is drawn, with made-up pictures, and again with the
picture that was drawn: if it gives the same answers, the picture follows the law that the function defines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

AllowedTokens = Callable[[int, Tensor], Sequence[int] | Tensor]


class NoLayoutError(ValueError):
    """A constraint is not the layout of a picture; the message says where."""


class Emu3Constraint:
    """The layout of a picture that a function allows.

    Args:
        allowed: as `generate` takes it: (row, ids [n]) to the ids that may follow.
        prompts: long [B, P], the rows that it is asked about.
        most: tokens that `generate` makes at most.
        image_ids: ids of all image tokens.
        row_end: id after each row.
        closing: ids that end a picture, the last of which ends the decode.

    Attributes:
        height, width: of the picture in tokens.
        new_tokens: tokens that `generate` makes. After the last row they may lack the closing ones, if `most` ends
            there.

    Raises:
        NoLayoutError: some step allows neither one token nor all image tokens; or the steps are not of one
            picture, the same for all rows and whatever was drawn.
    """

    def __init__(
        self,
        allowed: AllowedTokens,
        prompts: Tensor,
        *,
        most: int,
        image_ids: list[int],
        row_end: int,
        closing: list[int],
    ) -> None:
        self._allowed, self._given = allowed, prompts.shape[1]
        self._image_ids, self._last = frozenset(image_ids), closing[-1]
        # The object that last stood for all image tokens, and its length.
        self._all: tuple[object, int] | None = None
        made_up = torch.tensor(image_ids, device=prompts.device)
        noise = torch.Generator().manual_seed(0)
        self._steps: list[int | None] = []
        for row, prompt in enumerate(prompts):
            for fill in (
                made_up[:1],
                made_up[torch.randperm(len(made_up), generator=noise).to(made_up.device)],
            ):
                steps = self._walk(row, prompt, fill, most)
                if not self._steps:
                    self._steps = steps
                if steps != self._steps:
                    raise NoLayoutError(f"it allows other layouts for row {row}, or for other tokens drawn")
        steps = self._steps
        self.height, self.width = steps.count(row_end), steps.index(row_end) if row_end in steps else 0
        rows = ([None] * self.width + [row_end]) * self.height
        if not self.width or steps not in (rows, [*rows, *closing]):
            raise NoLayoutError(
                f"its {len(steps)} steps are not rows that end with {row_end} and, after them, {closing}"
            )
        self.new_tokens = len(steps)

    def check(self, ids: Tensor) -> None:
        """Ask the function about drawn pictures [B, P + new_tokens].

        Raises:
            NoLayoutError: it allows other tokens than for the made-up pictures.
        """
        for row, drawn in enumerate(ids):
            for step, wanted in enumerate(self._steps):
                if self._ask(row, drawn[: self._given + step]) != wanted:
                    raise NoLayoutError(
                        f"at step {step} of row {row} it allows what it did not for other pictures"
                    )

    def _walk(self, row: int, prompt: Tensor, fill: Tensor, most: int) -> list[int | None]:
        """Return what is allowed at each step: one token, or None for an image token, which `fill` gives."""
        ids = torch.cat([prompt, prompt.new_zeros(most)])
        steps: list[int | None] = []
        while len(steps) < most and (not steps or steps[-1] != self._last):
            place = len(prompt) + len(steps)
            token = self._ask(row, ids[:place])
            ids[place] = fill[len(steps) % len(fill)] if token is None else token
            steps.append(token)
        return steps

    def _ask(self, row: int, ids: Tensor) -> int | None:
        allowed = self._allowed(row, ids)
        if self._all is not None and allowed is self._all[0] and len(allowed) == self._all[1]:
            return None  # tens of thousands of ids, which are not read again
        try:
            tokens = (
                set(allowed.reshape(-1).tolist())
                if isinstance(allowed, Tensor)
                else {int(t) for t in allowed}
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise NoLayoutError(f"it returns a {type(allowed).__name__}, which is no list of ids") from error
        if tokens == self._image_ids:
            self._all = allowed, len(allowed)
            return None
        if len(tokens) != 1:
            raise NoLayoutError(
                f"for row {row} it allows {len(tokens)} tokens after {len(ids)}, neither one nor all image tokens"
            )
        return tokens.pop()
