from functools import partial

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from verl.trainer.ppo.core_algos import (
    POLICY_LOSS_REGISTRY,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    register_policy_loss,
)
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.config import ActorConfig, OptimizerConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from dmpo.config import MODES, ConfigError, DMPOPolicyLossConfig
from dmpo.dmpo_core_algos import MissingGroupsError, compute_policy_loss_dro, row_coefficients
from dmpo.dmpo_losses import dmpo_ppo_loss
from dmpo.groups import group_statistics, sequence_scores

from . import reference

AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
B, T = 12, 6
UIDS = ["b", "a", "a", "c", "b", "a", "c", "d", "b", "e", "e", "e"]


def actor_config(policy_loss=None, **fields) -> ActorConfig:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=2,
        optim=OptimizerConfig(lr=1e-6),
        policy_loss=policy_loss or PolicyLossConfig(),
        **fields,
    )
    config.global_batch_info.update(dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None)
    return config


@pytest.fixture
def rows():
    """Inputs of a policy loss in float64; the gradient is taken with respect to `log_prob`."""
    lengths = torch.randint(1, T + 1, (B,))
    mask = torch.arange(T) < lengths[:, None]
    old = -torch.rand(B, T).double() * mask
    log_prob = ((old + 0.2 * torch.randn(B, T)) * mask).detach().requires_grad_()
    score = (torch.rand(B) > 0.5).float()
    score[-3:] = 1.0  # group e is solved and has no signal
    advantages = torch.randn(B, 1).double() * mask
    return dict(old_log_prob=old, log_prob=log_prob, advantages=advantages, response_mask=mask), score


def expected_loss(loss_mode, rows, score, config, loss_agg_mode="token-mean", **weights):
    """Base + beta * L, with L from the reference over phi(log_prob)."""
    mode, settings = MODES[loss_mode], config.policy_loss
    mask = rows["response_mask"]
    phi = (rows["log_prob"] * mask).sum(-1) / mask.sum(-1)
    labels = torch.tensor([sorted(set(UIDS)).index(uid) for uid in UIDS])
    group_term, _ = reference.objective(
        phi,
        score,
        labels,
        temperature=settings.dmpo_temperature,
        policy_temperature=settings.dmpo_policy_temperature,
        divergence=mode.divergence,
        zero_signal=mode.zero_signal,
    )
    loss = (settings.dmpo_beta if mode.weighted else 1.0) * group_term
    if mode.base:
        loss = loss + compute_policy_loss_vanilla(**rows, loss_agg_mode=loss_agg_mode, config=config, **weights)[0]
    return loss


@pytest.mark.parametrize("loss_mode", sorted(MODES))
@pytest.mark.parametrize("loss_agg_mode", ["token-mean", "seq-mean-token-mean"])
def test_registered_loss_alone_is_base_plus_group_term(rows, loss_mode, loss_agg_mode):
    rows, score = rows
    config = actor_config(DMPOPolicyLossConfig(loss_mode=loss_mode, dmpo_beta=3.0, dmpo_policy_temperature=0.5))
    expected = expected_loss(loss_mode, rows, score, config, loss_agg_mode)
    (gradient,) = torch.autograd.grad(expected, rows["log_prob"])
    loss, metrics = get_policy_loss_fn(loss_mode)(
        **rows, loss_agg_mode=loss_agg_mode, config=config, index=np.array(UIDS, dtype=object), score=score
    )
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(loss, rows["log_prob"])[0], gradient, rtol=1e-9, atol=1e-12)
    assert not loss.is_leaf
    for name in ("actor/dmpo_loss", "actor/dmpo_groups", "actor/dmpo_active_groups", "actor/pg_clipfrac"):
        assert isinstance(metrics[name], float), name
    assert metrics["actor/dmpo_groups"] == 5
    labels = torch.tensor([ord(uid) for uid in UIDS])
    _, counted = reference.objective(
        score.double(), score, labels, temperature=1, zero_signal=MODES[loss_mode].zero_signal
    )
    assert metrics["actor/dmpo_active_groups"] == len(counted)


