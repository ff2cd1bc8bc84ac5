import math

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import PolicyLossConfig

from dmpo import plugin  # noqa: F401
from dmpo.config import MODES, ConfigError, DMPOPolicyLossConfig, policy_loss_config, validate
from dmpo.dmpo_patch import config_dir

LOSS = "actor_rollout_ref.actor.policy_loss"


def run_config(*overrides, name="dmpo_trainer"):
    """The configuration that `python -m dmpo.main_dmpo OVERRIDES` trains with."""
    with initialize_config_dir(str(config_dir()), version_base=None):
        return compose(name, list(overrides))


@pytest.fixture(scope="module")
def default():
    return run_config()


def changed(config, **values):
    config = config.copy()
    for key, value in values.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    return config


def test_the_default_configuration_is_valid_for_us_and_for_verl(default):
    config = changed(
        default,
        actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=4,
        actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu=4,
        data__train_batch_size=256,
        actor_rollout_ref__model__path="model",
    )
    validate(config)
    validate_config(config, use_reference_policy=False, use_critic=False)


def test_the_preset_lists_every_field_with_the_dataclass_default(default):
    section = OmegaConf.select(default, LOSS)
    built = omega_conf_to_dataclass(section)
    assert isinstance(built, DMPOPolicyLossConfig)
    expected = DMPOPolicyLossConfig(loss_mode="grpo_dmpo")
    for name in DMPOPolicyLossConfig.__dataclass_fields__:
        if name.startswith("dmpo_"):
            assert name in section, f"config/presets/default.yaml lacks {name}"
            assert getattr(built, name) == getattr(expected, name), name


def test_fields_can_be_overridden_without_plus():
    config = run_config(f"{LOSS}.dmpo_beta=2", f"{LOSS}.loss_mode=dmpo_js", f"{LOSS}.dmpo_zero_signal=skip")
    loss = policy_loss_config(config.actor_rollout_ref.actor.policy_loss)
    assert (loss.dmpo_beta, loss.divergence, loss.zero_signal) == (2, "js", "skip")


@pytest.mark.parametrize("loss_mode", sorted(MODES))
def test_every_mode_is_valid(default, loss_mode):
    validate(changed(default, **{f"{LOSS}.loss_mode": loss_mode}))


@pytest.mark.parametrize(
    "key,value,message",
    [
        ("loss_mode", "grpo_dmpoo", "policy_loss.loss_mode must be one of grpo_dmpo, .*got 'grpo_dmpoo'"),
        ("dmpo_beta", -1.0, "policy_loss.dmpo_beta must be a finite number >= 0, got -1.0; 0 switches"),
        ("dmpo_beta", math.nan, "policy_loss.dmpo_beta must be a finite number >= 0, got nan"),
        ("dmpo_beta", math.inf, "policy_loss.dmpo_beta must be a finite number >= 0, got inf"),
        ("dmpo_beta", None, "policy_loss.dmpo_beta must be a finite number >= 0, got None"),
        ("dmpo_beta", "1/15", "policy_loss.dmpo_beta must be a finite number >= 0, got '1/15'"),
        ("dmpo_temperature", 0.0, "policy_loss.dmpo_temperature must be a finite number > 0, got 0.0; the paper"),
        ("dmpo_temperature", math.nan, "policy_loss.dmpo_temperature must be a finite number > 0, got nan"),
        ("dmpo_policy_temperature", -0.5, "policy_loss.dmpo_policy_temperature must be a finite number > 0, got -0.5"),
        ("dmpo_target", "rewards", "policy_loss.dmpo_target must be one of reward, advantage, got 'rewards'"),
        ("dmpo_length_norm", "median", "policy_loss.dmpo_length_norm must be one of mean, sum, got 'median'"),
        ("dmpo_divergence", "kl", "policy_loss.dmpo_divergence must be one of null, mse, js, forward_kl, reverse_kl"),
        ("dmpo_zero_signal", "drop", "policy_loss.dmpo_zero_signal must be one of null, keep, skip, keep_solved"),
        ("dmpo_solved_score", math.nan, "policy_loss.dmpo_solved_score must be a finite number, got nan"),
        ("dmpo_start_step", -1, "policy_loss.dmpo_start_step must be a whole number >= 0, got -1"),
        ("dmpo_warmup_steps", 2.5, "policy_loss.dmpo_warmup_steps must be a whole number >= 0, got 2.5"),
        ("dmpo_group_stats", "fresh", "policy_loss.dmpo_group_stats must be one of anchored, refresh, got 'fresh'"),
        ("dmpo_grad_ratio", 0.0, "policy_loss.dmpo_grad_ratio must be a finite number > 0, got 0.0; null leaves"),
        ("dmpo_base_loss", "vanila", "policy_loss.dmpo_base_loss must be one of .*vanilla.*got 'vanila'"),
        ("dmpo_base_loss", "pure_dmpo", "policy_loss.dmpo_base_loss must be a policy loss without a group term"),
        ("dmpo_base_loss", "dro", "policy_loss.dro_beta must be a finite number > 0, got None"),
    ],
)
def test_a_bad_field_is_named_with_its_value(default, key, value, message):
    with pytest.raises(ConfigError, match=message):
        validate(changed(default, **{f"{LOSS}.{key}": value}))


