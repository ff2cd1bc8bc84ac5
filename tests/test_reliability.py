"""Faults and bad input: training goes on with a counted metric, or stops with an error and a checkpoint to resume from.

docs/reliability.md has a row for each.
"""

import asyncio
import concurrent.futures
import itertools
import json
import math
import random
import re
import threading
import time
from types import SimpleNamespace

import pandas as pd
import pytest
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import hf_tokenizer

from dmpo.config import ConfigError, policy_loss_config
from dmpo.cpu.training_run import quoted
from dmpo.dealing import deal
from dmpo.dmpo_trainer import RewardError, Rollouts, RolloutsStalledError, policy_gradient, step_metrics

from . import faulty_rewards
from .test_trainer import MODES, N, make_trainer, transfer_queue  # noqa: F401
from .training import CPU, MINUTES, ROOT, ends_by_itself, kill, make_folder, processes, read_metrics, start, train

REWARDS = ROOT / "tests" / "faulty_rewards.py"
PROMPTS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("reliability"))


# --- reward functions: verl's own agent loop, reward loop, replay buffer and advantages ------------------------------


def roll_out(trainer, folder):
    """Let verl's agent loop worker, with the rewards of verl's reward loop, answer a batch of prompts."""

    class Manager:
        def generate_sequences(self, prompts):
            asyncio.run(self._generate(prompts))

        async def _generate(self, prompts):
            reward = RewardLoopWorker(trainer.config)
            handle = SimpleNamespace(compute_score=SimpleNamespace(remote=reward.compute_score))
            agent = AgentLoopWorkerTQ.__ray_metadata__.modified_class(
                trainer.config, llm_client=None, reward_loop_worker_handles=[handle]
            )
            await agent.generate_sequences(prompts)
            await asyncio.gather(*agent.background_tasks)

    trainer.tokenizer, trainer.processor = hf_tokenizer(str(folder / "model")), None
    trainer._init_dataloader()
    trainer.agent_loop_manager = Manager()
    trainer._add_batch_to_generate()


def step_with_reward(folder, reward):
    """One step of a trainer, from the prompts to the rows that workers get; returns metrics and mini-batches."""
    trainer = make_trainer(
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder / 'agent.yaml'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=fixed",
        "actor_rollout_ref.rollout.name=vllm",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
        "data.dataloader_num_workers=0",
        "data.shuffle=False",
        "data.max_prompt_length=64",
        f"reward.custom_reward_function.path={REWARDS}",
        f"reward.custom_reward_function.name={reward}",
    )
    roll_out(trainer, folder)
    metrics = {}
    try:
        batch, _ = trainer.replay_buffer.sample(1, "train", PROMPTS)
        batch = trainer._balance_batch(batch, metrics)
        batch = put_old_log_probs(batch)
        batch = trainer._compute_advantage(batch, metrics)
        trainer._update_actor(batch, metrics)
        return metrics, trainer.actor_rollout_wg.mini_batches
    finally:
        tq.kv_clear(keys=list(tq.kv_list().get("train", {})), partition_id="train")


