"""Makes the trainer's coefficients those of groups cut as by verl. For VERL_USE_EXTERNAL_MODULES of an experiment.

Only the coefficients change, so that everything else of the run is as in the others. They are exact for this as well:
what verl accumulates from losses inside micro-batches is also a function of the sequence scores.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmpo import dmpo_core_algos
from dmpo.groups import GroupStats, group_statistics

from .cut import cut_coefficients, published_micro_batches

_rng = np.random.default_rng(int(os.environ["EXPERIMENT_SEED"]))


def _cut_statistics(phi: Tensor, score: Tensor, group: Tensor, *, valid: Tensor, **options: Any) -> GroupStats:
    stats = group_statistics(phi, score, group, valid=valid, **options)
    choices = ("temperature", "policy_temperature", "divergence", "zero_signal", "solved_score")
    row = valid.nonzero().squeeze(-1)
    coef = cut_coefficients(
        phi[row],
        score[row],
        group[row],
        published_micro_batches(len(row), _rng),
        **{name: options[name] for name in choices},
    )
    return dataclasses.replace(stats, coef=torch.zeros_like(stats.coef).index_copy_(0, row, coef))


dmpo_core_algos.group_statistics = _cut_statistics
