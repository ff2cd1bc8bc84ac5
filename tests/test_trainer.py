"""The trainers' update on the real TransferQueue: what arrives at the workers, by rank and mini-batch.

verl's own code balances and pads the batch, chunks it over ranks, fetches a rank's rows and slices its mini-batches; a
stand-in replaces the worker group, which would run the optimizer.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.transferqueue_utils import tqbridge

from dmpo.config import ConfigError, policy_loss_config
from dmpo.dmpo_losses import dmpo_ppo_loss
from dmpo.dmpo_patch import register_trainers
from dmpo.dmpo_trainer import Rollouts, final_lengths, policy_gradient, step_metrics, validation_metrics
from dmpo.groups import NonFiniteGroupError, sequence_scores

from . import reference
from .conftest import start_ray
from .test_config import LOSS, run_config

register_trainers()
MODES = ["sync", "colocate_async", "separate_async"]
N = 4  # rollouts per prompt


@pytest.fixture(scope="module", autouse=True)
def transfer_queue():
    start_ray(num_cpus=4)
    config = run_config("transfer_queue.backend.SimpleStorage.num_data_storage_units=1", "transfer_queue.enable=true")
    tq.init(config.transfer_queue)
    yield
    tq.close()
    ray.shutdown()


class Workers:
    """Stands in for the actor's worker group: gets each rank's rows as verl's workers do and keeps them."""

    def __init__(self, dp_size: int, mini_batch_rows: int) -> None:
        self.dp_size, self.rows = dp_size, mini_batch_rows // dp_size
        self._dispatch_info = {"actor": list(range(dp_size))}
        self.loss_fn = None

    def set_loss_fn(self, loss_fn):
        self.loss_fn = loss_fn

    def update_actor(self, batch):
        self.extra_info = batch.extra_info
        fetch = tqbridge()(lambda data: SimpleNamespace(data=data))
        ranks = [fetch(chunk).data for chunk in batch.chunk(self.dp_size)]
        per_rank = [
            list(
                tu.make_iterator(
                    data, mini_batch_size=self.rows, epochs=1, seed=0, dataloader_kwargs={"shuffle": False}
                )
            )
            for data in ranks
        ]
        # mini_batches[m][r]: what rank r trains on in mini-batch m.
        self.mini_batches = list(zip(*per_rank, strict=True))
        return {"metrics": {"mfu": [0.0], "pg_loss": [0.0]}}


def make_trainer(*overrides, mode="sync", mini_batch=4, dp_size=2, step=1):
    """A trainer of verl's with our mixin, built by its own constructor, with `Workers` in place of the worker group."""
    config = run_config(
        f"trainer.v1.trainer_mode=dmpo_{mode}",
        f"actor_rollout_ref.rollout.n={N}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}",
        f"data.train_batch_size={4 * mini_batch}",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        *overrides,
    )
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    trainer.actor_rollout_wg = Workers(dp_size, mini_batch * N)
    trainer.global_steps = step
    trainer.tokenizer = SimpleNamespace(eos_token_id=0)
    return trainer


_partition = iter(range(10**6))


def put_rollouts(sessions_per_prompt, outputs_per_session=1, seed=0, edit=None):
    """Store finished rollouts as verl's agent loop does, in shuffled order; returns the batch and the rows by key."""
    rng = np.random.default_rng(seed)
    rows = []
    for prompt, sessions in enumerate(sessions_per_prompt):
        for session in range(sessions):
            score = float(rng.random() > 0.5)
            for output in range(outputs_per_session):
                length = int(rng.integers(1, 9))
                scores = torch.zeros(length)
                scores[-1] = score
                row = {
                    "uid": f"prompt-{prompt}",
                    "prompts": torch.ones(3, dtype=torch.int64),
                    "responses": torch.ones(length, dtype=torch.int64),
                    "input_ids": torch.ones(3 + length, dtype=torch.int64),
                    "position_ids": torch.arange(3 + length),
                    "response_mask": torch.ones(length, dtype=torch.int64),
                    "loss_mask": torch.ones(length, dtype=torch.int64),
                    "rm_scores": scores,
                    "old_log_probs": -torch.from_numpy(rng.random(length)).float(),
                    "advantages": torch.full((length,), float(rng.normal())),
                    "rollout_log_probs": torch.zeros(length),
                    "num_turns": 2,
                }
                rows.append((f"prompt-{prompt}_{session}_{output}", row))
    if edit:
        edit(dict(rows))
    rows = [rows[i] for i in rng.permutation(len(rows))]
    tags = [{"seq_len": len(row["input_ids"]), "status": "success"} for _, row in rows]
    meta = tq.kv_batch_put(
        keys=[key for key, _ in rows],
        partition_id=f"train{next(_partition)}",
        fields=list_of_dict_to_tensordict([row for _, row in rows]),
        tags=tags,
    )
    return meta, dict(rows)


