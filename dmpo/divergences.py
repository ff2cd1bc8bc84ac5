"""Divergences between the target p and the policy's distribution q over the rollouts of one group.

Each divergence is a sum over the members of a group, D(p, q) = sum_j terms_j, with q = softmax(z). Its derivative is

    dD/dz_j = h_j - q_j * sum_i h_i,    h_j = q_j * dD/dq_j,

so a divergence is two functions of a row: `terms` and `h`. Everything is written with log-probabilities, which stay
finite where p or q underflows. Pure torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Divergence(NamedTuple):
    """D(p, q) of a group, row by row.

    Both functions take `log_p`, `log_q` (B,) and `size` (B,), the number of members of the row's group, and return
    (B,) in the dtype of their arguments.
    """

    terms: Callable[[Tensor, Tensor, Tensor], Tensor]
    h: Callable[[Tensor, Tensor, Tensor], Tensor]


def _mse_terms(log_p: Tensor, log_q: Tensor, size: Tensor) -> Tensor:
    return (log_p.exp() - log_q.exp()).square() / size


def _mse_h(log_p: Tensor, log_q: Tensor, size: Tensor) -> Tensor:
    q = log_q.exp()
    return 2 * q * (q - log_p.exp()) / size


def _log_mixture(log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.logaddexp(log_p, log_q) - math.log(2)


def _js_terms(log_p: Tensor, log_q: Tensor, size: Tensor) -> Tensor:
    log_m = _log_mixture(log_p, log_q)
    return 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m))


def _js_h(log_p: Tensor, log_q: Tensor, size: Tensor) -> Tensor:
    return 0.5 * log_q.exp() * (log_q - _log_mixture(log_p, log_q))


def _forward_kl_terms(log_p: Tensor, log_q: Tensor, size: Tensor) -> Tensor:
    return log_p.exp() * (log_p - log_q)


def _forward_kl_h(log_p: Tensor, log_q: Tensor, size: Tensor) -> Tensor:
    return -log_p.exp()


def _reverse_kl_terms(log_p: Tensor, log_q: Tensor, size: Tensor) -> Tensor:
    return log_q.exp() * (log_q - log_p)


DIVERGENCES: dict[str, Divergence] = {
    # Eq. (7) of the paper.
    "mse": Divergence(_mse_terms, _mse_h),
    # Jensen-Shannon, the paper's ablation: 1/2 KL(p|m) + 1/2 KL(q|m), m = (p + q) / 2.
    "js": Divergence(_js_terms, _js_h),
    # KL(p|q): covers every mode of the target.
    "forward_kl": Divergence(_forward_kl_terms, _forward_kl_h),
    # KL(q|p): seeks one mode; for ablations. Here h = q * (log(q/p) + 1), and the constant drops out of dD/dz.
    "reverse_kl": Divergence(_reverse_kl_terms, _reverse_kl_terms),
}
