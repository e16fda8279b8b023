"""The order in which rows are drawn, simulated one call at a time."""

from visual_spec.samplers.orders.row_order import RowOrder

Column = tuple[int, int, int, frozenset[int]]  # source, slot, predicted (-1: not scored), slots seen


class Simulation:
    """One sample's rows, by the definition: which tokens may be drawn, what is fed, what is seen."""

    def __init__(self, order: RowOrder) -> None:
        self.order = order
        self.lengths = [1] + [0] * (order.rows - 1)
        self.open = list(range(min(order.windows, order.rows)))  # rows that have a window
        self.opened = len(self.open)  # rows that ever had one
        self.cached: dict[int, bool] = {}  # slots fed; True once with its own token
        self._close(set())

    def may_draw(self, row: int, column: int) -> bool:
        width = self.order.width
        least = max(column + self.order.lead, 0 if self.lengths[row] else self.order.start_at)
        return row == 0 or self.lengths[row - 1] >= min(width, least)

    def call(self) -> dict[int, list[Column]]:
        """The columns of every open row that feeds something."""
        width, result = self.order.width, {}
        committed = {row * width + c for row, length in enumerate(self.lengths) for c in range(length)}
        for row in self.open:
            length = self.lengths[row]
            drawable = [
                c for c in range(length, min(length + self.order.drafts + 1, width)) if self.may_draw(row, c)
            ]
            columns: list[Column] = []
            for c in drawable or ([length] if length else []):
                slot = row * width + c - 1
                source = (
                    slot
                    if c or self.lengths[row - 1] == width
                    else (row - 1) * width + self.lengths[row - 1] - 1
                )
                earlier = {s for s in committed if s // width < row and s < slot}
                own = set(range(row * width, slot))
                columns.append((source, slot, slot + 1 if drawable else -1, frozenset(earlier | own)))
            if columns:
                result[row] = columns
        return result

    def commit(self, counts: dict[int, int], columns: dict[int, list[Column]]) -> None:
        width = self.order.width
        for fed in columns.values():
            for source, slot, _, _ in fed:
                self.cached[slot] = source == slot
        was_complete = {row for row in self.open if self.lengths[row] == width}
        for row, count in counts.items():
            self.lengths[row] += count
        self._close(was_complete)

    def _close(self, was_complete: set[int]) -> None:
        for row in list(self.open):
            started = row + 1 < self.order.rows and self.lengths[row + 1] > 0
            if row in was_complete or (self.lengths[row] == self.order.width and not started):
                self.open.remove(row)
                if self.opened < self.order.rows:
                    # Windows are taken in turn: the next row gets the window of this one.
                    assert self.opened == row + self.order.windows
                    self.open.append(self.opened)
                    self.opened += 1
        self.open.sort()