def put_old_log_probs(batch):
    mask = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
    old_log_probs = torch.nested.nested_tensor_from_jagged(
        -torch.rand(len(mask["response_mask"].values())), mask["response_mask"].offsets()
    )
    fields = TensorDict({"old_log_probs": old_log_probs}, batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


@pytest.mark.parametrize(("reward", "groups", "failed"), [("graded", 16, 0), ("raising", 15, 4 + 15), ("text", 15, 4)])
def test_rollouts_whose_reward_fails_are_left_out_and_counted(folder, reward, groups, failed):
    metrics, mini_batches = step_with_reward(folder, reward)
    assert metrics["dmpo/groups"] == groups and metrics["dmpo/failed_rollouts"] == failed
    assert metrics["dmpo/group_size_mean"] == pytest.approx((PROMPTS * N - failed) / groups)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    coef = torch.cat([data["dmpo_coef"] for mini_batch in mini_batches for data in mini_batch])
    assert coef.isfinite().all() and (coef != 0).sum() > 32


@pytest.mark.parametrize(("reward", "value"), [("not_a_number", "nan"), ("nothing", "None")])
def test_a_reward_that_is_no_number_stops_training_and_names_the_rollout(folder, reward, value):
    with pytest.raises(RewardError, match=f"the reward is {value} for {N} of {PROMPTS * N} rollouts") as error:
        step_with_reward(folder, reward)
    # The number 3, answered with "{session}+{3 - session}".
    assert re.search(r"rollout [-0-9a-f]{36}_\d_0 .*'<\|im_start\|>user\\n3=<.*response: '\d\+", str(error.value))


def test_rewards_that_all_fail_stop_training(folder):
    with pytest.raises(RuntimeError, match="no materializable trajectories"):
        step_with_reward(folder, "always_raising")


# --- waiting for rollouts --------------------------------------------------------------------------------------------


@pytest.fixture
def empty_queue():
    yield
    for partition, items in (tq.kv_list() or {}).items():
        if items:
            tq.kv_clear(keys=list(items), partition_id=partition)


def put_prompts(status, *names):
    tags = [{"is_prompt": True, "status": status, "global_steps": 1} for _ in names]
    tq.kv_batch_put(keys=list(names), partition_id="train", tags=tags)


@pytest.mark.parametrize("mode", MODES)
def test_waiting_for_rollouts_has_an_end(mode, empty_queue):
    """A reward that hangs, a server or an agent loop that is gone: prompts that never finish."""
    trainer = make_trainer("trainer.v1.dmpo_rollout_timeout=1", mode=mode)
    trainer.replay_buffer.poll_interval = 0.1
    put_prompts("finished", "prompt-0")
    put_prompts("running", "prompt-1", "prompt-2")
    start = time.monotonic()
    with pytest.raises(RolloutsStalledError, match=r"for 1 s .* 2 prompts are unfinished \(prompt-1, prompt-2"):
        trainer.replay_buffer.sample(1, "train", 3)
    assert 1 <= time.monotonic() - start < 5


@pytest.mark.parametrize("at_once", [False, True])
def test_rollouts_that_come_back_slowly_are_waited_for(empty_queue, at_once):
    """Each within the limit, all of them together not; nor does the time between two waits count."""
    trainer = make_trainer("trainer.v1.dmpo_rollout_timeout=2")
    trainer.replay_buffer.poll_interval = 0.1
    names = [f"prompt-{i}" for i in range(2)]

    def finish():
        time.sleep(1.2 if at_once else 0)
        for name in names:
            time.sleep(0 if at_once else 1.2)
            tq.kv_put(key=f"{name}_0_0", partition_id="train", tag={"status": "success"})
            put_prompts("finished", name)

    for _ in range(2):
        put_prompts("running", *names)
        thread = threading.Thread(target=finish)
        thread.start()
        trainer.replay_buffer.sample(1, "train", len(names))
        thread.join()
        tq.kv_clear(keys=[f"{name}_0_0" for name in names], partition_id="train")
        time.sleep(1)
        trainer.on_step_begin()


def test_an_asynchronous_training_does_not_replace_failing_rollouts_for_ever(empty_queue):
    trainer = make_trainer("trainer.v1.dmpo_rollout_timeout=1", mode="colocate_async")
    trainer.replay_buffer.poll_interval = 0.1
    number = itertools.count()

    def refill(prompts):
        names = [f"prompt-{next(number)}" for _ in range(prompts)]
        put_prompts("running", *names)
        threading.Timer(0.15, put_prompts, ("failure", *names)).start()

    trainer.replay_buffer.refill_fn = refill
    refill(2)
    with pytest.raises(RolloutsStalledError, match="fails for every rollout"):
        trainer.replay_buffer.sample(1, "train", 2)
    time.sleep(0.5)
    assert next(number) > 4


@pytest.mark.parametrize("limit", ["0", "-1", "soon"])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(ConfigError, match=r"trainer\.v1\.dmpo_rollout_timeout"):
        make_trainer(f"trainer.v1.dmpo_rollout_timeout={limit}")


# --- checkpoints and full disks --------------------------------------------------------------------------------------


def trainer_with_checkpoints(folder, *overrides, step=1):
    trainer = make_trainer(f"trainer.default_local_dir={folder}", *overrides, step=step)
    trainer.actor_rollout_wg.save_checkpoint = trainer.actor_rollout_wg.load_checkpoint = lambda *_, **__: None
    trainer.train_dataloader = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    return trainer


def resumed_step(folder):
    trainer = trainer_with_checkpoints(folder, step=0)
    trainer._load_checkpoint()
    return trainer.global_steps


def test_a_kill_while_the_last_checkpoint_is_named_leaves_it_usable(tmp_path):
    """verl empties that file before it writes it."""
    for step in (2, 10):
        trainer_with_checkpoints(tmp_path, step=step)._save_checkpoint()
    # Half written by a run that was killed, before the steps above were.
    (tmp_path / "global_step_12").mkdir()
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "10"
    tracker.write_text("")
    assert resumed_step(tmp_path) == 10
    assert tracker.read_text() == "10"
    tracker.write_text("2")
    assert resumed_step(tmp_path) == 2


def test_an_unnamed_checkpoint_is_not_resumed_from(tmp_path):
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").touch()
    assert resumed_step(tmp_path) == 0


@pytest.mark.parametrize("override", ["trainer.max_actor_ckpt_to_keep=1", "+trainer.remove_previous_ckpt_in_save=true"])
def test_the_previous_checkpoint_is_kept_until_the_next_is_whole(tmp_path, override):
    """With one to keep, verl's workers remove it when they have written theirs, and the rest is yet to come."""
    keep = []
    trainer = trainer_with_checkpoints(tmp_path, override)
    trainer.actor_rollout_wg.save_checkpoint = lambda *_, max_ckpt_to_keep: keep.append(max_ckpt_to_keep)
    trainer._save_checkpoint()
    assert keep == [2]


def test_a_disk_that_is_full_during_a_checkpoint_leaves_the_previous_one(tmp_path):
    trainer_with_checkpoints(tmp_path, step=1)._save_checkpoint()
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "global_step_2" / "data.pt").symlink_to("/dev/full")
    with pytest.raises((OSError, RuntimeError)):
        trainer_with_checkpoints(tmp_path, step=2)._save_checkpoint()
    assert resumed_step(tmp_path) == 1


