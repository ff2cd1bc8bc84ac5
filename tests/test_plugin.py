"""How DMPO gets into verl's processes: entry point, Ray workers, mounted as a recipe, and what it must not change."""

import os
import re
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import verl
from packaging.version import Version

from dmpo import dmpo_patch
from dmpo.config import MODES
from dmpo.dmpo_patch import SUPPORTED_VERL, UnsupportedVerlError, check_verl

ROOT = Path(__file__).parent.parent


def run(code_or_args, *, cwd=None, **env):
    """Run Python in a fresh process; returns (status, output)."""
    args = ["-c", textwrap.dedent(code_or_args)] if isinstance(code_or_args, str) else list(code_or_args)
    process = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if not k.startswith("VERL_")} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return process.returncode, process.stdout + process.stderr


def succeed(*args, **kwargs):
    status, output = run(*args, **kwargs)
    assert status == 0, output[-4000:]
    return output


def test_the_entry_point_names_the_plugin():
    (ours,) = [entry for entry in entry_points(group="verl.plugins") if entry.name == "dmpo"]
    assert ours.value == "dmpo.plugin"


@pytest.fixture(scope="module")
def mount(tmp_path_factory):
    """A folder with this repository as `recipe`."""
    folder = tmp_path_factory.mktemp("mount")
    (folder / "recipe").symlink_to(ROOT)
    return folder


IN_A_RAY_WORKER = """
    import sys, ray

    @ray.remote
    def look():
        import verl
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
        modes = {name: loss.func.__module__ for name, loss in POLICY_LOSS_REGISTRY.items() if hasattr(loss, "func")}
        light = "verl.trainer.ppo.v1" not in sys.modules
        from verl.trainer.ppo.v1 import get_trainer_cls
        trainers = {name: get_trainer_cls(name).__module__
                    for name in ("dmpo_sync", "dmpo_colocate_async", "dmpo_separate_async", "sync")}
        packages = [name for name in ("dmpo", "recipe.dmpo") if f"{name}.dmpo_core_algos" in sys.modules]
        return modes, trainers, light, packages

    for attempt in range(3):
        try:
            ray.init(num_cpus=1, include_dashboard=False, runtime_env=ENV)
            break
        except Exception as error:  # Ray gives a node 30 seconds to come up: too few on a busy machine
            if attempt == 2 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
    modes, trainers, light, packages = ray.get(look.remote())
    ray.shutdown()
    assert set(modes.values()) == {f"{PACKAGE}.dmpo_core_algos"} and len(modes) == 9, modes
    assert trainers["sync"] == "verl.trainer.ppo.v1.trainer_sync"
    assert {trainers[f"dmpo_{x}"] for x in ("sync", "colocate_async", "separate_async")} == {f"{PACKAGE}.dmpo_trainer"}
    assert light, "the plugin imported verl's trainers, which costs seconds in every process"
    assert packages == [PACKAGE], packages
"""


def test_losses_and_trainers_are_there_in_a_ray_worker_after_pip_install():
    succeed('PACKAGE, ENV = "dmpo", {}\n' + textwrap.dedent(IN_A_RAY_WORKER))


@pytest.mark.parametrize("installed", [False, True])
def test_losses_and_trainers_are_there_in_a_ray_worker_when_mounted(mount, installed):
    """As `recipe.dmpo`, where verl finds no installed plugin and where it finds one."""
    env = {
        "VERL_USE_EXTERNAL_MODULES": "recipe.dmpo.plugin",
        "VERL_USE_EXTERNAL_PLUGINS": "auto" if installed else "none",
    }
    env = {"env_vars": env}
    code = f'PACKAGE, ENV = "recipe.dmpo", {env}\n' + textwrap.dedent(IN_A_RAY_WORKER)
    succeed(code, cwd=mount, PYTHONPATH=str(mount))


@pytest.mark.parametrize("installed", [False, True])
def test_mounted_entry_point_composes_its_configuration(mount, installed):
    args = ["-m", "recipe.dmpo.main_dmpo", "--cfg", "job"]
    output = succeed(args, cwd=mount, VERL_USE_EXTERNAL_PLUGINS="auto" if installed else "none")
    assert "_target_: recipe.dmpo.config.DMPOPolicyLossConfig" in output
    assert "_target_: dmpo." not in output


