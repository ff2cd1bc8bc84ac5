"""Configuration of DMPO: the loss modes, the `policy_loss` fields, and their validation before anything starts.

`DMPOPolicyLossConfig` extends verl's `PolicyLossConfig` (verl/workers/config/actor.py); the Hydra group `dmpo` names it
as `actor_rollout_ref.actor.policy_loss._target_`, so verl builds it wherever it builds the actor's configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from verl.workers.config import PolicyLossConfig

from .divergences import DIVERGENCES
from .groups import LENGTH_NORMS, ZERO_SIGNAL


class Mode(NamedTuple):
    """One DMPO loss mode.

    Attributes:
        base: whether a base policy loss (`dmpo_base_loss`) is added to the group term.
        weighted: whether the group term is multiplied by `dmpo_beta`; the published pure modes are not.
        divergence, zero_signal: used where `dmpo_divergence`, `dmpo_zero_signal` are null.
    """

    base: bool
    weighted: bool
    divergence: str
    zero_signal: str


MODES: dict[str, Mode] = {
    "grpo_dmpo": Mode(True, True, "mse", "keep"),
    "grpo_dmpo_zero": Mode(True, True, "mse", "skip"),
    "grpo_dmpo_js": Mode(True, True, "js", "keep"),
    "grpo_dmpo_fkl": Mode(True, True, "forward_kl", "keep_solved"),
    "pure_dmpo": Mode(False, True, "mse", "keep"),
    "dmpo": Mode(False, False, "mse", "keep"),
    "dmpo_zero": Mode(False, False, "mse", "skip"),
    "dmpo_js": Mode(False, False, "js", "keep"),
    "dmpo_fkl": Mode(False, False, "forward_kl", "keep_solved"),
}

# Estimators of verl without a critic whose advantages are not relative to the prompt's group
# (verl/trainer/ppo/core_algos.py, AdvantageEstimator).
NOT_PER_GROUP = ("reinforce_plus_plus", "remax")

# Adds our fields, trainers and checks to a configuration of verl's own entry point.
OVERRIDE = "+dmpo=default"


class ConfigError(ValueError):
    """A field of the configuration has a value that cannot work; the message names field, value and remedy."""


@dataclass
class DMPOPolicyLossConfig(PolicyLossConfig):
    """verl's `policy_loss` section with the fields of DMPO.

    Attributes:
        dmpo_beta: weight of the group term, >= 0 (lambda in eq. 9).
        dmpo_temperature: alpha of the target p = softmax(score / alpha), > 0 (eq. 5).
        dmpo_target: what the target is made of: "reward", the sum of a rollout's token-level scores (eq. 5), or
            "advantage", the masked mean of its advantages (what the published recipe does).
        dmpo_length_norm: sequence score: "mean" or "sum" of the token log-probabilities.
        dmpo_policy_temperature: tau of q = softmax(phi / tau), > 0; 1 is the paper.
        dmpo_divergence: "mse", "js", "forward_kl", "reverse_kl"; null takes the mode's.
        dmpo_zero_signal: groups with equal scores: "keep", "skip", "keep_solved"; null takes the mode's.
        dmpo_solved_score: a group with equal scores is solved if its score reaches this.
        dmpo_base_loss: verl's policy loss that the group term is added to.
        dmpo_group_stats: "anchored": coefficients once per batch, from old_log_probs; "refresh": recomputed by the
            workers before each mini-batch by which the policy has moved.
        dmpo_start_step: first training step (counted from 1) at which the group term is on.
        dmpo_warmup_steps: steps over which the weight ramps up linearly from there.
        dmpo_grad_ratio: wanted size of the group term's gradient beside the policy gradient's, > 0; it then decides
            about the weight, and dmpo_beta is the weight until both have been seen. null: the weight is dmpo_beta.
    """

    dmpo_beta: float = 1.0
    dmpo_temperature: float = 1 / 15
    dmpo_target: str = "reward"
    dmpo_length_norm: str = "mean"
    dmpo_policy_temperature: float = 1.0
    dmpo_divergence: str | None = None
    dmpo_zero_signal: str | None = None
    dmpo_solved_score: float = 0.5
    dmpo_base_loss: str = "vanilla"
    dmpo_group_stats: str = "anchored"
    dmpo_start_step: int = 0
    dmpo_warmup_steps: int = 0
    dmpo_grad_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.loss_mode == "dro":
            _require_number("dro_beta", self.dro_beta, "loss_mode 'dro' needs it; start with 1.0", above=0)
        if self.mode is None:
            return
        remedy = "see docs/configuration.md"
        _require_number("dmpo_beta", self.dmpo_beta, "0 switches the group term off", least=0)
        _require_number("dmpo_temperature", self.dmpo_temperature, "the paper uses 1/15", above=0)
        _require_number("dmpo_policy_temperature", self.dmpo_policy_temperature, "1 is the paper's setting", above=0)
        _require_number("dmpo_solved_score", self.dmpo_solved_score, remedy)
        for name in ("dmpo_start_step", "dmpo_warmup_steps"):
            _require_number(name, getattr(self, name), "0 switches it off", least=0, whole=True)
        if self.dmpo_grad_ratio is not None:
            _require_number("dmpo_grad_ratio", self.dmpo_grad_ratio, "null leaves the weight to dmpo_beta", above=0)
            if not (self.mode.base and self.mode.weighted):
                raise ConfigError(
                    f"policy_loss.dmpo_grad_ratio={self.dmpo_grad_ratio} needs a mode with a policy gradient, and "
                    f"{self.loss_mode!r} has none; set it to null, or use grpo_{self.loss_mode.removeprefix('pure_')}"
                )
        _require_choice("dmpo_target", self.dmpo_target, ("reward", "advantage"))
        _require_choice("dmpo_length_norm", self.dmpo_length_norm, LENGTH_NORMS)
        _require_choice("dmpo_divergence", self.dmpo_divergence, (None, *DIVERGENCES))
        _require_choice("dmpo_zero_signal", self.dmpo_zero_signal, (None, *ZERO_SIGNAL))
        _require_choice("dmpo_group_stats", self.dmpo_group_stats, ("anchored", "refresh"))
        if self.dmpo_base_loss in MODES:
            raise ConfigError(
                f"policy_loss.dmpo_base_loss must be a policy loss without a group term, got {self.dmpo_base_loss!r}; "
                "use 'vanilla' or another loss of verl's"
            )

    @property
    def mode(self) -> Mode | None:
        """The DMPO mode, None for any other `loss_mode`."""
        return MODES.get(self.loss_mode)

    @property
    def divergence(self) -> str:
        return self.dmpo_divergence or self.mode.divergence

    @property
    def zero_signal(self) -> str:
        return self.dmpo_zero_signal or self.mode.zero_signal

    @property
    def beta(self) -> float:
        """Weight of the group term, schedule aside."""
        return self.dmpo_beta if self.mode.weighted else 1.0

    def ramp_at(self, step: int) -> float:
        """From 0 (the group term is off) to 1 at a training step (counted from 1)."""
        if step < self.dmpo_start_step:
            return 0.0
        if not self.dmpo_warmup_steps:
            return 1.0
        done = step - max(self.dmpo_start_step, 1) + 1
        return min(1.0, done / self.dmpo_warmup_steps)

    def beta_at(self, step: int) -> float:
        """Weight of the group term at a training step (counted from 1), where `dmpo_grad_ratio` does not set it."""
        return self.beta * self.ramp_at(step)


def policy_loss_config(policy_loss: Any, loss_mode: str | None = None) -> DMPOPolicyLossConfig:
    """Read the `policy_loss` section from a dataclass, a DictConfig or a dict.

    Fields that the section lacks have their defaults; fields of verl's that we do not use are ignored.

    Args:
        policy_loss: the section.
        loss_mode: stands for the section's own where given.

    Raises:
        ConfigError: a field has a value that cannot work.
    """
    if isinstance(policy_loss, DMPOPolicyLossConfig) and loss_mode in (None, policy_loss.loss_mode):
        return policy_loss
    if isinstance(policy_loss, DictConfig):
        policy_loss = OmegaConf.to_container(policy_loss, resolve=True)
    known = {f.name for f in fields(DMPOPolicyLossConfig)} - {"_target_", "rollout_correction"}
    if is_dataclass(policy_loss):  # verl's dataclasses are mappings too, but raise on a key that they lack
        values = {name: getattr(policy_loss, name) for name in known if hasattr(policy_loss, name)}
    else:
        values = {name: policy_loss[name] for name in known if name in policy_loss}
    return DMPOPolicyLossConfig(**values | ({"loss_mode": loss_mode} if loss_mode else {}))


def is_dmpo(config: DictConfig) -> bool:
    """Whether a run's configuration asks for a DMPO loss mode."""
    return OmegaConf.select(config, "actor_rollout_ref.actor.policy_loss.loss_mode") in MODES


