"""Entry point of the group `verl.plugins`: loaded by `import verl` in every verl process.

It registers the policy losses, offers the Hydra group and arranges for the trainers to be registered when verl imports
its own. Processes of a run that `main_dmpo` started load it through VERL_USE_EXTERNAL_MODULES as well, since verl
swallows the errors of entry points.
"""

import os
import sys

# Installed and mounted as a recipe at once, this package has two names. The first to be loaded serves the process.
if twins := [name for name in sys.modules if name.endswith("dmpo.plugin") and name != __name__]:
    raise ImportError(f"{__name__} is not loaded: {twins[0]}, the same plugin under another name, is already")

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from . import cpu

    cpu.install()

from . import dmpo_core_algos  # noqa: E402, F401
from .dmpo_patch import install  # noqa: E402

install(__package__)
