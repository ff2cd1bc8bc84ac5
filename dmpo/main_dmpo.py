"""Train with verl and DMPO: `python -m dmpo.main_dmpo [--config-name NAME] [OVERRIDE ...]`.

verl's own entry point with our configuration on top of its `ppo_trainer`, checked before Ray starts. Also
`python -m recipe.dmpo.main_dmpo`, with this repository as verl's recipe submodule and nothing of it installed.
"""

from __future__ import annotations

import os

import hydra
from omegaconf import DictConfig, OmegaConf

from . import plugin  # noqa: F401  before verl, which loads the plugin under its installed name if it finds none

# isort: split
from verl.trainer import main_ppo

from .dmpo_patch import config_dir

_MODULES = "VERL_USE_EXTERNAL_MODULES"


def load_plugin_in_workers(config: DictConfig) -> None:
    """Let every Ray process of the run import our plugin with verl, so that an error there stops the process.

    verl would also find it as an installed entry point, but goes on in silence if that fails to load.
    """
    modules = [name for name in os.environ.get(_MODULES, "").split(",") if name]
    if f"{__package__}.plugin" not in modules:
        modules.append(f"{__package__}.plugin")
    key = f"ray_kwargs.ray_init.runtime_env.env_vars.{_MODULES}"
    OmegaConf.update(config, key, ",".join(modules), force_add=True)
    OmegaConf.resolve(config.ray_kwargs)  # verl passes nested values on to Ray as they are


@hydra.main(config_path=str(config_dir()), config_name="dmpo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Hand over to `verl.trainer.main_ppo`; the callback of the group `dmpo` has checked the configuration."""
    load_plugin_in_workers(config)
    main_ppo.main(config)


if __name__ == "__main__":
    main()
