"""A training that is killed and started again goes on as if nothing had happened."""

import json
import os
import random
import time
from pathlib import Path

import pytest

from .training import CPU, MINUTES, ROOT, ends_by_itself, kill, make_folder, read_metrics, start, train, trained

pytestmark = pytest.mark.slow

LOSS = "actor_rollout_ref.actor.policy_loss"
PROMPTS, N, STEPS, SAVE_FREQ = 8, 8, 8, 3
SETTINGS = (
    "actor_rollout_ref.rollout.agent.default_agent_loop=seeded",
    f"reward.custom_reward_function.path={ROOT / 'tests' / 'faulty_rewards.py'}",
    "reward.custom_reward_function.name=graded",
    # 32 prompts: four steps an epoch, so that no checkpoint lies between two epochs.
    "data.shuffle=True",
    "data.seed=7",
    f"data.train_batch_size={PROMPTS}",
    # One update a step: which prompts share a mini-batch depends on verl's random uids.
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    f"actor_rollout_ref.rollout.n={N}",
    "trainer.total_epochs=2",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={SAVE_FREQ}",
    # Other values at every step: the learning rate, and the weight of the group term.
    "actor_rollout_ref.actor.optim.lr_warmup_steps=20",
    f"{LOSS}.dmpo_grad_ratio=0.5",
    f"{LOSS}.dmpo_warmup_steps=20",
)


def rollouts(folder: Path, step: int) -> list[tuple]:
    """The step's prompts, sessions, responses and scores, in order."""
    lines = (folder / f"{step}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return sorted((row["input"], row["uid"].split("_")[1], row["output"], row["score"]) for row in rows)


def wait_until(condition, what: str, process, minutes: float = MINUTES) -> None:
    end = time.monotonic() + 60 * minutes
    while not condition():
        assert process.poll() is None, f"the training ended before {what}"
        assert time.monotonic() < end, f"{minutes} minutes without {what}"
        time.sleep(0.01)


def test_a_killed_training_goes_on_as_if_nothing_had_happened(tmp_path):
    """Killed during a checkpoint, resumed from the one before it, its driver killed at a random moment, resumed."""
    folder = make_folder(tmp_path)
    expected = trained(
        train(folder, "whole", CPU, *SETTINGS, f"trainer.rollout_data_dir={folder / 'whole-dump'}"), STEPS
    )
    expected = {step["training/global_step"]: step for step in expected}

    name = "killed"
    tracker = folder / name / "latest_checkpointed_iteration.txt"
    last_checkpoint = lambda: int(tracker.read_text() or 0) if tracker.exists() else 0  # noqa: E731

    def attempt(number: int):
        settings = (*SETTINGS, f"trainer.rollout_data_dir={folder / f'dump-{number}'}")
        with (folder / f"{name}-{number}.log").open("w") as log:
            return start(folder, name, CPU, *settings, stdout=log)

    # A pipe that nobody reads in place of the optimizer's file: the second checkpoint stops in the middle.
    half = folder / name / "global_step_6" / "actor" / "optim_world_size_1_rank_0.pt"
    half.parent.mkdir(parents=True)
    os.mkfifo(half)
    process = attempt(1)
    try:
        wait_until(half.with_name("model_world_size_1_rank_0.pt").exists, "the second checkpoint", process)
        time.sleep(1)
        assert last_checkpoint() == 3
    finally:
        kill(folder, name)
        process.wait()
    steps = {step["training/global_step"]: step for step in read_metrics(folder, name)}
    assert list(steps) == [1, 2, 3, 4, 5]
    whole_file = (folder / name / "global_step_3" / "actor" / half.name).read_bytes()
    half.unlink()
    half.write_bytes(whole_file[: len(whole_file) // 2])

    process = attempt(2)
    try:
        wait_until(lambda: last_checkpoint() == 6, "the second checkpoint", process)
        time.sleep(random.uniform(0, 3))
        process.kill()
        process.wait()
        ends_by_itself(folder, name)
    finally:
        kill(folder, name)
        process.wait()
    second = {step["training/global_step"]: step for step in read_metrics(folder, name)}
    assert min(second) == 4, "the resumed training starts after the last whole checkpoint"

    process = attempt(3)
    try:
        assert process.wait(timeout=60 * MINUTES) == 0, (folder / f"{name}-3.log").read_text()[-5000:]
    finally:
        kill(folder, name)
    third = {step["training/global_step"]: step for step in read_metrics(folder, name)}
    assert list(third) == [7, 8]

    for number, found in ((1, steps), (2, second), (3, third)):
        for step, metrics in found.items():
            if (folder / f"dump-{number}" / f"{step}.jsonl").exists():  # the last one may not have been written
                assert rollouts(folder / f"dump-{number}", step) == rollouts(folder / "whole-dump", step), step
            for key, value in expected[step].items():
                if key.startswith(("actor/", "critic/", "dmpo/", "response_length/")) and "perf" not in key:
                    assert metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), (number, step, key)
    assert len({step["actor/lr"] for step in expected.values()}) == STEPS
    assert len({step["dmpo/beta"] for step in expected.values()}) == STEPS

    # The rollouts of a group are not equal, nor are their scores.
    for step in range(1, STEPS + 1):
        groups: dict[str, list] = {}
        for line in (folder / "whole-dump" / f"{step}.jsonl").read_text().splitlines():
            row = json.loads(line)
            groups.setdefault(row["uid"].split("_")[0], []).append((row["output"], row["score"]))
        assert len(groups) == PROMPTS
        for group in groups.values():
            assert len({output for output, _ in group}) > 1 and len({score for _, score in group}) > 1
