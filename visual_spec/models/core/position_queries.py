"""Position queries: slots of an any-order model that are asked by tokens which only the asking call holds.

LPD (Zhang et al., 2507.01957, section 3.1) asks for a slot by a learned token at its position. Later calls see the
tokens that were drawn and none of the queries, so the cache keeps tokens only, and queries are written to places after
them that the next call overwrites. Slots drawn in one call see each other's queries, and once they are fed, each
other's tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def query_places(prefix: int, slots: Tensor, fed: int, num_tokens: int, window: int) -> Tensor:
    """Return the cache places of a call, long `[R, F + Q]`: of the tokens fed at `slots [R, F + Q]`, then of queries.

    Tokens stand after the prefix, by slot; queries after the grid and a window of slots past it, by their number.
    """
    queries = prefix + num_tokens + window + torch.arange(slots.shape[1] - fed, device=slots.device)
    return torch.cat([prefix + slots[:, :fed], queries.expand(len(slots), -1)], 1)


def fed_and_asked(
    tokens: Tensor, slots: Tensor, seen: Tensor, *, guided: bool, together: bool
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return what a call of an `AnyOrderModel` feeds and asks, in the rows of guidance too.

    Args:
        tokens: long `[B, F]`, fed at the first of `slots [B, W]`.
        seen: bool `[B, W, L]`.
        together: whether the slots after the first F are asked alone; else the tokens' own slots are asked too.

    Returns:
        tokens `[R, F]`; slots `[R, F + Q]` and what they see `[R, F + Q, L]`, of tokens, then of queries; and how many
        positions of the call are not asked.
    """
    if guided:
        tokens, slots, seen = tokens.repeat(2, 1), slots.repeat(2, 1), seen.repeat(2, 1, 1)
    fed = tokens.shape[1]
    skipped = fed if together else 0
    slots = torch.cat([slots[:, :fed], slots[:, skipped:]], 1)
    return tokens, slots, torch.cat([seen[:, :fed], seen[:, skipped:]], 1), skipped


def seen_by_queries(
    prefix_mask: Tensor, seen: Tensor, slots: Tensor, fed: int, window: int, together: bool
) -> Tensor:
    """Return what the positions of a call see, bool `[R, F + Q, T + L + window + Q]`: of tokens, then of queries.

    Args:
        prefix_mask: bool `[R, T]`.
        seen: bool `[R, F + Q, L]`, slots seen by the tokens fed, then by the queries.
        slots: long `[R, F + Q]` of both; those from L on are scratch, which nothing else sees.
        fed: F.
        together: whether the tokens fed see each other and all that any of them sees, and the queries each other.
    """
    asked, num_tokens = slots.shape[1] - fed, seen.shape[2]
    if together and fed:
        new = F.pad(torch.zeros_like(seen[:, 0]), (0, window)).scatter(1, slots[:, :fed], True)
        group = seen[:, :fed].any(1) | new[:, :num_tokens]  # [R, L]
        seen = torch.cat([group[:, None].expand(-1, fed, -1), seen[:, fed:]], 1)
    held = F.pad(seen, (0, window + asked))
    mask = torch.cat([prefix_mask[:, None].expand(-1, slots.shape[1], -1), held], 2)
    places = query_places(prefix_mask.shape[1], slots, fed, num_tokens, window)
    mask = mask.scatter(2, places[..., None], True)  # itself
    if together:
        mask[:, fed:, -asked:] |= (slots[:, fed:] < num_tokens)[:, None]
    return mask


def seen_in_groups(groups: Tensor) -> Tensor:
    """Return the mask of whole pictures, bool `[L + L, L + L]`: of tokens, then of queries, along the order.

    Args:
        groups: long `[L]`, the number of the call that draws each place of the order; never falls.
    """
    earlier, same = groups < groups[:, None], groups == groups[:, None]
    nothing = torch.zeros_like(same)
    return torch.cat([torch.cat([earlier | same, nothing], 1), torch.cat([earlier, same], 1)])
