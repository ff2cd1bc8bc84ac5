"""Controller side of DMPO: whole groups per mini-batch, and group coefficients stored with the batch.

Everything that touches verl's TransferQueue is in this file. The trainers override two methods of verl's `PPOTrainer`
(verl/trainer/ppo/v1/trainer_base.py): `_setup`, to set the actor's loss, and `_update_actor`, which every V1 trainer
calls once per batch, after advantages and before the optimizer steps. With any other loss mode they do nothing.

With any loss mode they also add to verl's validation metrics what several samples per prompt show (`report.metrics`),
and see to it that a fault ends in an error and a checkpoint to resume from (docs/reliability.md).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from verl.utils.seqlen_balancing import calculate_workload

from .config import DMPOPolicyLossConfig, is_dmpo, policy_loss_config, validate
from .dealing import deal
from .dmpo_core_algos import batch_statistics, group_labels
from .dmpo_losses import COEF_FIELD, GROUP_FIELD, LOG_TARGET_FIELD, REFRESH, SCALE_FIELD
from .dmpo_worker import install_loss
from .files import replacing
from .grad_ratio import GradRatioController
from .groups import GroupStats
from .report.metrics import sample_metrics

_FIELDS = ["uid", "response_mask", "old_log_probs", "rm_scores", "advantages"]

logger = logging.getLogger(__name__)

GRAD_RATIO_FILE = "dmpo_grad_ratio.json"
"""In a checkpoint's folder."""


class RewardError(ValueError):
    """A rollout has no reward, or one that is not a finite number."""


class RolloutsStalledError(TimeoutError):
    """No rollout has come back for longer than `trainer.v1.dmpo_rollout_timeout`."""


