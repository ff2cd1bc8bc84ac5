"""The policy losses of DMPO in verl's registry (verl/trainer/ppo/core_algos.py, `register_policy_loss`).

A DMPO loss is `base loss + group term`. The group term needs every rollout of a prompt, and a worker's micro-batch
holds whatever verl dealt to it, so there are two ways to call these losses:

- Under our trainers, `dmpo_losses.dmpo_ppo_loss` provides each row's coefficient c_j = beta * dL/dphi_j /
  (number of counted groups), computed from whole groups on the controller; the term is the masked sum
  dp_size * sum_j c_j * phi_j, whose gradient, added up over micro-batches and averaged over ranks, is that of beta * L
  however the rows were dealt.
- Alone, with `index` the prompt of each row: the groups are then what the caller passes, and the returned value is
  base + beta * L itself.

Called without either (verl's trainers with a DMPO loss mode and nothing else), they raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss, get_policy_loss_fn, register_policy_loss
from verl.utils.torch_functional import masked_mean

from .config import MODES, OVERRIDE, ConfigError, DMPOPolicyLossConfig, policy_loss_config
from .groups import GroupStats, group_statistics, sequence_scores

_COEFFICIENTS: ContextVar[Tensor | None] = ContextVar("dmpo_coefficients", default=None)


class MissingGroupsError(RuntimeError):
    """A DMPO loss was called where it cannot see whole groups."""


@contextmanager
def row_coefficients(coef: Tensor) -> Iterator[None]:
    """Give the DMPO losses called inside the coefficient of each row: (B,), d(beta * L) / d phi."""
    token = _COEFFICIENTS.set(coef)
    try:
        yield
    finally:
        _COEFFICIENTS.reset(token)


def dmpo_loss(
    loss_mode: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    index: Any = None,
    score: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Base loss + group term of one DMPO mode; verl's signature of a policy loss, and two arguments more.

    Args:
        loss_mode: a key of `config.MODES`; decides the defaults of divergence and zero-signal handling.
        old_log_prob, log_prob, advantages, response_mask: (B, T).
        loss_agg_mode, rollout_is_weights: go to the base loss.
        config: the actor's configuration, a dataclass or a DictConfig; fields of DMPO are read from
            `config.policy_loss`, see `DMPOPolicyLossConfig`.
        index: the prompt of each row: numpy object array, list, NonTensorStack or integer tensor of length B.
        score: (B,) rewards; needed for `dmpo_target: reward` when called with `index`.

    Returns:
        The loss, a scalar that is never a leaf (verl changes it in place), and metrics as plain numbers.

    Raises:
        MissingGroupsError: called without `index` outside of our trainers.
        ValueError: `index` or `score` does not fit.
    """
    settings = policy_loss_config(config.policy_loss, loss_mode)
    mode = settings.mode
    coef = _COEFFICIENTS.get()
    if coef is None and index is None:
        raise MissingGroupsError(
            f"loss_mode {loss_mode!r} needs the rollouts of each prompt, and verl's own trainers cut groups over ranks "
            f"and micro-batches: add the override `{OVERRIDE}` to the command line or start training with "
            "`python -m dmpo.main_dmpo`. To call the loss yourself, pass index= (the prompt of each row)"
        )

    base_loss = get_policy_loss_fn(settings.dmpo_base_loss)
    with torch.set_grad_enabled(torch.is_grad_enabled() and mode.base):
        # A pure mode has no base loss; it is evaluated for its diagnostics (clip fractions, KL to the old policy).
        loss, metrics = base_loss(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=response_mask,
            loss_agg_mode=loss_agg_mode,
            config=config,
            rollout_is_weights=rollout_is_weights,
        )
    phi = sequence_scores(log_prob, response_mask, settings.dmpo_length_norm)
    if coef is not None:
        term = config.global_batch_info["dp_size"] * (coef.to(phi) * phi).sum()
    else:
        term, group_metrics = _whole_group_term(settings, phi, advantages, response_mask, index, score)
        metrics = metrics | group_metrics
    return (loss + term if mode.base else term), metrics


