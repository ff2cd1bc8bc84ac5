"""How rollouts are dealt to mini-batches and ranks so that each mini-batch holds whole groups. Pure numpy.

verl reads a batch rank by rank: rank r trains on the rows [r * B/R, (r+1) * B/R), and its m-th mini-batch is the m-th
slice of those (verl/workers/engine_workers.py, `train_mini_batch`). Call the rows of rank r in mini-batch m a cell. The
order made here puts whole prompts into a mini-batch, evenly in work, then spreads the rows of each mini-batch over its
cells, evenly in work. A prompt's rows may lie on several ranks: the coefficients of the group are computed before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_SWAPS_PER_RANK = 16


class Deal(NamedTuple):
    """Where the rows of a batch go.

    Attributes:
        order: (B,) int64 permutation: position i of the new batch is row order[i] of the old one.
        mini_batch: (B,) int64, mini-batch of each row, in the old order.
    """

    order: np.ndarray
    mini_batch: np.ndarray


def deal(group: np.ndarray, work: np.ndarray, num_mini_batches: int, num_ranks: int) -> Deal:
    """Deal rows to mini-batches by whole groups, then to ranks by work.

    Groups of any size are packed without cutting one where a packing is found; else the fewest that the packing leaves
    over are cut.

    Args:
        group: (B,) integer label of each row's group; negative for rows that belong to none (padding), which fill up.
        work: (B,) cost of each row, >= 0; tokens or an estimate of operations.
        num_mini_batches, num_ranks: B must be a multiple of their product.

    Raises:
        ValueError: B is not a multiple of num_mini_batches * num_ranks.
    """
    rows, cells = len(group), num_mini_batches * num_ranks
    if rows == 0 or rows % cells:
        raise ValueError(f"{rows} rows do not divide into {num_mini_batches} mini-batches x {num_ranks} ranks")
    group, work = np.asarray(group), np.asarray(work, dtype=np.float64)
    mini_batch = _groups_to_mini_batches(group, work, num_mini_batches)
    # (K, M): the rows of each mini-batch, heaviest first.
    by_work = np.lexsort((-work, mini_batch)).reshape(num_mini_batches, -1)
    cell = _rows_to_ranks(work[by_work], num_ranks)
    order = np.take_along_axis(by_work[:, None, :], cell, axis=2)  # (K, R, M/R)
    # Old order inside a cell, so that a batch which is dealt already stays as it is.
    return Deal(np.sort(order, axis=2).transpose(1, 0, 2).reshape(-1), mini_batch)


def _groups_to_mini_batches(group: np.ndarray, work: np.ndarray, num_mini_batches: int) -> np.ndarray:
    capacity = len(group) // num_mini_batches
    mini_batch = np.full(len(group), -1, dtype=np.int64)
    member = np.flatnonzero(group >= 0)
    if len(member):
        _, index = np.unique(group[member], return_inverse=True)
        size = np.bincount(index)
        group_work = np.bincount(index, weights=work[member])
        place = _evenly(size, group_work, num_mini_batches, capacity)
        if (place < 0).any():
            place = max(place, _tightly(size, num_mini_batches, capacity), key=lambda p: (p >= 0).sum())
        mini_batch[member] = place[index]
        room = capacity - np.bincount(mini_batch[mini_batch >= 0], minlength=num_mini_batches)
        for g in sorted(np.flatnonzero(place < 0), key=lambda g: -size[g]):
            # Cut this group into as few pieces as the remaining room allows.
            left = member[index == g]
            while len(left):
                m = int(np.argmax(room))
                piece, left = left[: room[m]], left[room[m] :]
                mini_batch[piece] = m
                room[m] -= len(piece)
    free = np.flatnonzero(mini_batch < 0)
    room = capacity - np.bincount(mini_batch[mini_batch >= 0], minlength=num_mini_batches)
    mini_batch[free] = np.repeat(np.arange(num_mini_batches), room)
    return mini_batch


def _evenly(size: np.ndarray, work: np.ndarray, num_mini_batches: int, capacity: int) -> np.ndarray:
    """Mini-batch of each group: largest first, into the one with the least work that has room; -1 where none has."""
    place = np.full(len(size), -1, dtype=np.int64)
    load, room = [0.0] * num_mini_batches, [capacity] * num_mini_batches
    for g in np.lexsort((-work, -size)).tolist():
        n = int(size[g])
        fits = [m for m in range(num_mini_batches) if room[m] >= n]
        if fits:
            m = min(fits, key=load.__getitem__)
            place[g] = m
            load[m] += work[g]
            room[m] -= n
    return place


def _tightly(size: np.ndarray, num_mini_batches: int, capacity: int) -> np.ndarray:
    """Mini-batch of each group, filling one mini-batch after the other as full as its groups allow (subset sum)."""
    place = np.full(len(size), -1, dtype=np.int64)
    remaining = np.argsort(-size, kind="stable").tolist()
    for m in range(num_mini_batches):
        # last[s]: position in `remaining` of the group that first reached the sum s.
        last = np.full(capacity + 1, -1, dtype=np.int64)
        reached = np.zeros(capacity + 1, dtype=bool)
        reached[0] = True
        for position, g in enumerate(remaining):
            n = int(size[g])
            if n > capacity:
                continue
            new = np.zeros_like(reached)
            new[n:] = reached[: capacity + 1 - n]
            new &= ~reached
            last[new] = position
            reached |= new
            if reached[capacity]:
                break
        total, taken = int(np.flatnonzero(reached)[-1]), set()
        while total:
            position = int(last[total])
            taken.add(position)
            total -= int(size[remaining[position]])
        for position in taken:
            place[remaining[position]] = m
        remaining = [g for position, g in enumerate(remaining) if position not in taken]
    return place


def _rows_to_ranks(work: np.ndarray, num_ranks: int) -> np.ndarray:
    """Deal the rows of each mini-batch to ranks, the same number to each.

    Args:
        work: (K, M), heaviest row first.

    Returns:
        (K, R, M/R) positions in the second axis of `work`.
    """
    num_mini_batches, rows = work.shape
    per_rank = rows // num_ranks
    cell = np.empty((num_mini_batches, num_ranks, per_rank), dtype=np.int64)
    load = np.zeros((num_mini_batches, num_ranks))
    batch = np.arange(num_mini_batches)
    for i in range(per_rank):
        # The next R rows, the heaviest to the rank with the least work.
        position = np.arange(i * num_ranks, (i + 1) * num_ranks)
        rank = np.argsort(load, axis=1, kind="stable")
        cell[batch[:, None], rank, i] = position
        load[batch[:, None], rank] += work[:, position]
    for m in range(num_mini_batches if num_ranks > 1 else 0):
        _even_out(work[m], cell[m], load[m])
    return cell


def _even_out(work: np.ndarray, cell: np.ndarray, load: np.ndarray) -> None:
    """Swap rows of the fullest rank of a mini-batch with rows of emptier ones while that helps; in place.

    Args:
        work: (M,); cell: (R, M/R) positions in `work`; load: (R,) sums of `work` over `cell`.
    """
    for _ in range(_SWAPS_PER_RANK * len(load)):
        rank = np.argsort(load)
        high = rank[-1]
        for low in rank[:-1]:
            i, j, moved = _best_swap(work[cell[high]], work[cell[low]], load[high] - load[low])
            if 0 < moved < load[high] - load[low]:
                break
        else:
            return
        cell[high, i], cell[low, j] = cell[low, j], cell[high, i]
        load[high] -= moved
        load[low] += moved


def _best_swap(high: np.ndarray, low: np.ndarray, gap: float) -> tuple[int, int, float]:
    """Positions of the pair, one of each, whose swap brings two ranks that differ by `gap` closest, and what moves."""
    by_work = np.argsort(low)
    ordered = low[by_work]
    wanted = high - gap / 2
    right = np.searchsorted(ordered, wanted).clip(max=len(low) - 1)
    left = (right - 1).clip(0)
    nearest = np.where(np.abs(ordered[left] - wanted) <= np.abs(ordered[right] - wanted), left, right)
    i = int(np.abs(ordered[nearest] - wanted).argmin())
    j = int(by_work[nearest[i]])
    return i, j, high[i] - low[j]