def update(trainer, batch):
    """Balance and pad the batch, then update the actor; returns metrics and the worker's rows by mini-batch."""
    metrics = {}
    batch = trainer._balance_batch(batch, metrics)
    result = trainer._update_actor(batch, metrics)
    assert sorted(result.keys) == sorted(batch.keys)
    return metrics, trainer.actor_rollout_wg.mini_batches


def flat(mini_batch):
    """One dict per row of a mini-batch, over all ranks."""
    rows = []
    for data in mini_batch:
        columns = {
            name: data[name].unbind()
            for name in ("old_log_probs", "response_mask", "rm_scores", "dmpo_coef", "dmpo_group", "dmpo_scale")
        }
        columns["uid"] = tu.get(data, "uid")
        rows += [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return rows


def expected_coefficients(rows, beta=1.0, **options):
    """beta * dL/dphi of a mini-batch from the reference, with the rows that have a response token."""
    phi, score, label, valid = [], [], [], []
    for row in rows:
        mask = row["response_mask"].bool()
        phi.append((row["old_log_probs"].double() * mask).sum() / mask.sum().clamp_min(1))
        score.append(row["rm_scores"].sum())
        label.append(row["uid"])
        valid.append(bool(mask.any()) and not row["uid"].startswith("pad"))
    names = sorted(set(label))
    phi = torch.stack(phi).requires_grad_()
    loss, counted = reference.objective(
        phi,
        torch.stack(score),
        torch.tensor([names.index(uid) for uid in label]),
        valid=torch.tensor(valid),
        **(dict(temperature=1 / 15) | options),
    )
    (beta * loss).backward()
    return phi.grad, len(counted)


@pytest.mark.parametrize("mode", MODES)
def test_every_mini_batch_holds_whole_groups_and_exact_coefficients(mode):
    trainer = make_trainer(f"{LOSS}.loss_mode=grpo_dmpo_zero", f"{LOSS}.dmpo_beta=2", mode=mode)
    batch, _ = put_rollouts([N] * 16)
    metrics, mini_batches = update(trainer, batch)
    assert len(mini_batches) == 4
    seen, counted = [], 0
    for mini_batch in mini_batches:
        assert [len(data) for data in mini_batch] == [8, 8]
        rows = flat(mini_batch)
        uids = [row["uid"] for row in rows]
        assert all(uids.count(uid) == N for uid in uids), "a group is cut"
        seen += uids
        expected, groups = expected_coefficients(rows, beta=2, zero_signal="skip")
        counted += groups
        torch.testing.assert_close(torch.stack([row["dmpo_coef"] for row in rows]), expected.float())
        for row, coef in zip(rows, expected, strict=True):
            assert (row["dmpo_group"] < 0) == (coef == 0)
    assert len(set(seen)) == 16
    assert metrics["dmpo/whole_group_frac"] == 1.0
    assert metrics["dmpo/groups"] == 16 and metrics["dmpo/active_groups"] == counted < 16
    assert metrics["dmpo/group_size_mean"] == N and metrics["dmpo/beta"] == 2
    assert all(math.isfinite(value) for value in metrics.values())
    # verl's own settings of the update are there, as its trainer sets them.
    assert trainer.actor_rollout_wg.extra_info["mini_batch_size"] == 16


def test_verls_own_order_would_cut_the_groups():
    """The same batch without dealing: the premise of this package, on verl's code."""
    trainer = make_trainer(f"{LOSS}.loss_mode=vanilla")
    batch, _ = put_rollouts([N] * 16)
    metrics = {}
    batch = trainer._balance_batch(batch, metrics)
    trainer._update_actor(batch, metrics)
    cut = 0
    for mini_batch in trainer.actor_rollout_wg.mini_batches:
        uids = [uid for data in mini_batch for uid in tu.get(data, "uid")]
        cut += sum(uids.count(uid) < N for uid in uids)
        assert "dmpo_coef" not in mini_batch[0]
    assert cut > 32, f"{cut} of 64 rollouts"
    assert not [name for name in metrics if name.startswith("dmpo/")]


@pytest.mark.parametrize("mode", MODES)
def test_padding_failed_rollouts_and_uneven_groups(mode):
    """Groups of 1 to 4 rollouts; verl pads to whole mini-batches with rows of one uid, which are no group."""
    trainer = make_trainer(mode=mode)
    batch, rows = put_rollouts([4, 3, 4, 1, 2, 4, 4, 3, 4, 4, 2, 4, 3, 4])
    metrics = {}
    padded = trainer._balance_batch(batch, metrics)
    assert len(padded) == 48 and len(batch) == 46
    fix_padding(padded)
    trainer._update_actor(padded, metrics)
    assert metrics["dmpo/whole_group_frac"] == 1.0
    assert metrics["dmpo/groups"] == 14 and metrics["dmpo/active_groups"] == 13
    for mini_batch in trainer.actor_rollout_wg.mini_batches:
        worker_rows = flat(mini_batch)
        expected, _ = expected_coefficients(worker_rows)
        torch.testing.assert_close(torch.stack([row["dmpo_coef"] for row in worker_rows]), expected.float())
        for row in worker_rows:
            if row["uid"].startswith("pad") or row["uid"] == "prompt-3":
                assert row["dmpo_coef"] == 0 and row["dmpo_group"] == -1


def fix_padding(batch):
    """Write old_log_probs and advantages of padding rows in their own length, as verl's forward passes do."""
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding")]
    zeros = torch.zeros(len(keys), 1)
    tq.kv_batch_put(
        keys=keys,
        partition_id=batch.partition_id,
        fields=TensorDict({"old_log_probs": zeros, "advantages": zeros.clone()}, batch_size=len(keys)),
    )


def test_rows_rejected_by_rollout_correction_leave_their_group():
    """Rollout correction zeroes the response mask of what it rejects, tokens or whole rows."""

    def reject(rows):
        rows["prompt-0_1_0"]["response_mask"].zero_()
        rows["prompt-1_0_0"]["response_mask"][:1] = 0
        rows["prompt-1_0_0"]["response_mask"][1:] = 1

    trainer = make_trainer()
    batch, _ = put_rollouts([N] * 8, edit=reject)
    metrics, mini_batches = update(trainer, batch)
    assert metrics["dmpo/group_size_mean"] < N
    for mini_batch in mini_batches:
        rows = flat(mini_batch)
        expected, _ = expected_coefficients(rows)
        torch.testing.assert_close(torch.stack([row["dmpo_coef"] for row in rows]), expected.float())


def test_every_output_of_a_session_is_a_member_of_the_group():
    trainer = make_trainer(mini_batch=4)
    batch, _ = put_rollouts([2] * 8, outputs_per_session=2)
    metrics, mini_batches = update(trainer, batch)
    assert metrics["dmpo/group_size_mean"] == 4 and metrics["dmpo/whole_group_frac"] == 1.0
    for mini_batch in mini_batches:
        rows = flat(mini_batch)
        expected, _ = expected_coefficients(rows)
        torch.testing.assert_close(torch.stack([row["dmpo_coef"] for row in rows]), expected.float())


@pytest.mark.parametrize("score", [0.0, 1.0])
@pytest.mark.parametrize("loss_mode", ["grpo_dmpo", "grpo_dmpo_zero", "grpo_dmpo_fkl"])
def test_many_steps_without_any_signal_stay_finite(loss_mode, score):
    """All rewards equal in every group, step after step: finite metrics, and no group term where none belongs."""

    def level(rows):
        for row in rows.values():
            row["rm_scores"].zero_()
            row["rm_scores"][-1] = score
            row["advantages"].zero_()

    trainer = make_trainer(f"{LOSS}.loss_mode={loss_mode}", f"{LOSS}.dmpo_grad_ratio=0.5")
    for step in range(1, 4):
        trainer.global_steps = step
        metrics, mini_batches = update(trainer, put_rollouts([N] * 16, seed=step, edit=level)[0])
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert metrics["dmpo/beta"] == 1.0  # there was never a ratio
        coef = torch.stack([row["dmpo_coef"] for mini_batch in mini_batches for row in flat(mini_batch)])
        kept = loss_mode == "grpo_dmpo" or (loss_mode == "grpo_dmpo_fkl" and score == 1.0)
        assert metrics["dmpo/active_groups"] == (16 if kept else 0)
        assert coef.isfinite().all() and bool(coef.any()) == kept


def test_groups_of_one_and_empty_responses_take_no_part():
    def empty(rows):
        for key, row in rows.items():
            if key.startswith("prompt-3_"):
                row["response_mask"].zero_()

    trainer = make_trainer(mini_batch=2, dp_size=1)
    # Eight rows a mini-batch; prompts 0 and 1 have one rollout each.
    batch, _ = put_rollouts([1, 1, N, N, N, 2], edit=empty)
    metrics, mini_batches = update(trainer, batch)
    assert metrics["dmpo/groups"] == 5 and metrics["dmpo/active_groups"] == 3
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    for row in (row for mini_batch in mini_batches for row in flat(mini_batch)):
        if row["uid"] in ("prompt-0", "prompt-1", "prompt-3"):
            assert row["dmpo_coef"] == 0 and row["dmpo_group"] == -1


def test_a_uid_that_comes_back_in_a_later_batch_is_a_new_group():
    trainer = make_trainer()
    for step in (1, 2):
        trainer.global_steps = step
        _, mini_batches = update(trainer, put_rollouts([N] * 16, seed=step)[0])
        for mini_batch in mini_batches:
            rows = flat(mini_batch)
            expected, _ = expected_coefficients(rows)
            torch.testing.assert_close(torch.stack([row["dmpo_coef"] for row in rows]), expected.float())


def test_groups_that_cannot_be_packed_are_counted_by_their_share():
    """Three groups of 8 rows in two mini-batches of 12: one is cut, and the metric says so."""
    trainer = make_trainer("actor_rollout_ref.rollout.n=4", mini_batch=3, dp_size=1)
    batch, _ = put_rollouts([8, 8, 8])
    metrics, mini_batches = update(trainer, batch)
    assert len(mini_batches) == 2
    assert metrics["dmpo/whole_group_frac"] == pytest.approx(2 / 3)
    # Every row keeps the coefficient of its whole group, and the cut group counts as one half in each mini-batch.
    every_row = [row for mini_batch in mini_batches for row in flat(mini_batch)]
    expected, _ = expected_coefficients(every_row)
    coef = torch.stack([row["dmpo_coef"] for row in every_row])
    torch.testing.assert_close(coef, (expected * 3 / 1.5).float())
    # A worker could not recompute the coefficients of the cut group from the rows of one mini-batch.
    labels = {
        f"prompt-{i}": {int(row["dmpo_group"]) for row in every_row if row["uid"] == f"prompt-{i}"} for i in range(3)
    }
    assert all(len(label) == 1 for label in labels.values())
    assert sum(label == {-1} for label in labels.values()) == 1


@pytest.mark.parametrize(
    ("bypass", "local_step", "expected"), [(False, 0, "later"), (False, 1, "always"), (True, 0, "always")]
)
def test_workers_are_told_when_to_refresh_coefficients(bypass, local_step, expected):
    trainer = make_trainer(f"{LOSS}.dmpo_group_stats=refresh", mode="separate_async")
    trainer.config.algorithm.rollout_correction.bypass_mode = bypass
    trainer.local_trigger_step = local_step
    batch, _ = put_rollouts([N] * 16)
    _, mini_batches = update(trainer, batch)
    assert {tu.get(data, "dmpo_refresh") for mini_batch in mini_batches for data in mini_batch} == {expected}
    for row in flat(mini_batches[0]):
        # What the worker multiplies dL_g/dphi by: beta over the groups counted in the mini-batch.
        assert row["dmpo_scale"] == pytest.approx(1 / 4)


def test_workers_are_told_nothing_where_coefficients_are_anchored():
    trainer = make_trainer()
    batch, _ = put_rollouts([N] * 16)
    _, mini_batches = update(trainer, batch)
    assert tu.get(mini_batches[0][0], "dmpo_refresh") is None


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_stops_training_and_names_the_prompt(mode):
    def spoil(rows):
        rows["prompt-5_2_0"]["old_log_probs"][0] = math.nan

    batch, _ = put_rollouts([N] * 8, edit=spoil)
    with pytest.raises(NonFiniteGroupError, match="group prompt-5 "):
        update(make_trainer(mode=mode), batch)


def test_the_reward_target_is_the_score_before_a_kl_penalty():
    def penalise(rows):
        for row in rows.values():
            row["token_level_rewards"] = row["rm_scores"] - 0.3 * torch.rand(len(row["rm_scores"]))

    trainer = make_trainer("algorithm.use_kl_in_reward=true")
    batch, _ = put_rollouts([N] * 8, edit=penalise)
    _, mini_batches = update(trainer, batch)
    for mini_batch in mini_batches:
        rows = flat(mini_batch)
        expected, _ = expected_coefficients(rows)
        torch.testing.assert_close(torch.stack([row["dmpo_coef"] for row in rows]), expected.float())


def test_the_weight_of_the_step_is_in_the_coefficients():
    coefficients = {}
    for step in (1, 3, 4, 9):
        trainer = make_trainer(
            f"{LOSS}.dmpo_beta=2", f"{LOSS}.dmpo_start_step=3", f"{LOSS}.dmpo_warmup_steps=2", step=step
        )
        batch, _ = put_rollouts([N] * 8)
        metrics, mini_batches = update(trainer, batch)
        coefficients[step] = torch.stack([row["dmpo_coef"] for m in mini_batches for row in flat(m)])
        assert metrics["dmpo/beta"] == {1: 0.0, 3: 1.0, 4: 2.0, 9: 2.0}[step]
    assert (coefficients[1] == 0).all()
    torch.testing.assert_close(coefficients[4], 2 * coefficients[3])
    assert torch.equal(coefficients[9], coefficients[4])


def test_a_wanted_gradient_ratio_sets_beta_and_goes_on_after_a_resumption(tmp_path):
    overrides = [
        f"{LOSS}.dmpo_grad_ratio=0.25",
        f"{LOSS}.dmpo_warmup_steps=4",
        f"trainer.default_local_dir={tmp_path}",
    ]
    batches = [put_rollouts([N] * 16, seed=seed)[0] for seed in range(3)]

    def trainer_at(step):
        trainer = make_trainer(*overrides, step=step)
        trainer.actor_rollout_wg.save_checkpoint = trainer.actor_rollout_wg.load_checkpoint = lambda *_, **__: None
        trainer.train_dataloader = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        return trainer

    def step(trainer, number):
        trainer.global_steps = number
        metrics, mini_batches = update(trainer, batches[number - 1])
        for mini_batch in mini_batches:
            rows = flat(mini_batch)
            coef, _ = expected_coefficients(rows, beta=metrics["dmpo/beta"])
            torch.testing.assert_close(torch.stack([row["dmpo_coef"] for row in rows]), coef.float())
        return metrics

    whole = trainer_at(1)
    metrics = [step(whole, number) for number in (1, 2, 3)]
    # The first step has its own ratio for an average, and a quarter of the ramp; the later ones have neither.
    assert metrics[0]["dmpo/pg_grad_ratio"] == pytest.approx(0.25 / 4)
    at_one = [m["dmpo/pg_grad_ratio"] / m["dmpo/beta"] for m in metrics]
    assert metrics[1]["dmpo/beta"] == pytest.approx(
        0.5 * 0.25 / math.exp((0.9 * math.log(at_one[0]) + math.log(at_one[1])) / 1.9)
    )
    first = trainer_at(1)
    for number in (1, 2):
        step(first, number)
    first._save_checkpoint()
    second = trainer_at(0)
    second._load_checkpoint()
    assert second.global_steps == 2
    assert step(second, 3)["dmpo/beta"] == pytest.approx(metrics[2]["dmpo/beta"])


@pytest.mark.parametrize("mode", MODES)
def test_set_up_installs_the_loss_and_keeps_verls_trainer_mode(mode, monkeypatch):
    trainer = make_trainer(mode=mode)
    assert trainer.trainer_mode == mode
    assert type(trainer.replay_buffer).__name__ == ("ReplayBuffer" if mode == "sync" else "ReplayBufferAsync")
    # verl's own set-up starts workers and servers; tests/test_training.py runs it for real.
    verl_mode = get_trainer_cls(mode)
    monkeypatch.setattr(PPOTrainer if mode != "separate_async" else verl_mode, "_setup", lambda self: None)
    OmegaConf.update(trainer.config, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 2)
    trainer._setup()
    loss_fn = trainer.actor_rollout_wg.loss_fn
    assert loss_fn.func is dmpo_ppo_loss
    assert loss_fn.keywords["config"].policy_loss == policy_loss_config(
        trainer.config.actor_rollout_ref.actor.policy_loss
    )
    other = make_trainer(f"{LOSS}.loss_mode=vanilla", mode=mode)
    other._setup()
    assert other.actor_rollout_wg.loss_fn is None


def test_a_trainer_refuses_a_configuration_that_would_cut_groups():
    with pytest.raises(ConfigError, match="actor.shuffle=True"):
        make_trainer("actor_rollout_ref.actor.shuffle=true")


def test_registering_twice_is_harmless():
    before = get_trainer_cls("dmpo_sync")
    register_trainers()
    assert get_trainer_cls("dmpo_sync") is before


# --- reading a batch, and the metrics ------------------------------------------------------------------------------


def random_rollouts(jagged, rows=12, width=5):
    lengths = torch.randint(1, width + 1, (rows,)) if jagged else torch.full((rows,), width)
    dense = {
        "response_mask": (torch.rand(rows, width) > 0.3) & (torch.arange(width) < lengths[:, None]),
        "old_log_probs": -torch.rand(rows, width),
        "advantages": torch.randn(rows, 1).expand(rows, width).clone(),
        "rm_scores": torch.rand(rows, width) * (torch.arange(width) < lengths[:, None]),
    }
    columns = dict(dense)
    if jagged:
        columns = {
            name: torch.nested.as_nested_tensor(
                [row[:n] for row, n in zip(x, lengths, strict=True)], layout=torch.jagged
            )
            for name, x in dense.items()
        }
    uid = torch.arange(rows) // 3
    return Rollouts(TensorDict(columns | {"uid": uid}, batch_size=rows), padding=[False] * rows), dense, uid


@pytest.mark.parametrize("jagged", [True, False])
def test_a_batch_is_read_the_same_jagged_or_dense(jagged):
    rows, dense, _ = random_rollouts(jagged)
    mask = dense["response_mask"]
    phi = sequence_scores(dense["old_log_probs"].double(), mask)
    torch.testing.assert_close(rows.log_prob / rows.tokens.clamp_min(1), phi)
    torch.testing.assert_close(rows.reward, dense["rm_scores"].double().sum(-1))
    torch.testing.assert_close(rows.advantage, torch.where(mask.any(-1), dense["advantages"][:, 0], 0).double())
    assert torch.equal(rows.valid, mask.any(-1))


@pytest.mark.parametrize("loss_agg_mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("length_norm", ["mean", "sum"])
def test_gradient_ratio_and_cosine_are_those_of_verls_policy_gradient(loss_agg_mode, length_norm):
    """At theta_old: verl's vanilla loss by autograd with respect to phi, against the closed form of the metrics."""
    from verl.trainer.ppo.core_algos import agg_loss

    rows, dense, uid = random_rollouts(jagged=False)
    settings = policy_loss_config({"loss_mode": "grpo_dmpo", "dmpo_length_norm": length_norm})
    mini_batch = uid // 2
    stats = rows.statistics(settings, mini_batch)
    metrics = step_metrics(stats, mini_batch, 0.5, policy_gradient(rows, mini_batch, length_norm, loss_agg_mode))

    mask = dense["response_mask"]
    phi = torch.zeros(len(uid), dtype=torch.float64, requires_grad=True)
    # d log_prob_t / d phi of a row whose tokens move together: 1 for the mean, 1 / length for the sum.
    per_token = phi if length_norm == "mean" else phi / mask.sum(-1).clamp_min(1)
    ratio = (per_token[:, None] * mask).exp()
    loss = 0
    for m in mini_batch.unique():
        chosen = mini_batch == m
        loss = loss + agg_loss(
            (-dense["advantages"].double() * ratio)[chosen],
            mask[chosen],
            loss_agg_mode,
            global_batch_size=int(chosen.sum()),
        )
    (gradient,) = torch.autograd.grad(loss, phi)
    matching = 0.5 * stats.coef
    assert metrics["dmpo/pg_grad_ratio"] == pytest.approx((matching.norm() / gradient.norm()).item(), rel=1e-6)
    cosine = torch.nn.functional.cosine_similarity(matching, gradient, dim=0).item()
    assert metrics["dmpo/pg_grad_cos"] == pytest.approx(cosine, rel=1e-6)


def test_validation_reports_several_samples_per_prompt_and_counts_lost_ones_as_wrong():
    found = validation_metrics(
        ["aime", "aime", "aime", "amc", "amc"],
        ["p", "p", "q", "r", "r"],
        {"reward": [1.1, 0.1, 0.1, 1.1, 1.1], "acc": [1.0, 0.0, 0.0, 1.0, 1.0], "answer": ["4", "5", "", "7", "7"]},
        expected={("aime", "p"): 2, ("aime", "q"): 2, ("amc", "r"): 2},
        lengths={"p": [10, 20], "q": [40], "r": [5, 5]},
        max_length=40,
    )
    aime = {name.rpartition("/")[2]: value for name, value in found.items() if name.startswith("val-samples/aime/")}
    assert aime == pytest.approx(
        {
            "avg@2": 0.25,
            "pass@1": 0.25,
            "pass@2": 0.5,
            "maj@2": 0.25,
            "distinct_answers": 1.0,
            "answer_entropy": math.log(2) / 2,
            "answered": 0.5,
            "response_length": (15 + 40) / 2,
            "truncated": 0.5,
        }
    )
    assert found["val-samples/amc/maj@2"] == 1.0


def test_validation_has_the_best_quality_of_several_samples():
    found = validation_metrics(
        ["tsp"] * 4,
        ["p", "p", "q", "q"],
        {"reward": [0.9, 0.1, 1.3, 1.0], "acc": [1.0, 0.0, 1.0, 1.0], "ratio": [0.8, 0.0, 1.2, 0.9]},
        expected={("tsp", "p"): 2, ("tsp", "q"): 2, ("tsp", "lost"): 2},
        lengths={},
        max_length=40,
    )
    assert found["val-samples/tsp/pass@2"] == pytest.approx(2 / 3)
    assert found["val-samples/tsp/best@2"] == pytest.approx((0.8 + 1.0 + 0) / 3)  # a quality above 1 counts as 1
    assert found["val-samples/tsp/best@1"] == pytest.approx((0.4 + 0.95 + 0) / 3)


def test_lengths_are_those_of_each_sessions_last_output():
    tags = [{"response_len": length} for length in (3, 9, 4, 7)]
    lengths = final_lengths(["u_0_0", "u_0_10", "u_0_2", "v_1_0"], tags)
    assert sorted(lengths) == [("u", 9), ("v", 7)]
