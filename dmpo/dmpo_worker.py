"""Worker side of DMPO: the loss that actor workers train with, and group coefficients at the current policy.

The controller computes the coefficients of a batch at the policy that `old_log_probs` come from. With
`dmpo_group_stats: refresh` a worker recomputes them before each mini-batch by which the policy has moved on: a forward
pass without gradient over the mini-batch's rows, one all-gather of (group, phi, log p) over the data-parallel ranks,
and the same group statistics as on the controller.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.padding import no_padding_2_padding

from .config import DMPOPolicyLossConfig, policy_loss_config
from .dmpo_losses import COEF_FIELD, GROUP_FIELD, LOG_TARGET_FIELD, REFRESH, SCALE_FIELD, dmpo_ppo_loss
from .groups import group_statistics, sequence_scores


def install_loss(actor_workers: Any, actor_config: DictConfig) -> None:
    """Set `dmpo_ppo_loss` as the loss of every actor worker.

    Uses verl's own hook, `ActorRolloutRefWorker.set_loss_fn` (verl/workers/engine_workers.py), as verl's trainer does
    for the critic; call it after the workers built their models, which sets verl's loss.

    Args:
        actor_workers: worker group of the actor.
        actor_config: `actor_rollout_ref.actor`; its `_target_`s decide the dataclasses.
    """
    actor_workers.set_loss_fn(partial(dmpo_ppo_loss, config=omega_conf_to_dataclass(actor_config)))


class RefreshMixin:
    """Adds to verl's `TrainingWorker` (verl/workers/engine_workers.py) refreshed coefficients where a batch asks."""

    _refresh: str | None = None

    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        self._refresh = tu.pop(data, key=REFRESH, default=None)
        return super().train_mini_batch(data)

    def train_batch(self, data: TensorDict) -> TensorDict:
        if self._refresh == "always":
            data[COEF_FIELD] = refreshed_coefficients(self, data)
        elif self._refresh == "later":
            self._refresh = "always"
        return super().train_batch(data)


def refreshed_coefficients(worker: Any, data: TensorDict) -> Tensor:
    """The coefficients (B,) of this rank's rows of a mini-batch, at the worker's current parameters.

    Args:
        worker: verl's `TrainingWorker` with `dmpo_ppo_loss` as its loss and an FSDP engine, in which every rank sees
            the log-probabilities of its rows.
        data: this rank's rows, as many as every other rank's. Rows whose `dmpo_group` is -1 keep their coefficient.
    """
    settings = policy_loss_config(worker.loss_fn.keywords["config"].policy_loss)
    engine = worker.engine
    # verl sets these for its own inference on the same rows (`TrainingWorker.infer_batch`).
    inputs = data.copy()
    tu.assign_non_tensor(
        inputs,
        use_remove_padding=worker.model_config.get("use_remove_padding", False),
        use_dynamic_bsz=worker.engine_config.use_dynamic_bsz,
        max_token_len_per_gpu=worker.engine_config.infer_max_token_len_per_gpu,
        micro_batch_size_per_gpu=worker.engine_config.infer_micro_batch_size_per_gpu,
        use_fused_kernels=worker.engine_config.use_fused_kernels,
        calculate_entropy=False,
    )
    with engine.eval_mode(disable_auto_offload=True):
        output = engine.infer_batch(inputs, loss_function=None)["model_output"]
    log_prob = no_padding_2_padding(output["log_probs"], data)
    mask = data["response_mask"]
    if mask.is_nested:
        mask = mask.to_padded_tensor(0, output_size=log_prob.shape)
    phi = sequence_scores(log_prob, mask, settings.dmpo_length_norm)
    return coefficients_of_mini_batch(settings, phi, data, engine.get_data_parallel_group())


def coefficients_of_mini_batch(
    settings: DMPOPolicyLossConfig, phi: Tensor, data: TensorDict, dp_group: dist.ProcessGroup | None
) -> Tensor:
    """Coefficients (B,) of this rank's rows, from their sequence scores `phi` (B,) and those on the other ranks."""
    group, old = data[GROUP_FIELD].to(phi.device), data[COEF_FIELD]
    mine = torch.stack([group.double(), phi.double(), data[LOG_TARGET_FIELD].to(phi.device).double()])
    ranks = dist.get_world_size(dp_group)
    every = mine.new_empty(ranks * len(mine), len(phi))
    dist.all_gather_into_tensor(every, mine, group=dp_group)
    every_group, every_phi, every_log_target = every.view(ranks, *mine.shape).transpose(0, 1).flatten(1)
    every_group = every_group.long()
    stats = group_statistics(
        every_phi,
        every_log_target,  # softmax(log p) = p
        every_group,
        temperature=1.0,
        policy_temperature=settings.dmpo_policy_temperature,
        divergence=settings.divergence,
        valid=every_group >= 0,
        mini_batch=every_group,  # no mean over groups: their weight is in the scale
        check_finite=False,
    )
    start = dist.get_rank(dp_group) * len(phi)
    fresh = data[SCALE_FIELD].to(phi.device) * stats.coef[start : start + len(phi)]
    return torch.where(group >= 0, fresh, old.to(fresh)).to(old)