@pytest.mark.parametrize(
    "index",
    [
        np.array(UIDS, dtype=object),
        np.array(UIDS),
        list(UIDS),
        NonTensorStack(*UIDS),
        torch.tensor([ord(uid) for uid in UIDS], dtype=torch.int32),
    ],
    ids=["object", "str", "list", "NonTensorStack", "int32"],
)
def test_uids_of_every_kind_make_the_same_groups(rows, index):
    rows, score = rows
    config = actor_config(DMPOPolicyLossConfig(loss_mode="grpo_dmpo"))
    expected = expected_loss("grpo_dmpo", rows, score, config)
    loss, _ = get_policy_loss_fn("grpo_dmpo")(**rows, config=config, index=index, score=score)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)


def test_policy_loss_section_may_be_a_dictconfig_a_dict_or_verls_dataclass(rows):
    rows, score = rows
    values = dict(loss_mode="grpo_dmpo_js", dmpo_beta=2.5, dmpo_temperature=0.3)
    expected = expected_loss("grpo_dmpo_js", rows, score, actor_config(DMPOPolicyLossConfig(**values)))
    for section in (OmegaConf.create(values), dict(values)):
        config = actor_config()
        config.__dict__["policy_loss"] = section
        loss, _ = get_policy_loss_fn("grpo_dmpo_js")(**rows, config=config, index=UIDS, score=score)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    defaults = actor_config(PolicyLossConfig(loss_mode="grpo_dmpo_js"))
    loss, _ = get_policy_loss_fn("grpo_dmpo_js")(**rows, config=defaults, index=UIDS, score=score)
    expected = expected_loss("grpo_dmpo_js", rows, score, actor_config(DMPOPolicyLossConfig(loss_mode="grpo_dmpo_js")))
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)


def test_advantage_target_needs_no_score(rows):
    rows, _ = rows
    settings = DMPOPolicyLossConfig(loss_mode="pure_dmpo", dmpo_target="advantage", dmpo_temperature=0.5)
    config = actor_config(settings)
    mask = rows["response_mask"]
    advantage = (rows["advantages"] * mask).sum(-1) / mask.sum(-1)
    expected = expected_loss("pure_dmpo", rows, advantage, config)
    loss, _ = get_policy_loss_fn("pure_dmpo")(**rows, config=config, index=UIDS)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-8)  # verl's masked mean adds 1e-8 to the count
    config = actor_config(DMPOPolicyLossConfig(loss_mode="pure_dmpo"))
    with pytest.raises(ValueError, match="needs score="):
        get_policy_loss_fn("pure_dmpo")(**rows, config=config, index=UIDS)


@pytest.mark.parametrize("loss_mode", sorted(MODES))
def test_without_groups_a_dmpo_loss_raises_and_names_the_override(rows, loss_mode):
    rows, _ = rows
    config = actor_config(PolicyLossConfig(loss_mode=loss_mode))
    with pytest.raises(MissingGroupsError, match=r"\+dmpo=default"):
        get_policy_loss_fn(loss_mode)(**rows, config=config)


def test_index_of_the_wrong_length_is_refused(rows):
    rows, score = rows
    config = actor_config(DMPOPolicyLossConfig(loss_mode="grpo_dmpo"))
    with pytest.raises(ValueError, match="one entry for each of the 12 rows, got 11"):
        get_policy_loss_fn("grpo_dmpo")(**rows, config=config, index=UIDS[:-1], score=score)