def _whole_group_term(
    settings: DMPOPolicyLossConfig,
    phi: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    index: Any,
    score: Tensor | None,
) -> tuple[Tensor, dict[str, float]]:
    """beta * L of the rows given, with its gradient, and its metrics."""
    mask = response_mask.bool()
    if score is None and settings.dmpo_target == "reward":
        raise ValueError(
            f"loss_mode {settings.loss_mode!r} with policy_loss.dmpo_target='reward' needs score= (the reward of each "
            "row); pass it, or set policy_loss.dmpo_target='advantage'"
        )
    labels, names = group_labels(index)
    if len(labels) != len(phi) or (score is not None and score.shape != phi.shape):
        raise ValueError(
            f"index and score must have one entry for each of the {len(phi)} rows, "
            f"got {len(labels)} and {None if score is None else tuple(score.shape)}"
        )
    stats = batch_statistics(
        settings,
        phi,
        reward=score,
        advantage=masked_mean(advantages, mask, axis=-1),
        label=labels.to(phi.device),
        valid=mask.any(-1),
        names=names,
    )
    # The value of L with the gradient c: phi - phi.detach() is zero and carries it.
    term = settings.beta * (stats.loss.to(phi) + (stats.coef.to(phi) * (phi - phi.detach())).sum())
    counted = stats.counted
    metrics = {
        "actor/dmpo_loss": stats.loss.item(),
        "actor/dmpo_groups": float(counted.numel()),
        "actor/dmpo_active_groups": float(counted.sum().item()),
    }
    if counted.any():
        for name in ("target_entropy", "policy_entropy", "forward_kl"):
            metrics[f"actor/dmpo_{name}"] = getattr(stats, name)[counted].mean().item()
    return term, metrics


def batch_statistics(
    settings: DMPOPolicyLossConfig,
    phi: Tensor,
    *,
    reward: Tensor | None,
    advantage: Tensor,
    label: Tensor,
    valid: Tensor,
    names: list[str],
    mini_batch: Tensor | None = None,
) -> GroupStats:
    """`group_statistics` of a batch as a configuration asks for it; every tensor is (B,).

    Args:
        settings: with a DMPO mode.
        phi: sequence scores under `settings.dmpo_length_norm`.
        reward: decides which groups have a signal and are solved; None takes the target's scores for that.
        advantage: mean advantage of each row.
        label, valid, names, mini_batch: see `group_statistics`.
    """
    return group_statistics(
        phi,
        reward if settings.dmpo_target == "reward" else advantage,
        label,
        temperature=settings.dmpo_temperature,
        policy_temperature=settings.dmpo_policy_temperature,
        divergence=settings.divergence,
        zero_signal=settings.zero_signal,
        solved_score=settings.dmpo_solved_score,
        valid=valid,
        reward=reward,
        mini_batch=mini_batch,
        names=names,
    )


def group_labels(index: Any) -> tuple[Tensor, list[str]]:
    """Integer labels (B,) int64 and names of the prompts of a batch.

    Args:
        index: one prompt id per row: integer tensor, numpy array, list or tensordict NonTensorStack.
    """
    if isinstance(index, Tensor):
        return index.long(), [str(label) for label in index.tolist()]
    names = [str(name) for name in (index.tolist() if hasattr(index, "tolist") else index)]
    _, labels = np.unique(np.asarray(names, dtype=object).astype(str), return_inverse=True)
    return torch.from_numpy(labels.reshape(-1).astype(np.int64)), names


def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    index: Any = None,
    score: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Direct Reward Optimization: -(log_prob * A - beta/2 * (log_prob - old_log_prob)^2) per token.

    verl has had the same loss under this name since 0.9 (verl PR 7245), and it stays in place there; this one serves
    versions without it. `index` and `score` are accepted, as by the other losses here, and not used.

    Args:
        old_log_prob, log_prob, advantages, response_mask, rollout_is_weights: (B, T).
        loss_agg_mode: any mode of verl's `agg_loss`.
        config: actor configuration with `policy_loss.dro_beta` and `global_batch_info`.

    Raises:
        ConfigError: `policy_loss.dro_beta` is missing or not > 0.
    """
    beta = policy_loss_config(config.policy_loss).dro_beta
    if beta is None or not beta > 0:
        raise ConfigError(f"policy_loss.dro_beta must be a finite number > 0.0, got {beta!r}; start with 1.0")
    log_ratio = log_prob - old_log_prob
    token_loss = 0.5 * beta * log_ratio.square() - log_prob * advantages
    if rollout_is_weights is not None:
        token_loss = token_loss * rollout_is_weights
    loss = agg_loss(token_loss, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {"actor/ppo_kl": masked_mean(-log_ratio, response_mask).item()}


def _register() -> None:
    """Enter every mode into verl's registry; `dro` only where verl lacks it."""
    losses: dict[str, Callable] = {name: partial(dmpo_loss, name) for name in MODES}
    if "dro" not in POLICY_LOSS_REGISTRY:
        losses["dro"] = compute_policy_loss_dro
    for name, loss in losses.items():
        register_policy_loss(name)(loss)


_register()
