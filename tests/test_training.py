"""Training for real on the CPU platform: Ray, FSDP2, vLLM, TransferQueue; our entry point and verl's own."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from dmpo.cpu import toy_model, toy_task
from dmpo.dmpo_patch import config_dir

ROOT = Path(__file__).parent.parent
MINUTES = 8
PROMPTS, N = 16, 8
LOSS = "actor_rollout_ref.actor.policy_loss"
# The second update has coefficients that the workers recomputed; one that does not is an error in the loss.
TWO_REFRESHED_EPOCHS = (f"{LOSS}.dmpo_group_stats=refresh", "actor_rollout_ref.actor.ppo_epochs=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random tiny model, data, and the agent loop with fixed responses."""
    folder = tmp_path_factory.mktemp("training")
    torch.manual_seed(0)
    tokenizer = toy_model.build_tokenizer()
    toy_model.build_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    toy_task.write_parquet(folder / "train.parquet", repeat=2)
    toy_task.write_parquet(folder / "val.parquet")
    (folder / "agent.yaml").write_text("- name: fixed\n  _target_: tests.fixed_rollouts.FixedRollouts\n")
    return folder


def train(folder: Path, name: str, entry_point: str, *overrides: str) -> tuple[int, str, list[dict]]:
    """Run a training to its end; returns exit status, output, and the metrics of each step."""
    metrics_file = folder / f"{name}.jsonl"
    command = [
        *(sys.executable, "-m", *entry_point.split()),
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
        f"reward.custom_reward_function.path={ROOT / 'dmpo' / 'cpu' / 'toy_task.py'}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder / 'agent.yaml'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=fixed",
        "data.shuffle=False",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={N}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.logger=[console,file]",
        "trainer.total_epochs=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={folder / name}",
        f"hydra.run.dir={folder / 'hydra'}",
        *overrides,
    ]
    env = os.environ | {
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(metrics_file),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
    }
    for _ in range(3):
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=60 * MINUTES)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"{name} took longer than {MINUTES} minutes; its last output:\n{output[-5000:]}")
        # Ray gives a node 30 seconds to come up, which is not always enough on a busy machine.
        if "The current node timed out during startup" not in output:
            break
    lines = metrics_file.read_text().splitlines() if metrics_file.exists() else []
    return process.returncode, output, [json.loads(line)["data"] for line in lines]


def trained(result: tuple[int, str, list[dict]], steps: int) -> list[dict]:
    status, output, metrics = result
    assert status == 0 and len(metrics) == steps, output[-5000:]
    return metrics


@pytest.fixture(scope="module")
def two_ranks(folder):
    return train(
        folder,
        "two_ranks",
        "dmpo.main_dmpo --config-name=dmpo_cpu",
        f"{LOSS}.dmpo_beta=2",
        *TWO_REFRESHED_EPOCHS,
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    )


def test_two_ranks_train_on_whole_groups(folder, two_ranks):
    metrics = trained(two_ranks, steps=2)
    for step in metrics:
        assert step["dmpo/whole_group_frac"] == 1.0
        assert step["dmpo/groups"] == step["dmpo/active_groups"] == PROMPTS
        assert step["dmpo/group_size_mean"] == N and step["dmpo/beta"] == 2.0
        ours = {name: value for name, value in step.items() if name.startswith("dmpo/")}
        assert set(ours) == {
            f"dmpo/{name}"
            for name in (
                *("loss", "beta", "groups", "active_groups", "whole_group_frac", "group_size_mean", "target_entropy"),
                *("policy_entropy", "target_ess", "forward_kl", "reverse_kl", "pg_grad_ratio", "pg_grad_cos"),
            )
        }
        assert all(math.isfinite(value) for value in ours.values()), ours
        assert step["actor/grad_norm"] > 0 and math.isfinite(step["actor/pg_loss"])
    assert metrics[0]["actor/lr"] == 1e-3


def test_training_changes_the_weights(folder, two_ranks):
    trained(two_ranks, steps=2)
    before = load_file(folder / "model" / "model.safetensors")
    (saved,) = (folder / "two_ranks" / "global_step_2" / "actor").rglob("model.safetensors")
    after = load_file(saved)
    changed = [name for name in after if not torch.equal(before[name].float(), after[name].float())]
    assert len(changed) > len(after) // 2, f"{len(changed)} of {len(after)} tensors changed"


