import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from verl.utils.config import validate_config

from dmpo import plugin  # noqa: F401
from dmpo.config import ConfigError, policy_loss_config, validate
from dmpo.dmpo_patch import config_dir

ROOT = Path(__file__).parent.parent
FORWARDER = ROOT / "dmpo" / "run_qwen2.5-7b_math_grpo_dmpo_zero.sh"
RUNS = [*sorted((ROOT / "scripts").glob("run_qwen*.sh")), FORWARDER]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), FORWARDER, ROOT / ".ci" / "run"]
PUBLISHED = ROOT / "scripts" / "run_qwen2.5-7b_math_grpo_dmpo_zero.sh"


@pytest.fixture
def work(tmp_path):
    """A folder with a name that needs quoting, with data and an interpreter that notes its arguments."""
    folder = tmp_path / "it's a [folder]"
    for data in ("math", "np_bench", "np_bench_images"):
        (folder / "data" / data).mkdir(parents=True)
        for name in ("train", "validation"):
            (folder / "data" / data / f"{name}.parquet").touch()
    (folder / "python").write_text('#!/bin/sh\nprintf "%s\\0" "$PYTHONPATH" "$@"\n')
    (folder / "python").chmod(0o755)
    return folder


def start(script, work, *arguments, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in ("GPUS", "NNODES", "PYTHONPATH")}
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd=work,
        env=clean | {"PYTHON": str(work / "python")} | environment,
        capture_output=True,
        text=True,
    )


