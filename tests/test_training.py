"""Training for real on the CPU platform: Ray, FSDP2, vLLM, TransferQueue; our entry point and verl's own."""

import json
import math

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from dmpo.dmpo_patch import config_dir

from .training import CPU, PROMPTS, N, make_folder, train, trained

LOSS = "actor_rollout_ref.actor.policy_loss"
# The second update has coefficients that the workers recomputed; one that does not is an error in the loss.
TWO_REFRESHED_EPOCHS = (f"{LOSS}.dmpo_group_stats=refresh", "actor_rollout_ref.actor.ppo_epochs=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def two_ranks(folder):
    return train(
        folder,
        "two_ranks",
        CPU,
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
                "failed_rollouts",
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
        CPU,
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


@pytest.mark.slow
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
            CPU,
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