def test_rows_without_a_response_token_leave_their_group(rows):
    rows, score = rows
    mask = rows["response_mask"].clone()
    mask[4] = False
    rows = rows | dict(response_mask=mask)
    config = actor_config(DMPOPolicyLossConfig(loss_mode="pure_dmpo"))
    loss, _ = get_policy_loss_fn("pure_dmpo")(**rows, config=config, index=UIDS, score=score)
    kept = [i for i in range(B) if i != 4]
    fewer = {name: value[kept] for name, value in rows.items()}
    expected, _ = get_policy_loss_fn("pure_dmpo")(
        **fewer, config=config, index=[UIDS[i] for i in kept], score=score[kept]
    )
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("loss_mode", sorted(MODES))
def test_coefficients_of_zero_leave_the_base_loss_and_a_loss_that_is_no_leaf(rows, loss_mode):
    rows, _ = rows
    config = actor_config(DMPOPolicyLossConfig(loss_mode=loss_mode))
    with row_coefficients(torch.zeros(B)):
        loss, _ = get_policy_loss_fn(loss_mode)(**rows, config=config)
    expected = compute_policy_loss_vanilla(**rows, config=config)[0] if MODES[loss_mode].base else torch.zeros(())
    torch.testing.assert_close(loss, expected.to(loss), rtol=0, atol=0)
    assert not loss.is_leaf
    loss -= 0.0 * loss.detach()  # verl subtracts the entropy term in place
    loss.backward()


def test_base_loss_may_be_any_registered_loss(rows):
    rows, score = rows
    config = actor_config(DMPOPolicyLossConfig(loss_mode="grpo_dmpo_fkl", dmpo_base_loss="gpg", dmpo_beta=0.0))
    loss, _ = get_policy_loss_fn("grpo_dmpo_fkl")(**rows, config=config, index=UIDS, score=score)
    expected, _ = get_policy_loss_fn("gpg")(**rows, config=config)
    torch.testing.assert_close(loss, expected)


BASE_LOSSES = sorted(set(POLICY_LOSS_REGISTRY) - set(MODES) - {"bypass_mode"})


def test_all_of_verls_losses_are_tried_as_a_base():
    # `bypass_mode` is a wrapper of other losses that verl's V1 trainer does not use.
    expected = "cispo clip_cov dppo_kl dppo_tv dro geo_mean gpg gspo kl_cov sapo vanilla"
    assert set(expected.split()) <= set(BASE_LOSSES)