@pytest.mark.parametrize(
    "key,value,message",
    [
        ("actor_rollout_ref.rollout.n", 1, "rollout.n=1 leaves one rollout per prompt.*rollout.n=8"),
        ("actor_rollout_ref.rollout.full_determinism", True, "full_determinism=True .*set it to False"),
        ("actor_rollout_ref.actor.shuffle", True, "actor.shuffle=True .*set actor_rollout_ref.actor.shuffle=False"),
        ("distillation.enabled", True, "distillation.enabled=True does not work .*set distillation.enabled=False"),
        ("algorithm.adv_estimator", "gae", "adv_estimator='gae' trains a critic.*set algorithm.adv_estimator=grpo"),
        ("critic.enable", True, "critic.enable=True trains a critic.*'grpo' uses; set critic.enable=False"),
        ("trainer.use_v1", False, "trainer.use_v1=False does not work .*set trainer.use_v1=True"),
        ("trainer.v1.trainer_mode", "sync", "would cut the groups .*set trainer.v1.trainer_mode=dmpo_sync"),
        ("trainer.n_gpus_per_node", 7, "do not divide over 7 data-parallel ranks"),
    ],
)
def test_what_does_not_work_with_groups_is_refused(default, key, value, message):
    bad = changed(default, **{key: value})
    with pytest.raises(ConfigError, match=message):
        validate(bad)
    # With a loss mode that is not ours the same configuration is none of our business.
    validate(changed(bad, **{f"{LOSS}.loss_mode": "vanilla"}))


@pytest.mark.parametrize("mode", ["pure_dmpo", "dmpo_zero"])
def test_a_gradient_ratio_needs_a_policy_gradient(default, mode):
    config = changed(default, **{f"{LOSS}.dmpo_grad_ratio": 0.5})
    validate(config)
    with pytest.raises(ConfigError, match=f"dmpo_grad_ratio=0.5 needs .* '{mode}' has none; .*null, or use grpo_dmpo"):
        validate(changed(config, **{f"{LOSS}.loss_mode": mode}))


def test_refresh_needs_an_engine_whose_ranks_see_their_rows(default):
    config = changed(default, **{f"{LOSS}.dmpo_group_stats": "refresh"})
    validate(config)
    with pytest.raises(ConfigError, match="dmpo_group_stats='refresh'.*fsdp2, got 'megatron'.*set it to 'anchored'"):
        validate(changed(config, **{"actor_rollout_ref.actor.strategy": "megatron"}))


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "remax"])
def test_an_advantage_target_needs_an_estimator_per_group(default, estimator):
    config = changed(default, **{"algorithm.adv_estimator": estimator})
    validate(config)
    with pytest.raises(ConfigError, match=f"adv_estimator='{estimator}'.*dmpo_target=reward"):
        validate(changed(config, **{f"{LOSS}.dmpo_target": "advantage"}))
    validate(changed(default, **{f"{LOSS}.dmpo_target": "advantage"}))


