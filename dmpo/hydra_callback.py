"""Checks a DMPO configuration at the start of a Hydra application that is not ours."""

from __future__ import annotations

from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from .config import ConfigError, validate
from .dmpo_patch import UnsupportedVerlError, check_verl


class ValidateOnStart(Callback):
    """Hydra callback that ends the program with a message if the configuration cannot work."""

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            check_verl()
            validate(config)
        except (ConfigError, UnsupportedVerlError) as error:
            # Hydra turns exceptions of callbacks into warnings and goes on.
            raise SystemExit(f"{type(error).__name__}: {error}") from error