@pytest.mark.parametrize("base", BASE_LOSSES)
@pytest.mark.parametrize("size", [B, 5, 1], ids=lambda size: f"micro-batches of {size}")
def test_group_term_is_added_to_any_base_loss_and_does_not_depend_on_the_split(rows, base, size):
    """Loss and gradient over micro-batches less verl's own for that base are the coefficients times the scores."""
    rows, score = rows
    rows["response_mask"][:, :2] = True  # some of verl's losses need more than one token
    coef, order = torch.randn(B), torch.randperm(B)
    settings = dict(dmpo_beta=2.0, dro_beta=1.0, clip_cov_ratio=0.5, kl_cov_ratio=0.5)
    ours = actor_config(DMPOPolicyLossConfig(loss_mode="grpo_dmpo", dmpo_base_loss=base, **settings))
    theirs = actor_config(DMPOPolicyLossConfig(loss_mode=base, **settings))
    total, gradient = 0, 0
    for part in order.split(size):
        some = {name: value[part] for name, value in rows.items()}
        model_output, data = worker_batch(some, score[part], dmpo_coef=coef[part])
        random = torch.get_rng_state()  # clip_cov draws tokens
        loss, _ = dmpo_ppo_loss(config=ours, model_output=model_output, data=data)
        torch.set_rng_state(random)
        without, _ = ppo_loss(config=theirs, model_output=model_output, data=data)
        total = total + (loss - without).detach()
        gradient = gradient + torch.autograd.grad(loss - without, rows["log_prob"])[0]
    expected = 2 * (coef * sequence_scores(rows["log_prob"], rows["response_mask"])).sum()
    torch.testing.assert_close(total, expected.detach(), rtol=1e-9, atol=1e-9)
    expected = torch.autograd.grad(expected, rows["log_prob"])[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


# --- dro ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_agg_mode", AGGREGATIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_dro_equals_verls_own(rows, loss_agg_mode, weighted):
    rows, _ = rows
    config = actor_config(PolicyLossConfig(loss_mode="dro", dro_beta=0.7))
    weights = torch.rand(B, T).double() if weighted else None
    options = dict(config=config, loss_agg_mode=loss_agg_mode, rollout_is_weights=weights)
    ours, our_metrics = compute_policy_loss_dro(**rows, **options)
    theirs, their_metrics = POLICY_LOSS_REGISTRY["dro"](**rows, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    assert our_metrics == pytest.approx(their_metrics)
    (ours_grad,) = torch.autograd.grad(ours, rows["log_prob"])
    torch.testing.assert_close(ours_grad, torch.autograd.grad(theirs, rows["log_prob"])[0], rtol=1e-12, atol=0)


def test_verls_dro_stays_in_place():
    assert POLICY_LOSS_REGISTRY["dro"].__module__ == "verl.trainer.ppo.core_algos"


def test_dro_takes_the_name_where_verl_lacks_it(monkeypatch):
    from dmpo import dmpo_core_algos

    monkeypatch.delitem(POLICY_LOSS_REGISTRY, "dro")
    dmpo_core_algos._register()
    assert POLICY_LOSS_REGISTRY["dro"] is compute_policy_loss_dro


@pytest.mark.parametrize("loss_agg_mode", AGGREGATIONS)
def test_dro_is_the_same_for_any_number_of_ranks(rows, loss_agg_mode):
    rows, _ = rows
    config = actor_config(PolicyLossConfig(loss_mode="dro", dro_beta=0.7), loss_scale_factor=T)
    batch_num_tokens = rows["response_mask"].sum()

    def loss_of(dp_size, chunk):
        config.global_batch_info.update(
            dp_size=dp_size, batch_num_tokens=batch_num_tokens, global_batch_size=B, loss_scale_factor=T
        )
        part = {name: value[chunk] for name, value in rows.items()}
        return compute_policy_loss_dro(**part, config=config, loss_agg_mode=loss_agg_mode)[0]

    whole = loss_of(1, slice(None))
    averaged = sum(loss_of(3, slice(i, None, 3)) for i in range(3)) / 3
    torch.testing.assert_close(averaged, whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("beta", [None, 0.0, -1.0])
def test_dro_without_a_positive_beta_is_refused(rows, beta):
    rows, _ = rows
    config = actor_config(PolicyLossConfig(loss_mode="vanilla", dro_beta=beta))
    with pytest.raises(ConfigError, match="policy_loss.dro_beta must be a finite number > 0"):
        compute_policy_loss_dro(**rows, config=config)


# --- dmpo_ppo_loss: the loss on a worker --------------------------------------------------------------------------


def worker_batch(rows, score, **fields):
    """Model output and batch as verl's engine gives them to a loss: jagged, with prompts in front."""
    lengths, count = rows["response_mask"].sum(-1).tolist(), len(score)
    prompt_length = 2

    def nested(parts):
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    def ragged(x):
        return nested([row[:n] for row, n in zip(x, lengths, strict=True)])

    # The log-prob of a response token sits one position before it.
    filler = torch.zeros(prompt_length - 1, dtype=torch.float64)
    last = torch.zeros(1, dtype=torch.float64)
    log_probs = nested([torch.cat([filler, row[:n], last]) for row, n in zip(rows["log_prob"], lengths, strict=True)])
    rm_scores = torch.zeros(count, T)
    for i, n in enumerate(lengths):
        rm_scores[i, n - 1] = score[i]
    data = TensorDict(
        {
            "prompts": nested([torch.ones(prompt_length, dtype=torch.long) for _ in lengths]),
            "responses": ragged(torch.ones(count, T, dtype=torch.long)),
            "response_mask": ragged(rows["response_mask"].long()),
            "old_log_probs": ragged(rows["old_log_prob"]),
            "advantages": ragged(rows["advantages"]),
            "ref_log_prob": ragged(rows["old_log_prob"] - 0.1),
            "rm_scores": ragged(rm_scores),
            "uid": NonTensorStack(*UIDS[:count]),
            **fields,
        },
        batch_size=count,
    )
    for name, value in dict(dp_size=2, batch_num_tokens=40, global_batch_size=2 * B).items():
        data.set_non_tensor(name, value)
    entropy = nested([torch.rand(n + prompt_length).double() for n in lengths])
    return {"log_probs": log_probs, "entropy": entropy}, data


def plain(metrics):
    return {k: v.aggregate() if isinstance(v, Metric) else v for k, v in metrics.items()}


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "gpg", "dro"])
def test_other_loss_modes_are_verls_bit_for_bit(rows, loss_mode):
    rows, score = rows
    model_output, data = worker_batch(rows, score)
    config = actor_config(DMPOPolicyLossConfig(loss_mode=loss_mode, dro_beta=1.0), entropy_coeff=0.1, use_kl_loss=True)
    theirs, their_metrics = ppo_loss(config=config, model_output=model_output, data=data)
    (their_grad,) = torch.autograd.grad(theirs, rows["log_prob"], retain_graph=True)
    ours, our_metrics = dmpo_ppo_loss(config=config, model_output=model_output, data=data)
    assert torch.equal(ours, theirs) and plain(our_metrics) == plain(their_metrics)
    assert torch.equal(torch.autograd.grad(ours, rows["log_prob"])[0], their_grad)


@pytest.mark.parametrize("loss_mode", sorted(MODES))
@pytest.mark.parametrize("terms", [False, True], ids=["alone", "with entropy and KL"])
def test_worker_loss_is_base_plus_dp_size_times_coefficients_times_scores(rows, loss_mode, terms):
    rows, score = rows
    coef = torch.randn(B)
    model_output, data = worker_batch(rows, score, dmpo_coef=coef)
    extra = dict(entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.2) if terms else {}
    config = actor_config(DMPOPolicyLossConfig(loss_mode=loss_mode), **extra)
    loss, metrics = dmpo_ppo_loss(config=config, model_output=model_output, data=data)
    expected = 2 * (coef * sequence_scores(rows["log_prob"], rows["response_mask"])).sum()
    # verl's loss with the mode "vanilla" has the same base, entropy and KL terms.
    vanilla = actor_config(PolicyLossConfig(), **extra)
    theirs, _ = ppo_loss(config=vanilla, model_output=model_output, data=data)
    if not MODES[loss_mode].base:
        theirs = theirs - compute_policy_loss_vanilla(**rows, config=vanilla)[0]
    torch.testing.assert_close(loss, theirs + expected, rtol=1e-10, atol=1e-10)
    loss.backward()
    assert rows["log_prob"].grad.isfinite().all()
    assert {"actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac"} <= set(metrics)


def test_a_worker_that_does_not_refresh_is_noticed(rows):
    model_output, data = worker_batch(*rows)
    data.set_non_tensor("dmpo_refresh", "later")
    with pytest.raises(RuntimeError, match="dmpo_group_stats='refresh'.*set it to 'anchored'"):
        dmpo_ppo_loss(
            config=actor_config(DMPOPolicyLossConfig(loss_mode="grpo_dmpo")), model_output=model_output, data=data
        )


def test_a_batch_without_coefficients_is_refused_unless_groups_are_whole(rows):
    rows, score = rows
    model_output, data = worker_batch(rows, score)
    data.set_non_tensor("global_batch_size", B)
    data.set_non_tensor("dp_size", 1)
    config = actor_config(DMPOPolicyLossConfig(loss_mode="pure_dmpo"))
    with pytest.raises(MissingGroupsError, match=r"dmpo_coef.*\+dmpo=default.*groups_are_whole"):
        dmpo_ppo_loss(config=config, model_output=model_output, data=data)
    loss, _ = dmpo_ppo_loss(config=config, model_output=model_output, data=data, groups_are_whole=True)
    expected = expected_loss("pure_dmpo", rows, score, config)
    (gradient,) = torch.autograd.grad(expected, rows["log_prob"])
    torch.testing.assert_close(torch.autograd.grad(loss, rows["log_prob"])[0], gradient, rtol=1e-6, atol=1e-9)


def test_whole_groups_in_micro_batches_add_up(rows):
    """Two micro-batches of two groups each give the gradient of the mean over four groups."""
    rows, score = rows
    uids = ["a", "a", "a", "b", "b", "b", "c", "c", "c", "d", "d", "d"]
    score = torch.rand(B)
    config = actor_config(DMPOPolicyLossConfig(loss_mode="pure_dmpo"))
    model_output, data = worker_batch(rows, score)
    data["uid"] = NonTensorStack(*uids)
    data.set_non_tensor("global_batch_size", B)
    data.set_non_tensor("dp_size", 1)
    loss = partial(dmpo_ppo_loss, config=config, groups_are_whole=True)
    total = loss(model_output=model_output, data=data)[0]
    (whole,) = torch.autograd.grad(total, rows["log_prob"], retain_graph=True)
    parts = 0
    for half in (range(6), range(6, 12)):
        part = {
            name: torch.nested.as_nested_tensor([x.unbind()[i] for i in half], layout=torch.jagged)
            for name, x in model_output.items()
        }
        parts = (
            parts
            + torch.autograd.grad(
                loss(model_output=part, data=tu.index_select_tensor_dict(data, list(half)))[0],
                rows["log_prob"],
                retain_graph=True,
            )[0]
        )
    torch.testing.assert_close(parts, whole)


def test_distillation_is_refused(rows):
    rows, score = rows
    model_output, data = worker_batch(rows, score, dmpo_coef=torch.zeros(B))
    config = actor_config(DMPOPolicyLossConfig(loss_mode="dmpo"))
    with pytest.raises(NotImplementedError, match="distillation.enabled=False"):
        dmpo_ppo_loss(config=config, data=data, student_logits=torch.zeros(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_group_term_is_computed_in_float32_or_better(rows, dtype):
    rows, _ = rows
    low = {name: value.detach().to(dtype) if value.is_floating_point() else value for name, value in rows.items()}
    low["log_prob"].requires_grad_()
    coef = torch.full((B,), 1e-3)
    with row_coefficients(coef):
        loss, _ = get_policy_loss_fn("dmpo")(**low, config=actor_config(DMPOPolicyLossConfig(loss_mode="dmpo")))
    assert loss.dtype == torch.float32
    exact = (coef.double() * sequence_scores(low["log_prob"].double(), low["response_mask"])).sum()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)


def test_a_loss_under_our_name_replaces_nothing_else():
    """Registering twice is harmless, and names of verl's are untouched."""
    before = dict(POLICY_LOSS_REGISTRY)
    register_policy_loss("vanilla")(before["vanilla"])
    from dmpo import dmpo_core_algos

    dmpo_core_algos._register()
    assert set(POLICY_LOSS_REGISTRY) == set(before)
    assert all(POLICY_LOSS_REGISTRY[name] is before[name] for name in before if name not in MODES)


def test_coefficients_at_the_old_policy_give_the_exact_gradient(rows):
    """c from group_statistics and the linear term reproduce the gradient of beta * L at theta_old."""
    rows, score = rows
    rows = rows | dict(old_log_prob=rows["log_prob"].detach().clone())
    config = actor_config(DMPOPolicyLossConfig(loss_mode="grpo_dmpo_fkl", dmpo_beta=0.8, dmpo_policy_temperature=0.25))
    expected = expected_loss("grpo_dmpo_fkl", rows, score, config)
    (gradient,) = torch.autograd.grad(expected, rows["log_prob"])
    stats = group_statistics(
        sequence_scores(rows["old_log_prob"], rows["response_mask"]),
        score,
        torch.tensor([ord(uid) for uid in UIDS]),
        temperature=1 / 15,
        policy_temperature=0.25,
        divergence="forward_kl",
        zero_signal="keep_solved",
    )
    with row_coefficients(0.8 * stats.coef):
        loss, _ = get_policy_loss_fn("grpo_dmpo_fkl")(**rows, config=config)
    torch.testing.assert_close(torch.autograd.grad(loss, rows["log_prob"])[0], gradient, rtol=1e-9, atol=1e-12)
