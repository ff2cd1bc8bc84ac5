"""Group scores, targets, coefficients and statistics of DMPO. Pure torch: imports neither verl nor ray.

Notation, as in the paper: a group is the G rollouts of one prompt; phi_j is the sequence score of rollout j,
p = softmax(score / alpha) the target (eq. 5), q = softmax(phi / tau) the policy's distribution over the group (eq. 6,
with the policy temperature tau = 1), and L_g = tau * D(p, q) the group's loss (eq. 7 for D = mse).

L is a function of phi alone, so with c = dL/dphi held constant sum_j c_j * phi_j has exactly the gradient of L,
wherever the rollouts of a group are: `GroupStats.coef` is that c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .divergences import DIVERGENCES

LENGTH_NORMS = ("mean", "sum")
ZERO_SIGNAL = ("keep", "skip", "keep_solved")

# Scores that differ by less than this, relative to max(1, |score|), are equal: float32 sums of token-level scores
# of the same reward may differ in their last bits.
SCORE_TOLERANCE = 1e-6


class NonFiniteGroupError(ValueError):
    """A row that counts has a NaN or infinite score or log-probability."""


@dataclass(frozen=True)
class GroupStats:
    """What `group_statistics` returns. B rows, N groups with at least one valid row; all tensors are detached.

    Attributes:
        loss: scalar, mean of L_g over the counted groups (0 if none counts).
        coef: (B,), d loss / d phi; 0 for rows that do not count.
        weight: (B,), what L_g of the row's group weighs in that mean, so that coef = weight * dL_g/dphi.
        p, q: (B,), target and policy distribution over the row's group; 0 for rows that are not valid.
        log_p: (B,), log of the target; 0 for rows that are not valid.
        group: (B,) int64, the row's position in the per-group tensors; -1 for rows that are not valid.
        counted: (N,) bool, groups that enter the loss: at least two valid rows, not skipped by `zero_signal`.
        label: (N,) int64, the group's value in `group_index`.
        size: (N,) int64, valid rows of the group.
        group_loss: (N,), L_g.
        target_entropy, policy_entropy: (N,), entropies of p and q in nats.
        target_ess: (N,), effective sample size of the target, 1 / sum p^2.
        forward_kl, reverse_kl: (N,), KL(p|q) and KL(q|p) in nats.
    """

    loss: Tensor
    coef: Tensor
    weight: Tensor
    p: Tensor
    q: Tensor
    log_p: Tensor
    group: Tensor
    counted: Tensor
    label: Tensor
    size: Tensor
    group_loss: Tensor
    target_entropy: Tensor
    policy_entropy: Tensor
    target_ess: Tensor
    forward_kl: Tensor
    reverse_kl: Tensor


def sequence_scores(log_prob: Tensor, response_mask: Tensor, length_norm: str = "mean") -> Tensor:
    """Sequence score phi of each rollout from its token log-probabilities.

    Args:
        log_prob: (B, T) token log-probabilities in nats, any floating dtype.
        response_mask: (B, T), non-zero where a token belongs to the response.
        length_norm: "mean" (the paper: log-probability per token, no length bias) or "sum".

    Returns:
        (B,) in float32 or the wider dtype of `log_prob`, differentiable. Rows without a response token get 0.

    Raises:
        ValueError: unknown `length_norm`, or shapes that differ.
    """
    _check_choice("length_norm", length_norm, LENGTH_NORMS)
    if log_prob.shape != response_mask.shape:
        raise ValueError(f"log_prob {tuple(log_prob.shape)} and response_mask {tuple(response_mask.shape)} must match")
    mask = response_mask.bool()
    wide = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))
    total = wide.masked_fill(~mask, 0).sum(-1)
    return total / mask.sum(-1).clamp_min(1) if length_norm == "mean" else total


def group_statistics(
    phi: Tensor,
    score: Tensor,
    group_index: Tensor,
    *,
    temperature: float,
    policy_temperature: float = 1.0,
    divergence: str = "mse",
    zero_signal: str = "keep",
    solved_score: float = 0.5,
    valid: Tensor | None = None,
    reward: Tensor | None = None,
    mini_batch: Tensor | None = None,
    check_finite: bool = True,
    names: Sequence[str] | None = None,
) -> GroupStats:
    """Target, policy distribution, loss and coefficients of every group.

    Groups may have any size and their rows any order. A group counts if it has at least two valid rows and is not
    skipped by `zero_signal`.

    Args:
        phi: (B,) sequence scores, see `sequence_scores`.
        score: (B,) scores of the rollouts that make the target.
        group_index: (B,) integer labels; rows with the same label are one group.
        temperature: alpha of the target, > 0.
        policy_temperature: tau of the policy's distribution, > 0.
        divergence: a key of `DIVERGENCES`.
        zero_signal: what to do with a group whose rewards are all equal, so that its target is uniform: "keep" it,
            "skip" it (it is not counted in the mean either), or "keep_solved" (skip it unless the common reward
            reaches `solved_score`).
        solved_score: see `zero_signal`.
        valid: (B,) bool; rows that are False leave their group. Default: all rows are valid.
        reward: (B,) what decides about signal and solved; default `score`. Needed where `score` is an advantage,
            which is 0 for each member of a group without signal, solved or not.
        mini_batch: (B,) integer labels of the mini-batch of each row. `coef` is then normalised per mini-batch; a
            group that lies in several counts in each by the share of its valid rows there.
        check_finite: raise on NaN or infinity in rows that count. Synchronises with the device.
        names: (B,) what to call a row's group in that error; default its label.

    Returns:
        GroupStats, computed in float64 (float32 on devices without it).

    Raises:
        ValueError: bad options or shapes.
        NonFiniteGroupError: see `check_finite`.
    """
    _check_choice("divergence", divergence, tuple(DIVERGENCES))
    _check_choice("zero_signal", zero_signal, ZERO_SIGNAL)
    for name, value in (("temperature", temperature), ("policy_temperature", policy_temperature)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a finite number > 0, got {value}")
    rows = {"score": score, "group_index": group_index, "valid": valid, "reward": reward, "mini_batch": mini_batch}
    for name, tensor in rows.items():
        if tensor is not None and tensor.shape != phi.shape:
            raise ValueError(f"{name} must have the shape of phi {tuple(phi.shape)}, got {tuple(tensor.shape)}")

    device = phi.device
    dtype = torch.float32 if device.type in ("mps", "npu") else torch.float64
    if valid is None:
        valid = torch.ones_like(phi, dtype=torch.bool)
    row = valid.to(device).nonzero().squeeze(-1)
    z = phi.detach()[row].to(dtype)
    s = score.detach().to(device)[row].to(dtype)
    r = s if reward is None else reward.detach().to(device)[row].to(dtype)
    label, group = torch.unique(group_index.to(device)[row], return_inverse=True)
    num_groups = label.numel()

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(num_groups).index_add_(0, group, x)

    def highest(x: Tensor) -> Tensor:
        return x.new_zeros(num_groups).scatter_reduce_(0, group, x, "amax", include_self=False)

    def log_softmax(x: Tensor) -> Tensor:
        x = x - highest(x)[group]
        return x - total(x.exp()).log()[group]

    size = torch.bincount(group, minlength=num_groups)
    several = size >= 2
    if check_finite:
        _require_finite("score", s, several[group], row, group_index, names)
        _require_finite("reward", r, several[group], row, group_index, names)

    best = highest(r)
    tolerance = SCORE_TOLERANCE * best.abs().clamp_min(1)
    counted = several
    if zero_signal != "keep":
        keep = best + highest(-r) > tolerance
        if zero_signal == "keep_solved":
            keep = keep | (best >= solved_score - tolerance)
        counted = several & keep
    if check_finite:
        _require_finite("sequence log-probability", z, counted[group], row, group_index, names)

    log_p, log_q = log_softmax(s / temperature), log_softmax(z / policy_temperature)
    p, q = log_p.exp(), log_q.exp()
    row_size = size[group].to(dtype)
    measure = DIVERGENCES[divergence]
    group_loss = policy_temperature * total(measure.terms(log_p, log_q, row_size))
    h = measure.h(log_p, log_q, row_size)
    gradient = h - q * total(h)[group]  # dL_g/dphi: the factor tau of L_g cancels the 1/tau of z = phi/tau

    # How many groups a mini-batch counts: each counted row stands for 1/size of its group.
    share = counted[group] / row_size
    if mini_batch is None:
        num_counted = share.sum().expand_as(share)
    else:
        batch_label, batch = torch.unique(mini_batch.to(device)[row], return_inverse=True)
        num_counted = share.new_zeros(batch_label.numel()).index_add_(0, batch, share)[batch]
    weight = torch.where(counted[group], 1 / num_counted, 0)
    coef = torch.where(counted[group], gradient * weight, 0)
    loss = torch.where(counted, group_loss, 0).sum() / counted.sum().clamp_min(1)

    def scatter(x: Tensor, fill: float = 0) -> Tensor:
        return torch.full(phi.shape, fill, dtype=x.dtype, device=device).index_copy_(0, row, x)

    return GroupStats(
        loss=loss,
        coef=scatter(coef),
        weight=scatter(weight),
        p=scatter(p),
        q=scatter(q),
        log_p=scatter(log_p),
        group=scatter(group, -1),
        counted=counted,
        label=label,
        size=size,
        group_loss=group_loss,
        target_entropy=-total(p * log_p),
        policy_entropy=-total(q * log_q),
        target_ess=1 / total(p.square()),
        forward_kl=total(p * (log_p - log_q)),
        reverse_kl=total(q * (log_q - log_p)),
    )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _require_finite(
    what: str, x: Tensor, counts: Tensor, row: Tensor, group_index: Tensor, names: Sequence[str] | None
) -> None:
    bad = counts & ~x.isfinite()
    if bad.any():
        first = bad.nonzero()[0, 0]
        i = int(row[first])
        name = names[i] if names is not None else int(group_index[i])
        raise NonFiniteGroupError(
            f"{what} of row {i} is {x[first].item()}, group {name} ({int(bad.sum())} such rows in the batch): "
            "check the reward function and the model's log-probabilities for this prompt"
        )
