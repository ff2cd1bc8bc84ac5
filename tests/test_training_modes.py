"""verl's trainers with DMPO, for real on a CPU: sampled rollouts, failed ones, filtered groups, older batches."""

import math
from pathlib import Path

import pytest

from dmpo.cpu import toy_task

from .training import CPU, ROOT, make_folder, train, trained

pytestmark = pytest.mark.slow

LOSS = "actor_rollout_ref.actor.policy_loss"
N, STEPS = 4, 3
# Numbers of which no session, or all but the first, gives a rollout; see `UnreliableRollouts`.
LOST = sum(number % 8 == 0 for number in toy_task.NUMBERS)
SHORT = sum(number % 8 == 4 for number in toy_task.NUMBERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("modes"))
    toy_task.write_parquet(folder / "train.parquet", repeat=6)
    (folder / "agent.yaml").write_text("- name: unreliable\n  _target_: tests.unreliable_rollouts.UnreliableRollouts\n")
    return folder


def train_mode(folder: Path, mode: str, *overrides: str, name: str | None = None) -> list[dict]:
    """Metrics of `STEPS` steps of a trainer; every one must be finite."""
    result = train(
        folder,
        name or mode,
        CPU,
        f"trainer.v1.trainer_mode=dmpo_{mode}",
        f"reward.custom_reward_function.path={ROOT / 'tests' / 'unreliable_rollouts.py'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=unreliable",
        f"actor_rollout_ref.rollout.n={N}",
        f"{LOSS}.dmpo_beta=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=6",
        *overrides,
    )
    metrics = trained(result, STEPS)
    for step in metrics:
        ours = {key: value for key, value in step.items() if key.startswith("dmpo/")}
        assert ours and all(math.isfinite(value) for value in [*ours.values(), step["actor/grad_norm"]]), ours
        assert step["actor/grad_norm"] > 0
    return metrics


def test_colocate_async_filters_groups_and_refills_failed_ones(folder):
    """Two ranks; what fails or says nothing is replaced, so every group is whole; later batches are of an older
    policy."""
    metrics = train_mode(
        folder,
        "colocate_async",
        "trainer.n_gpus_per_node=2",
        "data.gen_batch_size=1",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=reward",
    )
    for step in metrics:
        assert step["dmpo/whole_group_frac"] == 1.0 and step["dmpo/group_size_mean"] == N
        assert step["dmpo/groups"] == step["dmpo/active_groups"] == len(toy_task.NUMBERS)
        # No group without signal is left: each has a right and a wrong rollout.
        assert step["dmpo/target_entropy"] <= math.log(N - 1) + 1e-6
        assert step["training/rollout_failure/evicted_samples"] >= LOST + SHORT
    assert sum(step.get("training/filter_groups/evicted_samples", 0) for step in metrics) > 0
    assert metrics[0]["training/off_policy/trajectory_staleness/max"] == 0
    assert metrics[-1]["training/off_policy/trajectory_staleness/max"] >= 1


def test_separate_async_trains_two_updates_between_weight_syncs(folder):
    """One worker, a rollout server of its own, weights over gloo; the second update's coefficients are refreshed."""
    prompts = len(toy_task.NUMBERS)
    metrics = train_mode(
        folder,
        "separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // 2}",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
        f"{LOSS}.dmpo_group_stats=refresh",
    )
    for step in metrics:
        assert step["dmpo/whole_group_frac"] == 1.0 and step["dmpo/group_size_mean"] == N
        assert step["dmpo/groups"] == prompts // 2  # mean of the two updates
        # old_log_probs of the second update are those of the weights before the first: verl saved and restored them.
        assert step["actor/ppo_kl"] != 0
        assert step["training/rollout_failure/evicted_samples"] > 0
    # Until weights arrive the servers have the start's, exactly; and they do arrive.
    assert metrics[0]["training/rollout_probs_diff_max"] < 1e-5
    assert metrics[-1]["training/off_policy/trajectory_staleness/max"] >= 1


def test_sync_trains_on_what_is_left_of_failed_groups(folder):
    """Without refill, verl's default, groups are short or missing; the figures say so."""
    prompts = len(toy_task.NUMBERS)
    metrics = train_mode(folder, "sync", "trainer.n_gpus_per_node=2")
    for step in metrics:
        assert step["dmpo/groups"] == prompts - LOST
        rows = (prompts - LOST) * N - SHORT
        assert step["dmpo/group_size_mean"] == pytest.approx(rows / (prompts - LOST))
        assert step["dmpo/whole_group_frac"] == 1.0  # one mini-batch


def test_sync_refills_failed_and_filters_groups(folder):
    """With several mini-batches: lost groups are replaced, short ones are not, and few groups are cut."""
    prompts = len(toy_task.NUMBERS)
    metrics = train_mode(
        folder,
        "sync",
        "data.gen_batch_size=1",
        "trainer.v1.sampler.sync_refill_failed_groups=true",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=reward",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // 4}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={2 * N}",
        name="sync_refill",
    )
    for step in metrics:
        assert step["dmpo/groups"] == prompts
        assert N - 1 < step["dmpo/group_size_mean"] <= N
        assert 0.5 < step["dmpo/whole_group_frac"] <= 1.0
    assert sum(step.get("training/rollout_failure/evicted_samples", 0) for step in metrics) > 0
    assert sum(step.get("training/filter_groups/evicted_samples", 0) for step in metrics) > 0
