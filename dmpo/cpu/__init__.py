"""verl without an accelerator: Ray, FSDP2 and vLLM on a CPU, for laptops, CI and small experiments.

Chosen by ``VERL_PLATFORM=cpu`` in the environment together with ``--config-name dmpo_cpu``; inert otherwise.
"""

import os


def install() -> None:
    """Register the platform "cpu" with verl and make it the platform of this process.

    Does nothing unless ``VERL_PLATFORM`` is "cpu". Calling it again does nothing. Any process that verl starts
    gets here through `dmpo.plugin`.

    Raises:
        RuntimeError: the installed verl or vLLM is not what the platform was written for. verl hides an error of a
            plugin that it finds as an entry point, but asks for its platform again later, and then the error shows.
    """
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return
    # verl loads its plugins, us among them, at the end of its own import: let that finish before we import from it.
    import verl  # noqa: F401
    from verl.plugin.platform import PlatformRegistry, get_platform

    from .platform import PlatformCPU

    if PlatformRegistry.get("cpu") is None:
        PlatformRegistry.register("cpu")(PlatformCPU)
    get_platform()
