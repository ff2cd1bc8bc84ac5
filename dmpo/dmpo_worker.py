"""Worker side of DMPO: the loss that actor workers train with."""

from __future__ import annotations

from functools import partial
from typing import Any

from omegaconf import DictConfig
from verl.utils.config import omega_conf_to_dataclass

from .dmpo_losses import dmpo_ppo_loss


def install_loss(actor_workers: Any, actor_config: DictConfig) -> None:
    """Set `dmpo_ppo_loss` as the loss of every actor worker.

    Uses verl's own hook, `ActorRolloutRefWorker.set_loss_fn` (verl/workers/engine_workers.py), as verl's trainer does
    for the critic; call it after the workers built their models, which sets verl's loss.

    Args:
        actor_workers: worker group of the actor.
        actor_config: `actor_rollout_ref.actor`; its `_target_`s decide the dataclasses.
    """
    actor_workers.set_loss_fn(partial(dmpo_ppo_loss, config=omega_conf_to_dataclass(actor_config)))