def test_a_disk_that_is_full_during_a_dump_of_rollouts_stops_training(tmp_path):
    """At the end of the next step: verl writes in the background."""
    trainer = make_trainer()
    trainer._init_dump_executor()
    (tmp_path / "1.jsonl").symlink_to("/dev/full")
    rollouts = dict(inputs=["p"], outputs=["r"], gts=["1"], scores=[0.0], reward_extra_infos_dict={})
    trainer._dump_generations(**rollouts, dump_path=str(tmp_path))
    concurrent.futures.wait(trainer._dump_futures)
    trainer.global_steps = 2
    with pytest.raises(OSError, match="No space left on device"):
        trainer._dump_generations(**rollouts, dump_path=str(tmp_path))
    with pytest.raises(OSError, match="No space left on device"):
        trainer._shutdown_dump_executor()


# --- very many groups ------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_groups_in_one_batch():
    """All that the controller does with a batch, on 200,000 rows: seconds."""
    groups, size = 100_000, 2
    label = torch.arange(groups).repeat(size)[torch.randperm(groups * size)]
    lengths = torch.randint(1, 6, (groups * size,))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    tokens = int(offsets[-1])
    columns = {
        "response_mask": torch.ones(tokens),
        "old_log_probs": -torch.rand(tokens),
        "rm_scores": torch.rand(tokens),
        "advantages": torch.randn(tokens),
    }
    data = {name: torch.nested.nested_tensor_from_jagged(values, offsets) for name, values in columns.items()}
    start = time.monotonic()
    rows = Rollouts(data | {"uid": [f"prompt-{i}" for i in label.tolist()]}, padding=[False] * len(label))
    plan = deal(rows.label.numpy(), lengths.numpy(), num_mini_batches=100, num_ranks=8)
    mini_batch = torch.from_numpy(plan.mini_batch)
    stats = rows.statistics(policy_loss_config({"loss_mode": "grpo_dmpo"}), mini_batch)
    gradient = policy_gradient(rows, mini_batch, "mean", "token-mean")
    metrics = step_metrics(stats, mini_batch, 1.0, gradient)
    assert metrics["dmpo/active_groups"] == groups and metrics["dmpo/whole_group_frac"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    assert time.monotonic() - start < 60


# --- real trainings --------------------------------------------------------------------------------------------------

BATCH = 8  # prompts a step, of 32
REAL = (
    f"data.train_batch_size={BATCH}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
    f"reward.custom_reward_function.path={REWARDS}",
    "trainer.save_freq=1",
    "trainer.total_epochs=25",
    "trainer.total_training_steps=100",
)


def last_checkpoint(run):
    tracker = run / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text() or 0) if tracker.exists() else 0