def validate(config: DictConfig) -> None:
    """Check a run's whole configuration; call it before Ray starts or a model loads.

    With a loss mode that is not ours only the mode's name and `dro_beta` are checked.

    Raises:
        ConfigError: the first field that cannot work.
    """
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    loss = policy_loss_config(actor.policy_loss)
    _require_choice("loss_mode", loss.loss_mode, (*MODES, *sorted(set(POLICY_LOSS_REGISTRY) - set(MODES))))
    limit = OmegaConf.select(config, "trainer.v1.dmpo_rollout_timeout")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0):
        raise ConfigError(
            f"trainer.v1.dmpo_rollout_timeout must be a number of seconds > 0, got {limit!r}; null waits for ever"
        )
    if loss.mode is None:
        return
    _require_choice("dmpo_base_loss", loss.dmpo_base_loss, tuple(sorted(set(POLICY_LOSS_REGISTRY) - set(MODES))))
    if loss.mode.base and loss.dmpo_base_loss == "dro":
        _require_number("dro_beta", loss.dro_beta, "dmpo_base_loss 'dro' needs it; start with 1.0", above=0)

    mode = f"loss_mode {loss.loss_mode!r}"
    if not config.trainer.get("use_v1", False):
        raise ConfigError(
            f"trainer.use_v1=False does not work with {mode}: DMPO needs verl's V1 trainer; set trainer.use_v1=True"
        )
    trainer_mode = config.trainer.v1.trainer_mode
    if not str(trainer_mode).startswith("dmpo_"):
        raise ConfigError(
            f"trainer.v1.trainer_mode={trainer_mode!r} would cut the groups of {mode}; "
            f"set trainer.v1.trainer_mode=dmpo_{trainer_mode} (`{OVERRIDE}` does)"
        )
    if rollout.n < 2:
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={rollout.n} leaves one rollout per prompt and {mode} matches a distribution "
            "over the rollouts of a prompt; set actor_rollout_ref.rollout.n=8 or another number >= 2"
        )
    if rollout.get("full_determinism", False):
        raise ConfigError(
            "actor_rollout_ref.rollout.full_determinism=True gives all rollouts of a prompt the same seed, so that "
            f"they are equal and {mode} has nothing to match; set it to False"
        )
    if actor.get("shuffle", False):
        raise ConfigError(
            f"actor_rollout_ref.actor.shuffle=True deals rollouts to mini-batches one by one and cuts the groups of "
            f"{mode}; set actor_rollout_ref.actor.shuffle=False"
        )
    if loss.dmpo_group_stats == "refresh" and actor.strategy not in ("fsdp", "fsdp2"):
        raise ConfigError(
            f"policy_loss.dmpo_group_stats='refresh' works with actor_rollout_ref.actor.strategy=fsdp or fsdp2, got "
            f"{actor.strategy!r}: elsewhere not every rank has the log-probabilities of its rows; set it to 'anchored'"
        )
    if OmegaConf.select(config, "distillation.enabled"):
        raise ConfigError(f"distillation.enabled=True does not work with {mode}; set distillation.enabled=False")
    estimator = str(config.algorithm.adv_estimator)
    if estimator == "gae":
        raise ConfigError(
            f"algorithm.adv_estimator='gae' trains a critic, and {mode} compares the rollouts of a prompt instead; set "
            "algorithm.adv_estimator=grpo"
        )
    if OmegaConf.select(config, "critic.enable"):
        raise ConfigError(
            f"critic.enable=True trains a critic, which neither {mode} nor algorithm.adv_estimator={estimator!r} uses; "
            "set critic.enable=False"
        )
    if loss.dmpo_target == "advantage" and estimator in NOT_PER_GROUP:
        raise ConfigError(
            f"algorithm.adv_estimator={estimator!r} does not compare the rollouts of a prompt, so its advantages make "
            "no target; set policy_loss.dmpo_target=reward or algorithm.adv_estimator=grpo"
        )
    dp_size = _data_parallel_size(config)
    rows = actor.ppo_mini_batch_size * rollout.n
    if dp_size and rows % dp_size:
        raise ConfigError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} x rollout.n={rollout.n} rows do "
            f"not divide over {dp_size} data-parallel ranks; make their product a multiple of {dp_size}"
        )


def _data_parallel_size(config: DictConfig) -> int | None:
    """Ranks that a mini-batch is dealt to, where the configuration tells (FSDP)."""
    actor = config.actor_rollout_ref.actor
    if actor.strategy not in ("fsdp", "fsdp2"):
        return None
    return config.trainer.n_gpus_per_node * config.trainer.nnodes // actor.get("ulysses_sequence_parallel_size", 1)


def _require_number(
    name: str, value: Any, remedy: str, *, above: float | None = None, least: float | None = None, whole: bool = False
) -> None:
    kind = "a whole number" if whole else "a finite number"
    bound = f" > {above}" if above is not None else f" >= {least}" if least is not None else ""
    ok = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or (above is not None and value <= above) or (least is not None and value < least):
        raise ConfigError(f"policy_loss.{name} must be {kind}{bound}, got {value!r}; {remedy}")


def _require_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        listed = ", ".join("null" if choice is None else str(choice) for choice in choices)
        raise ConfigError(f"policy_loss.{name} must be one of {listed}, got {value!r}")