@pytest.mark.parametrize("beta,ok", [(None, False), (0.0, False), (-1.0, False), (math.nan, False), (0.5, True)])
def test_dro_needs_a_positive_beta(default, beta, ok):
    config = changed(default, **{f"{LOSS}.loss_mode": "dro", f"{LOSS}.dro_beta": beta})
    if ok:
        return validate(config)
    with pytest.raises(ConfigError, match="policy_loss.dro_beta must be a finite number > 0.*start with 1.0"):
        validate(config)


def test_fields_of_ours_are_not_checked_for_other_modes(default):
    validate(changed(default, **{f"{LOSS}.loss_mode": "vanilla", f"{LOSS}.dmpo_beta": -1.0}))


def test_verl_builds_our_section_and_reports_its_errors(default):
    actor = default.actor_rollout_ref.actor.copy()
    with open_dict(actor):
        actor.ppo_micro_batch_size_per_gpu = 4
    built = omega_conf_to_dataclass(actor)
    assert type(built.policy_loss) is DMPOPolicyLossConfig and built.policy_loss.get("loss_mode") == "grpo_dmpo"
    actor.policy_loss.dmpo_temperature = -1.0
    with pytest.raises(Exception, match="dmpo_temperature must be a finite number > 0, got -1.0"):
        omega_conf_to_dataclass(actor)


@pytest.mark.parametrize(
    "section",
    [
        PolicyLossConfig(loss_mode="grpo_dmpo_zero", dro_beta=2.0),
        {"loss_mode": "grpo_dmpo_zero", "dro_beta": 2.0, "unknown_to_us": 1},
        OmegaConf.create({"loss_mode": "grpo_dmpo_zero", "dro_beta": 2.0}),
    ],
    ids=["dataclass", "dict", "DictConfig"],
)
def test_any_kind_of_section_is_read_with_defaults(section):
    loss = policy_loss_config(section)
    assert loss.mode is MODES["grpo_dmpo_zero"] and loss.dmpo_beta == 1.0 and loss.dro_beta == 2.0


def test_schedule_of_the_weight():
    def betas(**fields):
        loss = DMPOPolicyLossConfig(loss_mode="grpo_dmpo", dmpo_beta=2.0, **fields)
        return [loss.beta_at(step) for step in range(1, 7)]

    assert betas() == [2.0] * 6
    assert betas(dmpo_start_step=3) == [0.0, 0.0, 2.0, 2.0, 2.0, 2.0]
    assert betas(dmpo_warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert betas(dmpo_start_step=3, dmpo_warmup_steps=2) == [0.0, 0.0, 1.0, 2.0, 2.0, 2.0]


def test_published_pure_modes_ignore_the_weight():
    assert DMPOPolicyLossConfig(loss_mode="dmpo_js", dmpo_beta=5.0).beta_at(1) == 1.0
    assert DMPOPolicyLossConfig(loss_mode="pure_dmpo", dmpo_beta=5.0).beta_at(1) == 5.0


def test_modes_are_those_of_the_design():
    table = {
        "grpo_dmpo": (True, True, "mse", "keep"),
        "grpo_dmpo_zero": (True, True, "mse", "skip"),
        "grpo_dmpo_js": (True, True, "js", "keep"),
        "grpo_dmpo_fkl": (True, True, "forward_kl", "keep_solved"),
        "pure_dmpo": (False, True, "mse", "keep"),
        "dmpo": (False, False, "mse", "keep"),
        "dmpo_zero": (False, False, "mse", "skip"),
        "dmpo_js": (False, False, "js", "keep"),
        "dmpo_fkl": (False, False, "forward_kl", "keep_solved"),
    }
    assert {name: tuple(mode) for name, mode in MODES.items()} == table