def ended(folder, name, process, seconds=240):
    """Exit status of a training that must end by itself, all of its processes with it."""
    try:
        status = process.wait(timeout=seconds)
        ends_by_itself(folder, name)
        return status
    finally:
        kill(folder, name)
        process.wait()


@pytest.mark.slow
def test_a_real_training_with_a_faulty_reward(folder):
    """Rollouts without a reward are counted, a NaN ends it, and so does a reward that hangs when it is resumed."""
    status, output, metrics = train(folder, "faulty", CPU, *REAL, "reward.custom_reward_function.name=faulty")
    assert status != 0 and len(metrics) == 1, output[-5000:]
    # The fixed answers to 3, see tests/fixed_rollouts.py.
    strings = sum(isinstance(faulty_rewards.faulty("", f"{i}+{3 - i}", "3"), str) for i in range(8))
    assert 0 < strings < 8
    assert metrics[0]["dmpo/failed_rollouts"] == 8 + strings and metrics[0]["dmpo/groups"] == BATCH - 1
    assert all(math.isfinite(value) for value in metrics[0].values()), metrics
    assert "RewardError: the reward is nan for 8 of 64 rollouts" in output and "12=" in output
    assert last_checkpoint(folder / "faulty") == 1

    hanging = ("reward.custom_reward_function.name=hanging", "trainer.v1.dmpo_rollout_timeout=20")
    status, output, metrics = train(folder, "faulty", CPU, *REAL, *hanging)
    assert status != 0 and metrics == [], output[-5000:]
    assert "global_step_1, setting global step to 1" in output
    assert "RolloutsStalledError: no rollout has come back for 20 s" in output
    assert last_checkpoint(folder / "faulty") == 1
    ends_by_itself(folder, "faulty")