def test_one_rank_with_other_micro_batches_takes_the_same_step(folder, two_ranks):
    """The same rollouts on one rank, in dynamic micro-batches: the same statistics, and the same gradient norms (their
    mean over both updates, the second at a policy that has moved and with refreshed coefficients)."""
    expected = trained(two_ranks, steps=2)[0]
    result = train(
        folder,
        "one_rank",
        "dmpo.main_dmpo --config-name=dmpo_cpu",
        f"{LOSS}.dmpo_beta=2",
        *TWO_REFRESHED_EPOCHS,
        "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=300",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=500",
    )
    (metrics,) = trained(result, steps=1)
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-3)
    for name in ("dmpo/loss", "dmpo/forward_kl", "dmpo/pg_grad_ratio", "critic/score/mean"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-3), name


def cpu_overrides() -> list[str]:
    """The settings of config/dmpo_cpu.yaml as overrides for an entry point that is not ours."""
    config = OmegaConf.load(config_dir() / "dmpo_cpu.yaml")
    del config["hydra"], config["defaults"], config["ray_kwargs"]["ray_init"]["runtime_env"]
    flat: list[str] = []

    def walk(node, path):
        for key, value in OmegaConf.to_container(node, resolve=False).items():
            if isinstance(value, dict):
                walk(OmegaConf.create(value), [*path, key])
            elif not (isinstance(value, str) and value.startswith("${")):
                flat.append(f"++{'.'.join([*path, key])}={str(value).replace(' ', '')}")

    walk(config, [])
    return [*flat, "++ray_kwargs.ray_init.num_gpus=1"]


def test_verls_own_entry_point_trains_with_one_override(folder, two_ranks):
    expected = trained(two_ranks, steps=2)[0]
    result = train(
        folder,
        "main_ppo",
        "verl.trainer.main_ppo",
        *cpu_overrides(),
        "+dmpo=default",
        f"{LOSS}.dmpo_beta=2",
        "trainer.logger=[console,file]",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        *TWO_REFRESHED_EPOCHS,
    )
    (metrics,) = trained(result, steps=1)
    assert metrics["dmpo/whole_group_frac"] == 1.0
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-3)


def test_a_dmpo_mode_without_the_override_stops_at_the_first_update(folder):
    """verl's own trainer would cut the groups: the loss refuses, and says what to add."""
    status, output, metrics = train(
        folder,
        "no_override",
        "verl.trainer.main_ppo",
        *cpu_overrides(),
        "algorithm.adv_estimator=grpo",
        f"{LOSS}.loss_mode=grpo_dmpo",
        "trainer.total_training_steps=1",
    )
    assert status != 0 and metrics == []
    assert "MissingGroupsError" in output and "+dmpo=default" in output


@pytest.mark.slow
def test_beta_goes_on_from_a_checkpoint(folder):
    """`dmpo_grad_ratio` and the ramp across a resumption: beta of every step follows from all steps' ratios."""
    metrics = []
    for steps in (2, 4):
        result = train(
            folder,
            "grad_ratio",
            "dmpo.main_dmpo --config-name=dmpo_cpu",
            f"{LOSS}.dmpo_grad_ratio=0.5",
            f"{LOSS}.dmpo_start_step=2",
            f"{LOSS}.dmpo_warmup_steps=2",
            f"trainer.total_training_steps={steps}",
            "trainer.total_epochs=4",
            "trainer.save_freq=2",
            f"hydra.run.dir={folder / f'hydra-{steps}'}",
        )
        metrics += trained(result, steps=2)
    assert [step["training/global_step"] for step in metrics] == [1, 2, 3, 4]
    beta = [step["dmpo/beta"] for step in metrics]
    assert beta[0] == 0  # GRPO first, then half the weight, then all of it
    state = json.loads((folder / "grad_ratio" / "global_step_4" / "dmpo_grad_ratio.json").read_text())
    # The second run starts from the first one's average: four steps with a ratio, weighted .9^3, .9^2, .9, 1.
    assert state["weight"] == pytest.approx(0.1 * (1 + 0.9 + 0.9**2 + 0.9**3))
    assert beta[3] == pytest.approx(state["beta"])
    at_one = [step["dmpo/pg_grad_ratio"] / step["dmpo/beta"] for step in metrics[1:]]
    # Step 1 logs no ratio at beta 0: it is what is missing in the state.
    later = sum(0.9 ** (2 - i) * math.log(ratio) for i, ratio in enumerate(at_one))
    first = (state["sum"] / 0.1 - later) / 0.9**3
    mean = (0.9**2 * first + 0.9 * math.log(at_one[0]) + math.log(at_one[1])) / (0.9**2 + 0.9 + 1)
    assert beta[2] == pytest.approx(0.5 / math.exp(mean), rel=1e-6)