def composed(script, work, *arguments, **environment):
    """The configuration that a script trains with, composed as Hydra does for `--cfg job`."""
    done = start(script, work, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    path, *given = done.stdout.split("\0")[:-1]
    assert path.split(":")[0] == str(ROOT)
    assert given[:3] == ["-m", "dmpo.main_dmpo", "--config-name"]
    with initialize_config_dir(str(config_dir()), version_base=None):
        return compose(given[3], given[4:])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shell_scripts_are_sound(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    done = subprocess.run(
        [shellcheck, "-x", f"--source-path={script.parent}", str(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", RUNS, ids=lambda script: f"{script.parent.name}/{script.name}")
def test_every_training_script_composes_and_passes_our_and_verls_checks(script, work):
    config = composed(script, work)
    validate(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    output = work / "outputs" / config.trainer.experiment_name
    task = "np_bench" if "np_bench" in script.name else "math"
    pictures = "_vl_" in script.name
    assert config.data.train_files == f"data/{task}{'_images' if pictures else ''}/train.parquet"
    assert not pictures or config.data.image_key == "images"
    assert config.trainer.default_local_dir == str(output / "checkpoints")
    assert config.trainer.rollout_data_dir == str(output / "rollouts")
    assert config.trainer.validation_data_dir == str(output / "validation")
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR == str(output / "tensorboard")
    assert config.trainer.test_freq > 0
    assert config.actor_rollout_ref.rollout.val_kwargs.n > 1
    assert list(config.trainer.logger) == ["console", "tensorboard"]
    assert config.trainer.resume_mode == "auto"
    assert config.reward.custom_reward_function.path == f"pkg://dmpo.tasks.{task}.reward"


@pytest.mark.parametrize("script", RUNS, ids=lambda script: f"{script.parent.name}/{script.name}")
def test_an_unknown_key_fails_in_every_training_script(script, work):
    with pytest.raises(ConfigCompositionException, match="not_a_key"):
        composed(script, work, "trainer.not_a_key=1")


def test_the_published_script_has_the_published_settings(work):
    config = composed(PUBLISHED, work)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    loss = policy_loss_config(actor.policy_loss)
    assert (loss.loss_mode, loss.dmpo_beta, loss.dmpo_target) == ("grpo_dmpo_zero", 2.0, "advantage")
    assert loss.dmpo_temperature == pytest.approx(1 / 15)
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.optim.lr) == (0.2, 0.28, 1e-6)
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n) == (128, 32, 8)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 8192)
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes, rollout.name) == (8, 1, "vllm")
    assert not actor.use_kl_loss
    assert not config.algorithm.use_kl_in_reward


def test_the_siblings_differ_from_it_only_where_they_say(work):
    def differences(script, expected):
        published, other = (OmegaConf.to_container(composed(s, work), resolve=False) for s in (PUBLISHED, script))
        return _changed(published, other) - expected

    names = {"trainer.experiment_name", "trainer.default_local_dir", "trainer.rollout_data_dir"}
    names |= {"trainer.validation_data_dir", "ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR"}
    loss = "actor_rollout_ref.actor.policy_loss"
    scripts = ROOT / "scripts"
    assert not differences(scripts / "run_qwen2.5-7b_math_grpo.sh", names | {f"{loss}.loss_mode"})
    fkl = {f"{loss}.{field}" for field in ("loss_mode", "dmpo_beta", "dmpo_target", "dmpo_policy_temperature")}
    fkl.add(f"{loss}.dmpo_zero_signal")
    assert not differences(scripts / "run_qwen2.5-7b_math_grpo_dmpo_fkl.sh", names | fkl)
    cluster = {"trainer.nnodes", "ray_kwargs.ray_init.address"}
    multinode = scripts / "run_qwen2.5-7b_math_grpo_dmpo_zero_multinode.sh"
    assert not differences(multinode, names | cluster)
    assert composed(multinode, work).ray_kwargs.ray_init.address == "auto"
    assert composed(multinode, work, RAY_ADDRESS="10.0.0.1:6379", NNODES="4").trainer.nnodes == 4


def _changed(one, other, prefix=""):
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return set() if one == other else {prefix}
    keys = one.keys() | other.keys()
    return {
        path
        for key in keys
        for path in _changed(one.get(key), other.get(key), f"{prefix}.{key}" if prefix else str(key))
    }


def test_environment_variables_and_arguments_reach_the_configuration(work):
    config = composed(
        PUBLISHED,
        work,
        "trainer.save_freq=7",
        TRAIN_FILES="['a.parquet','b c.parquet']",
        VAL_FILES=str(work / "data" / "math" / "validation.parquet"),
        MODEL_PATH="models/my model, v2=final",
        OUTPUT_DIR="out put",
        GPUS="4",
        NNODES="2",
    )
    assert list(config.data.train_files) == ["a.parquet", "b c.parquet"]
    assert config.data.val_files == str(work / "data" / "math" / "validation.parquet")
    assert config.actor_rollout_ref.model.path == "models/my model, v2=final"
    assert config.trainer.default_local_dir == str(work / "out put" / "checkpoints")
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes, config.trainer.save_freq) == (4, 2, 7)


@pytest.mark.parametrize(
    ("script", "folder", "command"),
    [
        (PUBLISHED.name, "math", "python -m dmpo.tasks.math.prepare\n"),
        ("run_qwen2.5-7b_np_bench_grpo_dmpo.sh", "np_bench", "python -m dmpo.tasks.np_bench.make\n"),
        ("run_qwen2.5-7b_vl_np_bench_grpo_dmpo.sh", "np_bench_images", "make --images --out data/np_bench_images\n"),
    ],
)
def test_missing_data_stops_with_the_command_that_makes_it(work, script, folder, command):
    shutil.rmtree(work / "data")
    done = start(ROOT / "scripts" / script, work)
    assert done.returncode == 1
    assert f"no data at data/{folder}/train.parquet; make it with: " in done.stderr and command in done.stderr


def test_a_dry_run_prints_the_configuration(work):
    """For real, through `--cfg job`: what docs/math.md tells people to look at before they start."""
    done = start(PUBLISHED, work, "--cfg", "job", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    config = OmegaConf.create(done.stdout)
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "grpo_dmpo_zero"
    assert "hydra" not in config


@pytest.mark.parametrize("preset", ["default", "paper", "pr105", "recommended"])
def test_presets_are_selected_by_one_override_on_both_entry_points(preset):
    with initialize_config_dir(str(config_dir()), version_base=None):
        ours = compose("dmpo_trainer", [f"dmpo={preset}"])
    with initialize_config_dir(_verl_config(), version_base=None):
        verls = compose("ppo_trainer", [f"+dmpo={preset}"])
    for config in (ours, verls):
        config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 4
        validate(config)
    assert ours.actor_rollout_ref == verls.actor_rollout_ref
    loss = policy_loss_config(ours.actor_rollout_ref.actor.policy_loss)
    expected = {
        "default": ("grpo_dmpo", 1.0, "reward", 1.0),
        "paper": ("grpo_dmpo", 2.0, "reward", 1.0),
        "pr105": ("grpo_dmpo_zero", 2.0, "advantage", 1.0),
        "recommended": ("grpo_dmpo_fkl", 1.0, "reward", 0.25),
    }
    assert (loss.loss_mode, loss.dmpo_beta, loss.dmpo_target, loss.dmpo_policy_temperature) == expected[preset]


def _verl_config():
    import verl.trainer.config

    return str(Path(next(iter(verl.trainer.config.__path__))))


@pytest.mark.parametrize("preset", ["paper", "pr105", "recommended"])
def test_a_preset_says_where_its_values_come_from(preset):
    comment = [
        line for line in (config_dir() / "presets" / f"{preset}.yaml").read_text().splitlines() if line[:1] == "#"
    ]
    assert any("Values: " in line for line in comment)


def test_a_bad_override_of_a_preset_is_refused():
    with initialize_config_dir(str(config_dir()), version_base=None):
        config = compose("dmpo_math", ["dmpo=paper", "actor_rollout_ref.actor.policy_loss.dmpo_beta=-1"])
    with pytest.raises(ConfigError, match="dmpo_beta"):
        validate(config)


def test_device_check_passes_on_a_cpu():
    command = [sys.executable, "scripts/check_device.py", "--device=cpu", "--rows=4", "--tokens=256", "--repeats=3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [line for line in done.stdout.splitlines() if "at most" in line]
    assert len(checks) == 10 and not any("FAILED" in line for line in checks)


def test_reward_benchmark_grades_what_it_times():
    command = [sys.executable, "scripts/bench_math_reward.py", "--answers=8", "--workers=2", "--threads=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    right = {line[:14].strip(): line.split()[-1] for line in done.stdout.splitlines() if line.endswith("%")}
    expected = {"equal text": "100%", "fraction": "100%", "expression": "100%", "set": "100%", "number": "0%"}
    assert expected.items() <= right.items()