@pytest.mark.slow
def test_a_real_training_whose_processes_die(folder):
    """A worker, then the rollout server, then the disk: each time it ends with an error, and resumes."""
    name = "dying"
    run, dump = folder / name, folder / "dump"
    dump.mkdir()
    settings = (*REAL, "reward.custom_reward_function.name=graded", f"trainer.rollout_data_dir={dump}")

    def attempt(fault):
        """Train two steps on from the last checkpoint, let `fault` happen; returns the output."""
        resumed = last_checkpoint(run)
        (folder / f"{name}.jsonl").unlink(missing_ok=True)
        log = folder / f"{name}-{resumed}.log"
        with log.open("w") as output:
            process = start(folder, name, CPU, *settings, stdout=output)
        try:
            end = time.monotonic() + 60 * MINUTES
            while last_checkpoint(run) < resumed + 2:
                assert process.poll() is None and time.monotonic() < end, log.read_text()[-5000:]
                time.sleep(0.1)
            fault()
        except BaseException:
            kill(folder, name)
            raise
        assert ended(folder, name, process) != 0
        assert read_metrics(folder, name)[0]["training/global_step"] == resumed + 1
        assert (run / f"global_step_{last_checkpoint(run)}" / "data.pt").exists()
        return log.read_text()

    def kill_process(title):
        time.sleep(random.uniform(0, 2))
        found = [process for process in processes(folder, name) if title in " ".join(process.cmdline())]
        assert len(found) == 1, [process.cmdline() for process in processes(folder, name)]
        found[0].kill()

    for title in ("WorkerDict", "vLLMHttpServer"):
        output = attempt(lambda title=title: kill_process(title))
        assert re.search(rf"ActorDiedError: .*\n\s*class_name: .*{title}", output), output[-5000:]
    for step in range(last_checkpoint(run) + 1, 101):
        (dump / f"{step}.jsonl").symlink_to("/dev/full")
    assert "No space left on device" in attempt(lambda: None)


@pytest.mark.slow
def test_two_real_trainings_at_once_beside_another_ray(folder, tmp_path):
    """In a folder with spaces, on prompts in several scripts, every response of one of them truncated."""
    here = make_folder(tmp_path / "a folder with späces")
    asked = ["数を足す {}=", "Сумма {} 🙂=", "{} ≟ é"]
    rows = pd.read_parquet(here / "train.parquet")
    numbers = [row["ground_truth"] for row in rows["reward_model"]]
    rows["prompt"] = [[{"role": "user", "content": asked[i % 3].format(n)}] for i, n in enumerate(numbers)]
    rows.to_parquet(here / "train.parquet")
    settings = (
        *REAL,
        "trainer.total_training_steps=2",
        "reward.custom_reward_function.name=graded",
        # Room for 64 of these prompts: vLLM for CPUs fails where it splits the prompt of a request with a seed.
        "actor_rollout_ref.rollout.max_num_batched_tokens=8192",
    )
    loops = {"one": "seeded", "two": "endless"}
    beside = ray.util.list_named_actors(all_namespaces=True)
    assert beside
    environment = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    running = {}
    try:
        for name, loop in loops.items():
            own = (
                f"actor_rollout_ref.rollout.agent.default_agent_loop={loop}",
                f"trainer.rollout_data_dir={quoted(here / name / 'dump')}",
                f"hydra.run.dir={quoted(here / f'hydra-{name}')}",
            )
            with (here / f"{name}.log").open("w") as log:
                running[name] = start(here, name, CPU, *settings, *own, env=environment, stdout=log)
        end = time.monotonic() + 60 * 2 * MINUTES
        while any(process.poll() is None for process in running.values()):
            assert time.monotonic() < end, [(here / f"{name}.log").read_text()[-2000:] for name in loops]
            assert ray.util.list_named_actors(all_namespaces=True) == beside
            time.sleep(1)
    finally:
        for name in running:
            kill(here, name)
    for name, process in running.items():
        assert process.returncode == 0, (here / f"{name}.log").read_text()[-5000:]
        metrics = read_metrics(here, name)
        assert [step["training/global_step"] for step in metrics] == [1, 2]
        for step in metrics:
            ours = {key: value for key, value in step.items() if key.startswith(("dmpo/", "actor/", "critic/"))}
            assert all(math.isfinite(value) for value in ours.values()), ours
            assert step["dmpo/failed_rollouts"] == 0 and step["actor/grad_norm"] > 0
            assert step["dmpo/active_groups"] == BATCH
            assert name == "one" or step["response_length/clip_ratio"] == 1
        dumped = [json.loads(line)["input"] for line in (here / name / "dump" / "1.jsonl").read_text().splitlines()]
        assert any("数を足す 2=" in text for text in dumped) and any("🙂=" in text for text in dumped)
        assert last_checkpoint(here / name) == 2
