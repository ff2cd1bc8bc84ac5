"""The actor's loss on a worker: verl's `ppo_loss` with the group coefficients of the rows threaded in."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import masked_mean
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from .config import OVERRIDE, DMPOPolicyLossConfig, policy_loss_config
from .dmpo_core_algos import MissingGroupsError, batch_statistics, group_labels, row_coefficients
from .groups import sequence_scores

# Fields that the controller stores with each rollout. The loss reads the first; the others are for recomputing the
# coefficients on the workers.
COEF_FIELD = "dmpo_coef"  # float32, d(beta * L) / d phi, normalised by the counted groups of the row's mini-batch
GROUP_FIELD = "dmpo_group"  # int64, the row's group; -1 if it does not count or is not whole in its mini-batch
LOG_TARGET_FIELD = "dmpo_log_target"  # float32, log p
SCALE_FIELD = "dmpo_scale"  # float32, what dL_g/dphi of the row is multiplied by to give the coefficient
# Non-tensor item of a batch, set by the controller: "always", or "later" where the stored coefficients are those of
# the current policy for the first mini-batch. Absent: they are used as they are.
REFRESH = "dmpo_refresh"


def dmpo_ppo_loss(
    config: Any,
    model_output: dict | None = None,
    data: TensorDict | None = None,
    dp_group: Any = None,
    groups_are_whole: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's `ppo_loss` (verl/workers/utils/losses.py); for `set_loss_fn` of an actor worker.

    With a loss mode that is not DMPO's it returns verl's result. With one it is base loss + dp_size * sum(coef * phi)
    over the micro-batch, with the entropy and KL terms that the configuration asks for.

    Args:
        config: ActorConfig.
        model_output, data, dp_group: as for `ppo_loss`; `data` has the field `dmpo_coef` (B,).
        groups_are_whole: compute the coefficients from the field `uid` where `dmpo_coef` is missing. Only for callers
            that put all rollouts of a prompt into the same micro-batch.

    Raises:
        MissingGroupsError: `dmpo_coef` is missing and groups may be cut.
        RuntimeError: refreshed coefficients are asked for, and the worker is not ours.
        NotImplementedError: called for distillation.
    """
    settings = policy_loss_config(config.policy_loss)
    if settings.mode is None:
        return ppo_loss(config=config, model_output=model_output, data=data, dp_group=dp_group, **kwargs)
    if kwargs:
        raise NotImplementedError(
            f"loss_mode {settings.loss_mode!r} does not work with distillation (called with {', '.join(kwargs)}); "
            "set distillation.enabled=False"
        )
    if REFRESH in data:
        raise RuntimeError(
            "policy_loss.dmpo_group_stats='refresh': this worker does not recompute the coefficients (its log says why "
            "DMPO's worker is not in use); set it to 'anchored'"
        )
    if COEF_FIELD in data:
        coef = data[COEF_FIELD]
    elif groups_are_whole:
        coef = _coefficients_of_whole_groups(settings, model_output, data)
    else:
        raise MissingGroupsError(
            f"loss_mode {settings.loss_mode!r} found no field {COEF_FIELD!r} in its batch: the trainer did not compute "
            f"group coefficients. Start training with `{OVERRIDE}` or `python -m dmpo.main_dmpo`, or pass "
            "groups_are_whole=True if every micro-batch holds all rollouts of its prompts"
        )
    with row_coefficients(coef):
        return ppo_loss(config=config, model_output=model_output, data=data, dp_group=dp_group)


def _coefficients_of_whole_groups(settings: DMPOPolicyLossConfig, model_output: dict, data: TensorDict) -> Tensor:
    """Coefficients (B,) of a micro-batch that holds whole groups, at the current log-probabilities.

    The mean over the groups here is weighted by this micro-batch's share of the mini-batch's rows, so micro-batches add
    up to the mean over the mini-batch where all groups count and have one size.
    """
    log_prob = no_padding_2_padding(model_output["log_probs"], data).detach()
    padded = data.select("response_mask", "advantages", "rm_scores").to_padded_tensor()
    mask = padded["response_mask"].bool()
    labels, names = group_labels(tu.get(data, "uid"))
    stats = batch_statistics(
        settings,
        sequence_scores(log_prob, mask, settings.dmpo_length_norm),
        reward=padded["rm_scores"].sum(-1),
        advantage=masked_mean(padded["advantages"], mask, axis=-1),
        label=labels.to(mask.device),
        valid=mask.any(-1),
        names=names,
    )
    return stats.coef * (settings.beta * len(labels) / data["global_batch_size"])