class DMPOTrainerMixin:
    """Adds DMPO to one of verl's V1 trainers; see the module."""

    # verl picks buffers and behaviour by comparing `trainer_mode` with its own names, so ours answer with those.
    @property
    def trainer_mode(self) -> str:
        return self._trainer_mode.removeprefix("dmpo_")

    @trainer_mode.setter
    def trainer_mode(self, value: str) -> None:
        self._trainer_mode = value

    def __init__(self, config: DictConfig) -> None:
        from .dmpo_patch import check_verl

        check_verl()
        validate(config)
        keep_previous_checkpoint(config)
        super().__init__(config)
        self._dmpo = policy_loss_config(config.actor_rollout_ref.actor.policy_loss) if is_dmpo(config) else None
        self._grad_ratio: GradRatioController | None = None
        if self._dmpo is not None and self._dmpo.dmpo_grad_ratio is not None:
            self._grad_ratio = GradRatioController(self._dmpo.dmpo_grad_ratio, self._dmpo.beta)

    def _setup(self) -> None:
        super()._setup()
        if self._dmpo is not None:
            install_loss(self.actor_rollout_wg, self.config.actor_rollout_ref.actor)

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        self._stall_guard = StallGuard(buffer, self.config.trainer.v1.get("dmpo_rollout_timeout"))
        return buffer

    def on_step_begin(self) -> None:
        self._stall_guard.restart()
        super().on_step_begin()

    def on_validate_begin(self) -> None:
        self._stall_guard.restart()
        super().on_validate_begin()

    def _save_checkpoint(self) -> None:
        # Before verl's part, which ends by naming this checkpoint as the last one.
        if self._grad_ratio is not None:
            folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
            self._grad_ratio.save(folder / GRAD_RATIO_FILE)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        trainer = self.config.trainer
        if trainer.resume_mode == "auto" and not self.config.actor_rollout_ref.actor.checkpoint.get("async_save"):
            name_last_checkpoint(Path(trainer.default_local_dir))
        super()._load_checkpoint()
        if self._grad_ratio is None or not self.global_steps:
            return
        folder = Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"
        if trainer.resume_mode == "resume_path":
            folder = Path(trainer.resume_from_path)
        if (folder / GRAD_RATIO_FILE).exists():
            self._grad_ratio.load(folder / GRAD_RATIO_FILE)
        else:
            logger.warning("%s has no %s: dmpo_grad_ratio starts anew", folder, GRAD_RATIO_FILE)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._check_rewards(batch)
        return super()._compute_advantage(batch, metrics)

    def _check_rewards(self, batch: KVBatchMeta) -> None:
        """Raise if a rollout's reward is missing or not finite: advantages and weights would silently be wrong."""

        def get(keys: list[str], *fields: str) -> TensorDict:
            return tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(fields))

        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        data = get(keys, "uid", "rm_scores")
        if "rm_scores" in data.keys():
            bad = [
                (key, row)
                for key, row in zip(keys, data["rm_scores"].unbind(), strict=True)
                if not row.isfinite().all()
            ]
            what = f"is {bad[0][1].sum().item()}" if bad else ""
        else:  # where some rows lack a field, none has it in the answer
            bad = [(key, None) for key in keys if "rm_scores" not in get([key], "uid", "rm_scores").keys()]
            what = "is None"
        if not bad:
            return
        key = bad[0][0]
        row = get([key], "prompts", "responses")
        prompt, response = (self.tokenizer.decode(row[name][0].tolist()) for name in ("prompts", "responses"))
        raise RewardError(
            f"the reward {what} for {len(bad)} of {len(keys)} rollouts, first for rollout {key} (prompt uid, session, "
            f"output): it must be a finite number. Its prompt: {prompt!r}; its response: {response!r}. Let the reward "
            "function return 0.0 for what it cannot grade, or raise, which leaves the rollout out"
        )

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self._dmpo is not None:
            batch = self._deal_whole_groups(batch, metrics)
        return super()._update_actor(batch, metrics)

    def _validate(self) -> dict[str, float]:
        # verl's validation keeps no lengths, and clears the queue before it computes metrics: note them on the way.
        sample = self.replay_buffer.sample
        self._val_lengths: dict[str, list[int]] = defaultdict(list)

        def noting_lengths(*args: Any, **kwargs: Any) -> Any:
            batch, rest = sample(*args, **kwargs)
            for uid, length in final_lengths(batch.keys, batch.tags):
                self._val_lengths[uid].append(length)
            return batch, rest

        self.replay_buffer.sample = noting_lengths
        try:
            return super()._validate()
        finally:
            del self.replay_buffer.sample

    def _val_metrics_update(
        self,
        data_sources: list[str],
        sample_uids: list[str],
        reward_extra_infos_dict: dict[str, list[Any]],
        sample_turns: list[int],
        **kwargs: Any,
    ) -> dict[str, float]:
        metrics = super()._val_metrics_update(
            data_sources, sample_uids, reward_extra_infos_dict, sample_turns, **kwargs
        )
        return metrics | validation_metrics(
            data_sources,
            sample_uids,
            reward_extra_infos_dict,
            expected=kwargs.get("expected_acc_counts") or {},
            lengths=self._val_lengths,
            max_length=self.config.actor_rollout_ref.rollout.response_length,
        )

    def _deal_whole_groups(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Store the coefficients of every row, reorder the batch by whole groups, report `dmpo/*` metrics."""
        actor = self.config.actor_rollout_ref.actor
        mini_batch_rows = actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=_FIELDS)
        rows = Rollouts(data, padding=[tag.get("is_padding", False) for tag in batch.tags])
        work = calculate_workload(torch.tensor([tag["seq_len"] for tag in batch.tags], dtype=torch.int64)).numpy()
        plan = deal(
            torch.where(rows.valid, rows.label, -1).numpy(),
            work,
            num_mini_batches=len(batch) // mini_batch_rows,
            num_ranks=self._actor_dp_size(),
        )
        mini_batch = torch.from_numpy(plan.mini_batch)
        stats = rows.statistics(self._dmpo, mini_batch)
        gradient = None
        if self._dmpo.mode.base:
            gradient = policy_gradient(
                rows, mini_batch, self._dmpo.dmpo_length_norm, actor.loss_agg_mode, actor.loss_scale_factor
            )
        beta = self._beta(stats, gradient)
        metrics.update(step_metrics(stats, mini_batch, beta, gradient))
        metrics["dmpo/failed_rollouts"] = float(self._failed_rollouts(batch))
        recomputable = stats.group >= 0
        recomputable[recomputable.clone()] = (stats.counted & _whole(stats, mini_batch))[stats.group[recomputable]]
        fields = {
            COEF_FIELD: (beta * stats.coef).float(),
            GROUP_FIELD: torch.where(recomputable, rows.label, -1),
            LOG_TARGET_FIELD: stats.log_p.float(),
            SCALE_FIELD: (beta * stats.weight).float(),
        }
        # Later steps must use the meta that this put returns, since an older one does not list the new fields; and a
        # field that is stored for some of the keys only would be dropped.
        stored = tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(batch))
        )
        stored.extra_info.update(batch.extra_info or {})
        if self._dmpo.dmpo_group_stats == "refresh":
            stored.extra_info[REFRESH] = "later" if self._old_policy_is_current() else "always"
        stored.reorder(plan.order.tolist())
        return stored

    def _failed_rollouts(self, batch: KVBatchMeta) -> int:
        """Rollouts that were asked for and are not in the batch."""
        rows = zip(batch.keys, batch.tags, strict=True)
        found = {key.rsplit("_", 1)[0] for key, tag in rows if not tag.get("is_padding", False)}
        asked = self.config.data.train_batch_size // self.parameter_sync_step * self.config.actor_rollout_ref.rollout.n
        return max(0, asked - len(found))

    def _beta(self, stats: GroupStats, gradient: Tensor | None) -> float:
        """Weight of the group term in this step."""
        if self._grad_ratio is None:
            return self._dmpo.beta_at(self.global_steps)
        norm = gradient.norm()
        ratio = (stats.coef.norm() / norm).item() if norm > 0 else None
        return self._grad_ratio.update(ratio) * self._dmpo.ramp_at(self.global_steps)

    def _old_policy_is_current(self) -> bool:
        """Whether `old_log_probs` are those of the weights that the update starts from."""
        correction = self.config.algorithm.get("rollout_correction") or {}
        # verl's separate_async keeps the old policy of its first local update for the others.
        return not correction.get("bypass_mode", False) and self.local_trigger_step == 0

    def _actor_dp_size(self) -> int:
        """Data-parallel ranks that the batch is chunked over, as `PPOTrainer._balance_batch` finds them."""
        workers = self.actor_rollout_wg
        if "actor" not in workers._dispatch_info:
            workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
        return max(workers._dispatch_info["actor"]) + 1


class DMPOTrainerSync(DMPOTrainerMixin, PPOTrainerSync):
    """verl's synchronous trainer with DMPO; `trainer.v1.trainer_mode=dmpo_sync`."""


class DMPOTrainerColocateAsync(DMPOTrainerMixin, PPOTrainerColocateAsync):
    """verl's colocated asynchronous trainer with DMPO; `trainer.v1.trainer_mode=dmpo_colocate_async`."""


class DMPOTrainerSeparateAsync(DMPOTrainerMixin, PPOTrainerSeparateAsync):
    """verl's asynchronous trainer on separate devices with DMPO; `trainer.v1.trainer_mode=dmpo_separate_async`."""


class StallGuard:
    """Ends a wait for rollouts that would not end: verl's replay buffer has no limit of its own.

    It waits for prompts whose reward function hangs or whose process is gone, and the asynchronous one also while each
    rollout fails and is replaced.
    """

    def __init__(self, buffer: Any, limit: float | None) -> None:
        """Let `buffer` raise after `limit` seconds (None: never) in which no rollout has come back."""
        self._buffer, self._limit, self._seen, self._since = buffer, limit, None, 0.0
        if limit is not None:
            self._wait = buffer._wait_for_next_poll
            buffer._wait_for_next_poll = self._wait_or_stop

    def restart(self) -> None:
        """Begin to count anew: another wait."""
        self._seen = None

    def _wait_or_stop(self, partition_id: str, last_debug_time: float) -> float:
        buffer = self._buffer
        seen = (partition_id, len(buffer.finished_keys[partition_id]), len(buffer.partitions[partition_id]))
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        elif time.monotonic() - self._since > self._limit:
            unfinished = sorted(buffer.pending_keys[partition_id] | buffer.running_keys[partition_id])
            raise RolloutsStalledError(
                f"no rollout has come back for {self._limit:g} s (trainer.v1.dmpo_rollout_timeout): {len(unfinished)} "
                f"prompts are unfinished ({', '.join(unfinished[:3])}...), {seen[1]} finished, "
                f"{len(buffer.failure_keys[partition_id])} failed. A reward function that hangs, or fails for every "
                "rollout? A rollout server or agent loop that is gone? Earlier errors in the output may tell"
            )
        return self._wait(partition_id, last_debug_time)


def keep_previous_checkpoint(config: DictConfig) -> None:
    """Let a run that keeps one checkpoint keep two.

    With one, verl's workers remove the previous checkpoint when they have written their part of the new one, before
    the trainer has written the rest: a kill in between would leave none. Both exist at that moment in any case.
    """
    trainer = config.trainer
    for name in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"):
        if trainer.get(name) == 1 or trainer.get("remove_previous_ckpt_in_save"):
            logger.warning("trainer.%s=2, not 1: a kill during a checkpoint could otherwise leave none", name)
            OmegaConf.update(config, f"trainer.{name}", 2, force_add=True)
    if trainer.get("remove_previous_ckpt_in_save"):
        trainer.remove_previous_ckpt_in_save = False


def name_last_checkpoint(folder: Path) -> None:
    """Write the file that names the last checkpoint in `folder` again if it is empty.

    verl empties it before it writes it: a kill or a full disk in between leaves it empty, and verl cannot resume. All
    else has been written by then, the state of the data loader last, so the checkpoint is the one with the newest.
    """
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not tracker.exists() or tracker.read_text().strip():
        return
    newest = max(folder.glob("global_step_*/data.pt"), key=lambda file: file.stat().st_mtime_ns, default=None)
    if newest is None:
        tracker.unlink()
        return
    with replacing(tracker) as partial:
        partial.write_text(newest.parent.name.removeprefix("global_step_"))
    logger.warning("%s was empty; resuming from %s", tracker, newest.parent)


def final_lengths(keys: list[str], tags: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Prompt uid and response length of every session's last output; verl's keys are `{uid}_{session}_{output}`."""
    last: dict[str, tuple[int, int]] = {}
    for key, tag in zip(keys, tags, strict=True):
        session, output = key.rsplit("_", 1)
        last[session] = max(last.get(session, (-1, 0)), (int(output), tag["response_len"]))
    return [(session.rsplit("_", 1)[0], length) for session, (_, length) in last.items()]


def validation_metrics(
    data_sources: list[str],
    uids: list[str],
    infos: dict[str, list[Any]],
    *,
    expected: dict[tuple[str, str], int],
    lengths: dict[str, list[int]],
    max_length: int,
) -> dict[str, float]:
    """`val-samples/<data source>/*` of one validation. See docs/metrics.md.

    Args:
        data_sources: (N,) of each sample.
        uids: (N,) prompt of each sample.
        infos: fields of the reward function, N values each: `reward`, and where it gives them `acc`, which then is the
            score, `answer`, and `ratio`, a quality of which more than 1 counts as 1.
        expected: samples asked for, by data source and uid; those that are missing failed and count as wrong.
        lengths: response lengths of each prompt's samples.
        max_length: tokens that a response may have.
    """
    rows: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))

    def add(source: str, **sample: Any) -> None:
        for name, value in sample.items():
            rows[source][name].append(value)

    found: Counter[tuple[str, str]] = Counter()
    nothing = [None] * len(uids)
    acc, answers, ratios = (infos.get(name, nothing) for name in ("acc", "answer", "ratio"))
    for source, uid, reward, right, answer, ratio in zip(
        data_sources, uids, infos["reward"], acc, answers, ratios, strict=True
    ):
        known = lengths.get(uid, [])
        length = known[found[source, uid]] if found[source, uid] < len(known) else None
        found[source, uid] += 1
        add(
            source,
            uid=uid,
            score=reward if right is None else right,
            answer=answer or None,
            quality=min(ratio or 0.0, 1.0),
            length=length,
        )
    for (source, uid), number in expected.items():
        for _ in range(number - found[source, uid]):
            add(source, uid=uid, score=0.0, answer=None, quality=0.0, length=None)
    return {
        f"val-samples/{source}/{name}": value
        for source, row in rows.items()
        for name, value in sample_metrics(
            row["uid"],
            row["score"],
            row["answer"] if "answer" in infos else None,
            qualities=row["quality"] if "ratio" in infos else None,
            lengths=row["length"],
            max_length=max_length,
        ).items()
    }


class Rollouts:
    """What the group statistics need of a batch, one number per row, in float64.

    Attributes:
        names: (B,) prompt uids.
        label: (B,) int64, equal for rows of one prompt.
        valid: (B,) bool, rows that are not padding and have a token left in their response mask.
        tokens: (B,) response tokens.
        log_prob: (B,) sum of the old token log-probabilities in nats.
        reward: (B,) sum of the token-level scores (before a KL penalty).
        advantage: (B,) mean advantage of the response tokens.
    """

    def __init__(self, data: TensorDict, padding: list[bool]) -> None:
        """Reads the fields uid, response_mask, old_log_probs, rm_scores and advantages, jagged or dense (B, T)."""
        self.label, self.names = group_labels(data["uid"])
        mask = _flat(data["response_mask"]).bool()
        lengths = _row_lengths(data["response_mask"])

        def row_sums(x: Tensor) -> Tensor:
            return torch.segment_reduce(x.double(), "sum", lengths=lengths, unsafe=True, initial=0)

        self.tokens = row_sums(mask)
        at_least_one = self.tokens.clamp_min(1)
        self.log_prob = row_sums(_flat(data["old_log_probs"]).masked_fill(~mask, 0))
        self.advantage = row_sums(_flat(data["advantages"]).masked_fill(~mask, 0)) / at_least_one
        self.reward = row_sums(_flat(data["rm_scores"]))
        self.valid = (self.tokens > 0) & ~torch.tensor(padding, dtype=torch.bool)
        self.max_length = int(lengths.max())

    def statistics(self, settings: DMPOPolicyLossConfig, mini_batch: Tensor) -> GroupStats:
        """Group statistics with coefficients normalised per mini-batch; a NaN or infinity raises with the uid."""
        phi = self.log_prob if settings.dmpo_length_norm == "sum" else self.log_prob / self.tokens.clamp_min(1)
        return batch_statistics(
            settings,
            phi,
            reward=self.reward,
            advantage=self.advantage,
            label=self.label,
            valid=self.valid,
            names=self.names,
            mini_batch=mini_batch,
        )


def policy_gradient(
    rows: Rollouts, mini_batch: Tensor, length_norm: str, loss_agg_mode: str, loss_scale_factor: float | None = None
) -> Tensor:
    """(B,) gradient of verl's policy loss of each mini-batch with respect to phi, at the policy that generated."""
    gradient = -rows.advantage * _row_weights(rows, mini_batch, loss_agg_mode, loss_scale_factor)
    return gradient / rows.tokens.clamp_min(1) if length_norm == "sum" else gradient


def step_metrics(stats: GroupStats, mini_batch: Tensor, beta: float, gradient: Tensor | None) -> dict[str, float]:
    """`dmpo/*` metrics of one step, over the whole batch. See docs/metrics.md.

    Figures that do not exist in a step (entropies where no group counts, the gradient ratio where every advantage is 0
    or the mode has no base loss) are left out.

    Args:
        stats: of the batch.
        mini_batch: (B,) the mini-batch of each row.
        beta: weight of the group term.
        gradient: (B,) see `policy_gradient`; None for a mode without base loss.
    """
    counted = stats.counted
    metrics = {
        "dmpo/loss": stats.loss,
        "dmpo/beta": beta,
        "dmpo/groups": len(counted),
        "dmpo/active_groups": counted.sum(),
        "dmpo/whole_group_frac": _whole_group_fraction(stats, mini_batch),
    }
    if len(counted):
        metrics["dmpo/group_size_mean"] = stats.size.double().mean()
    if counted.any():
        for name in ("target_entropy", "policy_entropy", "target_ess", "forward_kl", "reverse_kl"):
            metrics[f"dmpo/{name}"] = getattr(stats, name)[counted].mean()
    if gradient is not None and (norm := gradient.norm()) > 0:
        matching = beta * stats.coef
        matching_norm = matching.norm()
        metrics["dmpo/pg_grad_ratio"] = matching_norm / norm
        if matching_norm > 0:
            metrics["dmpo/pg_grad_cos"] = (gradient @ matching) / (norm * matching_norm)
    return {name: float(value) for name, value in metrics.items()}


def _whole_group_fraction(stats: GroupStats, mini_batch: Tensor) -> float:
    """Share of the rows of groups with two members or more whose whole group is in their mini-batch; 1 without any."""
    group = stats.group[stats.group >= 0]
    several = (stats.size >= 2)[group]
    if not several.any():
        return 1.0
    return _whole(stats, mini_batch)[group][several].double().mean().item()


def _whole(stats: GroupStats, mini_batch: Tensor) -> Tensor:
    """(N,) whether all valid rows of a group are in one mini-batch."""
    member = stats.group >= 0
    pairs = torch.unique(torch.stack([stats.group[member], mini_batch[member]]), dim=1)
    return torch.bincount(pairs[0], minlength=len(stats.size)) == 1


def _row_weights(rows: Rollouts, mini_batch: Tensor, loss_agg_mode: str, loss_scale_factor: float | None) -> Tensor:
    """Weight (B,) of a row's mean token loss in its mini-batch, as verl's `agg_loss` has it."""
    size = torch.bincount(mini_batch)[mini_batch]
    if loss_agg_mode == "token-mean":
        tokens = torch.zeros(int(mini_batch.max()) + 1, dtype=torch.float64).index_add_(0, mini_batch, rows.tokens)
        return rows.tokens / tokens[mini_batch].clamp_min(1)
    if loss_agg_mode == "token-sum":
        return rows.tokens
    if loss_agg_mode == "seq-mean-token-mean":
        return (rows.tokens > 0) / size
    if loss_agg_mode == "seq-mean-token-sum":
        return rows.tokens / size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        # verl's default scale is the padded length of the micro-batch; the batch's longest response stands for it.
        return rows.tokens / size / (loss_scale_factor or rows.max_length)
    raise ValueError(f"actor_rollout_ref.actor.loss_agg_mode: unknown mode {loss_agg_mode!r}")


def _flat(x: Tensor) -> Tensor:
    """Values of a jagged (B, *) or dense (B, T) tensor, row after row."""
    return x.values() if x.is_nested else x.reshape(-1)


def _row_lengths(x: Tensor) -> Tensor:
    """(B,) int64 length of each row in `_flat(x)`."""
    return x.offsets().diff() if x.is_nested else torch.full((x.shape[0],), x.shape[1], dtype=torch.int64)
