"""The group term as the published recipe has it in verl: inside each micro-batch. For experiments only.

verl orders the rollouts of a batch by completion and by length, so which of a prompt's rollouts meet in a micro-batch
is close to chance (docs/benchmarks.md, group splitting). Each micro-batch takes the softmax over those that do, and a
mean over its rows; the engine adds the micro-batches of a rank up and averages over ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmpo.groups import group_statistics

RANKS, ROWS = 8, 4
"""Of the published example, 8 GPUs; with its dynamic micro-batches a medium response length leaves 3 to 4 rows each."""


def published_micro_batches(rows: int, rng: np.random.Generator, size: int = ROWS) -> Tensor:
    """Micro-batch of each row, (rows,) int64: rows meet by chance."""
    return torch.from_numpy(rng.permutation(rows) // size)


def cut_coefficients(
    phi: Tensor, score: Tensor, group: Tensor, micro_batch: Tensor, *, ranks: int = RANKS, **options: Any
) -> Tensor:
    """dL/dphi of each row, (B,) float64, where L is what verl accumulates from losses inside micro-batches.

    As verl-recipe pull request 105 has it: a micro-batch's loss is the mean over its rows, with zero-signal groups
    skipped over those whose fragment has signal. A fragment of one rollout has none, and a loss of 0.

    Args:
        phi, score, group: (B,) as for `dmpo.groups.group_statistics`, which gets `options`.
        micro_batch: (B,) int64.
        ranks: over which gradients are averaged.
    """
    fragment = group * (int(micro_batch.max()) + 1) + micro_batch
    stats = group_statistics(phi, score, fragment, **options)
    counts = stats.counted[stats.group]
    gradient = torch.where(counts, stats.coef / stats.weight, 0)  # of the mean over the fragment
    in_mean = counts if options["zero_signal"] == "skip" else torch.ones_like(counts)
    rows = torch.zeros(int(micro_batch.max()) + 1, dtype=gradient.dtype).index_add(0, micro_batch, in_mean.double())
    return gradient * stats.size[stats.group] / rows[micro_batch].clamp_min(1) / ranks
