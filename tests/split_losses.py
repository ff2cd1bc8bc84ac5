"""The loss under test of test_split_invariance.py, and losses that are wrong in one way each: the test must notice.

All have the signature of verl's `ppo_loss`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from dmpo.config import DMPOPolicyLossConfig
from dmpo.dmpo_core_algos import group_labels
from dmpo.dmpo_losses import COEF_FIELD, dmpo_ppo_loss

from . import reference


def group_objective(
    policy_loss: DMPOPolicyLossConfig, log_prob: Tensor, response_mask: Tensor, reward: Tensor, group: Tensor
) -> Tensor:
    """beta * L(phi) of the rows given, from the formulas of `reference`; (B, T), (B, T), (B,), (B,)."""
    total, length = (log_prob * response_mask).sum(-1), response_mask.sum(-1)
    phi = total if policy_loss.dmpo_length_norm == "sum" else total / length.clamp_min(1)
    loss, _ = reference.objective(
        phi,
        reward,
        group,
        temperature=policy_loss.dmpo_temperature,
        policy_temperature=policy_loss.dmpo_policy_temperature,
        divergence=policy_loss.divergence,
        zero_signal=policy_loss.zero_signal,
        solved_score=policy_loss.dmpo_solved_score,
        valid=length > 0,
    )
    return policy_loss.beta_at(1) * loss


def softmax_per_micro_batch(config: Any, model_output: dict, data: TensorDict, dp_group: Any = None) -> tuple:
    """The published recipe's: the group loss of whatever rows share the micro-batch, a mean over its groups."""
    base, metrics = _with_coefficients(lambda coef, _: 0 * coef, config, model_output, data, dp_group)
    padded = data.select("response_mask", "rm_scores").to_padded_tensor()
    term = group_objective(
        config.policy_loss,
        no_padding_2_padding(model_output["log_probs"], data),
        padded["response_mask"],
        padded["rm_scores"].sum(-1),
        group_labels(tu.get(data, "uid"))[0],
    )
    return base + term, metrics


def weighted_softmax_per_micro_batch(config: Any, model_output: dict, data: TensorDict, dp_group: Any = None) -> tuple:
    """The same, each micro-batch weighted by its share of the rows: told that groups are whole where they are not."""
    return dmpo_ppo_loss(config, model_output, data.exclude(COEF_FIELD), dp_group, groups_are_whole=True)


def _with_coefficients(
    change: Callable[[Tensor, TensorDict], Tensor],
    config: Any,
    model_output: dict,
    data: TensorDict,
    dp_group: Any = None,
) -> tuple:
    changed = data.copy()
    changed[COEF_FIELD] = change(data[COEF_FIELD], data)
    return dmpo_ppo_loss(config, model_output, changed, dp_group)


def _without_dp_size(coef: Tensor, data: TensorDict) -> Tensor:
    return coef / data["dp_size"]


def _mean_over_micro_batch(coef: Tensor, data: TensorDict) -> Tensor:
    # dmpo_ppo_loss multiplies by dp_size, which a mean over a micro-batch would not.
    return coef * data["global_batch_size"] / len(coef) / data["dp_size"]


LOSSES: dict[str, Callable] = {
    "dmpo": dmpo_ppo_loss,
    "softmax_per_micro_batch": softmax_per_micro_batch,
    "weighted_softmax_per_micro_batch": weighted_softmax_per_micro_batch,
    "without_dp_size": partial(_with_coefficients, _without_dp_size),
    "mean_over_micro_batch": partial(_with_coefficients, _mean_over_micro_batch),
}
