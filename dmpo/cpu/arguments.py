"""Command line of the quickstart, by itself: it needs the standard library only, so a wrong argument shows at once.

`python -m dmpo.cpu.arguments ...` checks arguments and does nothing else.
"""

from __future__ import annotations

import argparse
from pathlib import Path

MODES = (
    "grpo_dmpo",
    "grpo_dmpo_zero",
    "grpo_dmpo_js",
    "grpo_dmpo_fkl",
    "pure_dmpo",
    "dmpo",
    "dmpo_zero",
    "dmpo_js",
    "dmpo_fkl",
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line of the quickstart; prints usage and exits with status 2 if an argument cannot work."""
    parser = argparse.ArgumentParser(
        prog="quickstart",
        description='Train a tiny language model to answer "12=" by two digits with that sum, with GRPO and with DMPO '
        "from the same start, and compare how often it is right and how many of the right answers it still finds. "
        "Takes about twenty minutes on two CPU cores. Run it again with the same arguments to go on after an "
        "interruption.",
    )
    parser.add_argument(
        "--mode",
        nargs="+",
        default=["grpo_dmpo_fkl"],
        choices=MODES,
        metavar="MODE",
        help=f"DMPO loss modes to compare with GRPO, one run each: {', '.join(MODES)} (default: grpo_dmpo_fkl)",
    )
    parser.add_argument("--steps", type=_positive, default=40, help="training steps of each run (default: 40)")
    parser.add_argument("--seed", type=_natural, default=0, help="of the start and of both runs (default: 0)")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/quickstart"), help="folder for all results (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    options.mode = list(dict.fromkeys(options.mode))
    options.output = options.output.expanduser().resolve()
    existing = next(folder for folder in (options.output, *options.output.parents) if folder.exists())
    if not existing.is_dir():
        parser.error(f"argument --output: {existing} is not a folder")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2147483647, got {text!r}")
    return int(text)


if __name__ == "__main__":
    parse()
