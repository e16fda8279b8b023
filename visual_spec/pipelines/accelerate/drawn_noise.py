"""Noise of slots as `torch.multinomial` draws it, so that for a seed sampled tokens equal a plain loop's.

A plain loop calls `torch.multinomial(p, 1)` once a slot. That draws exponential noise q for every row and id, and takes
the id with the largest p / q. So the noise of a slot does not depend on the law, and can be drawn before the law is
known. Slots are drawn in their order, all rows at once, whatever order a sampler visits them in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys


class DrawnNoise(CounterNoise):
    """Own noise of slots (stream `TOKEN`, round 0) from a torch generator; all other noise as of `CounterNoise`.

    The generator moves as far as the slots that were asked for. `rewind` leaves it where a plain loop does.

    Args:
        batch_size: B, samples: the first rows of the plain loop.
        num_slots: most slots of a row. Later ones are scratch, and move no generator.
        num_ids: ids that the plain loop draws among.
        ids: long [V], the ids of the tokens.
        generator: as for `torch.multinomial`; None: PyTorch's default one.
        device: of the logits.
        dtype: of the probabilities of the plain loop.
        num_rows: rows of the plain loop; None: as many as samples.
        row_length: slots after which it draws once more, for a forced row end; None: never.
    """

    keyed = False

    def __init__(
        self,
        batch_size: int,
        num_slots: int,
        num_ids: int,
        ids: Tensor,
        generator: torch.Generator | None,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        num_rows: int | None = None,
        row_length: int | None = None,
    ) -> None:
        generator = torch.default_generator if generator is None else generator
        self.generator, self._shape, self._dtype = generator, (num_rows or batch_size, num_ids), dtype
        self._ids, self._num_slots, self._row_length = ids.to(device), num_slots, row_length
        self._all = torch.equal(ids.cpu(), torch.arange(num_ids))
        # Other noise must not move the generator.
        keys = draw_keys(torch.Generator().manual_seed(generator.initial_seed()), batch_size)
        super().__init__(keys, device)
        self._rows = torch.arange(batch_size, device=device)
        self._kept_slots: dict[int, Tensor] = {}  # noise [B, V] of the slots of the last call
        self._states: list[Tensor] = []  # of the generator before each slot

    def select(self, samples: Tensor) -> None:
        super().select(samples)
        self._rows = self._rows[samples]

    def categorical(self, log_probs: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0) -> Tensor:
        if stream != TOKEN or not isinstance(round, int) or round:
            return super().categorical(log_probs, slots, stream, round)
        return (log_probs.exp() / self._exponential(slots)).argmax(-1)

    def race(
        self, log_probs: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0
    ) -> tuple[Tensor, Tensor]:
        if stream != TOKEN or not isinstance(round, int) or round:
            return super().race(log_probs, slots, stream, round)
        noise = self._exponential(slots)
        best = (log_probs - noise.log()).topk(min(2, log_probs.shape[-1]), -1).values
        alone = torch.full_like(best[..., 0], torch.inf)
        margin = best[..., 0] - best[..., 1] if best.shape[-1] == 2 else alone
        return (log_probs.exp() / noise).argmax(-1), margin

    def rewind(self, steps: int) -> None:
        """Leave the generator as after the first `steps` slots."""
        self._reach(steps)
        if steps < len(self._states):
            self.generator.set_state(self._states[steps])

    def _exponential(self, slots: Tensor) -> Tensor:
        """The noise [B, W, V] of slots long [B, W], of the rows that are left; 1 at scratch, which nobody reads."""
        if slots.numel() == 1 and (slot := int(slots)) < self._num_slots:
            self._reach(slot + 1)
            self._kept_slots = {slot: self._noise(slot)}
            return self._kept_slots[slot][self._rows, None]
        asked, places = slots.clamp(max=self._num_slots).unique(return_inverse=True)
        inside = [slot for slot in asked.tolist() if slot < self._num_slots]
        if not inside:
            return torch.ones(*slots.shape, len(self._ids), dtype=self._dtype)
        self._reach(inside[-1] + 1)
        # Rows may be far apart: what lies between them is not held, and drawn again when a row comes there.
        self._kept_slots = {slot: self._noise(slot) for slot in inside}
        table = [*self._kept_slots.values()]  # of [B, V]
        if len(inside) < len(asked):
            table.append(torch.ones_like(table[0]))
        return torch.stack(table)[places, self._rows[:, None]]

    def _reach(self, slots: int) -> None:
        """Draw the noise of the first `slots`, if that was not done."""
        while len(self._states) < slots:
            self._states.append(self.generator.get_state())
            self._kept_slots[len(self._states) - 1] = self._draw()
            if self._row_length is not None and len(self._states) % self._row_length == 0:
                self._draw()

    def _noise(self, slot: int) -> Tensor:
        """The noise [B, V] of a slot that was drawn before: kept, or drawn again."""
        if slot not in self._kept_slots:
            now = self.generator.get_state()
            self.generator.set_state(self._states[slot])
            self._kept_slots[slot] = self._draw()
            self.generator.set_state(now)
        return self._kept_slots[slot]

    def _draw(self) -> Tensor:
        noise = torch.empty(self._shape, dtype=self._dtype, device=self.generator.device)
        noise = noise.exponential_(generator=self.generator).to(self._ids.device)
        return noise if self._all else noise[:, self._ids]
