"""Arithmetic word problems of our own, to run the mathematics pipeline where no data set can be had.

`python -m dmpo.tasks.math.word_problems --help` writes them as JSON Lines that `prepare --from` reads.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

NAMES = ("Ann", "Bo", "Cai", "Dee", "Eli", "Fay", "Gus", "Ida")
NUMBERS = range(1, 7)
THINGS = ("pens", "figs", "eggs", "cups", "nuts", "hats")

# Question, and how its answer follows from the numbers a and b.
TEMPLATES = (
    ("{name} has {a} {things} and gets {b} more. How many {things} now?", "+"),
    ("{name} finds {a} {things}, then {b}. How many {things} in all?", "+"),
    ("A box holds {a} {things}. {name} adds {b}. How many {things} now?", "+"),
    ("{name} has {a} {things} and loses {b}. How many {things} now?", "-"),
    ("Of {a} {things} {name} eats {b}. How many {things} are left?", "-"),
)


@dataclass(frozen=True)
class Problem:
    """A word problem with one right answer, a whole number from 0 to 12."""

    question: str
    answer: str
    expression: str
    id: str

    def solution(self, answer: str | None = None) -> str:
        """The written solution, or the same with another answer."""
        value = self.answer if answer is None else answer
        return f"{self.expression}={value}. \\boxed{{{value}}}"


def problems(seed: int = 0) -> list[Problem]:
    """Every template with every pair of numbers that has an answer, in an order and with names that `seed` decides."""
    rng = random.Random(seed)
    made = []
    for kind, (template, sign) in enumerate(TEMPLATES):
        for a in NUMBERS:
            for b in NUMBERS:
                if sign == "-" and b > a:
                    continue
                value = a + b if sign == "+" else a - b
                question = template.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
                made.append(Problem(question, str(value), f"{a}{sign}{b}", f"{kind}-{a}-{b}"))
    rng.shuffle(made)
    return made


def write(folder: Path, validation: int, seed: int = 0) -> None:
    """Write train.jsonl and validation.jsonl, the latter with `validation` problems.

    Raises:
        ValueError: if nothing would be left to train on.
    """
    made = problems(seed)
    if not 0 < validation < len(made):
        raise ValueError(f"validation must be from 1 to {len(made) - 1}, got {validation}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("validation", made[:validation]), ("train", made[validation:])):
        lines = "".join(json.dumps(asdict(problem)) + "\n" for problem in part)
        (folder / f"{name}.jsonl").write_text(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dmpo.tasks.math.word_problems",
        description="Write arithmetic word problems as train.jsonl and validation.jsonl.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("data/word_problems"), help="folder to write to")
    parser.add_argument("--validation", type=int, default=32, help="problems kept for validation")
    parser.add_argument("--seed", type=int, default=0, help="of names, order and choice")
    options = parser.parse_args(arguments)
    try:
        write(options.out, options.validation, options.seed)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