def test_mounted_entry_point_tells_its_workers_what_to_import(mount):
    code = """
        import os
        from hydra import compose, initialize_config_dir
        from recipe.dmpo import main_dmpo
        os.environ["VERL_USE_EXTERNAL_MODULES"] = "other"
        with initialize_config_dir(str(main_dmpo.config_dir()), version_base=None):
            config = compose("dmpo_trainer")
        main_dmpo.load_plugin_in_workers(config)
        assert config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES == "other,recipe.dmpo.plugin"
    """
    succeed(code, cwd=mount, VERL_USE_EXTERNAL_PLUGINS="none")


ENTRY_POINTS = {
    "ours": ["-m", "dmpo.main_dmpo"],
    "verl's": ["-m", "verl.trainer.main_ppo", "+dmpo=default"],
}


@pytest.mark.parametrize("entry_point", list(ENTRY_POINTS))
def test_a_bad_configuration_ends_either_entry_point_before_ray_starts(entry_point, tmp_path):
    args = [*ENTRY_POINTS[entry_point], "actor_rollout_ref.rollout.n=1", f"hydra.run.dir={tmp_path}"]
    status, output = run(args)
    assert status != 0
    assert output.strip().splitlines()[-1].startswith("ConfigError: actor_rollout_ref.rollout.n=1 leaves one rollout")
    assert "ray init kwargs" not in output and "Traceback" not in output


def test_verls_configuration_is_the_same_with_the_package_installed():
    """Only `+dmpo=...` changes what verl's own entry point composes."""
    args = ["-m", "verl.trainer.main_ppo", "--cfg", "job"]
    with_us, without = (
        [line for line in output.splitlines() if ":" in line and not re.search(r"\d\d:\d\d:\d\d", line)]
        for output in (succeed(args), succeed(args, VERL_USE_EXTERNAL_PLUGINS="none"))
    )
    assert with_us == without and len(with_us) > 500
    assert not [line for line in with_us if "dmpo" in line and "/" not in line]


def test_help_names_the_command():
    output = succeed(["-m", "dmpo.main_dmpo", "--help"])
    assert "python -m dmpo.main_dmpo" in output and "dmpo_beta" in output


# --- a verl that is not supported ------------------------------------------------------------------------------------


def test_the_installed_verl_is_supported():
    check_verl()
    assert Version(verl.__version__) in SUPPORTED_VERL


@pytest.mark.parametrize("version", ["0.8.0", "0.10.0", "1.0.0"])
def test_another_version_is_refused_by_name(monkeypatch, version):
    monkeypatch.setattr(verl, "__version__", version)
    with pytest.raises(UnsupportedVerlError, match=rf"its version is {version}.*supports verl .*0\.9\.0.*pip install"):
        check_verl()


@pytest.mark.parametrize(
    "hook,problem",
    [
        (("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._gone", ()), "PPOTrainer._gone is missing"),
        (("verl.no_such_module", "x", ()), "verl.no_such_module.x is missing"),
        (("verl.workers.utils.losses", "ppo_loss", ("uid",)), "ppo_loss lacks the parameters uid"),
    ],
)
def test_a_hook_that_moved_is_named(monkeypatch, hook, problem):
    monkeypatch.setattr(dmpo_patch, "_HOOKS", (hook,))
    with pytest.raises(UnsupportedVerlError, match=problem):
        check_verl()


def test_a_failing_registration_does_not_break_verl():
    """A run without DMPO goes on; a DMPO run finds no trainer and the log says why."""
    output = succeed(
        """
        import verl
        from dmpo import dmpo_patch
        def broken():
            raise ImportError("verl moved on")
        dmpo_patch.register_trainers = broken
        from verl.trainer.ppo.v1 import get_trainer_cls
        assert get_trainer_cls("sync").__name__ == "PPOTrainerSync"
        """
    )
    assert "The DMPO trainers are not available with this verl" in output and "verl moved on" in output


def test_every_mode_is_registered():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    assert set(MODES) <= set(POLICY_LOSS_REGISTRY)
