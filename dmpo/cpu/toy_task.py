"""A task with many right answers: two digits that add up to N, for example "12=" and "3+9".

A right answer is any "a+b" with digits a and b and a + b = N; "3+9" and "9+3" are two answers. verl loads this file by
its path as a reward function, so it imports nothing else of the package.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DATA_SOURCE = "two_digits"
NUMBERS = range(2, 18)
"""Every N with at least two right answers except N = 1, which leaves 16 prompts with 96 right answers in all."""

_ANSWER = re.compile(r"\s*([0-9])\+([0-9])\s*")


def prompt(number: int) -> str:
    """The user's message that asks for `number` as a sum. Short, since every byte is a token of the toy model."""
    return f"{number}="


def answers(number: int) -> list[str]:
    """All right answers for `number`, in order: 10 for number = 9, fewer to either side."""
    return [f"{a}+{number - a}" for a in range(10) if 0 <= number - a <= 9]


def parse(text: str) -> str | None:
    """The answer "a+b" that `text` consists of, white space around it aside; None if it is anything else."""
    match = _ANSWER.fullmatch(text)
    return match and f"{match[1]}+{match[2]}"


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """Reward in verl's signature: 1.0 for a right answer to the number in `ground_truth`, else 0.0."""
    return float(parse(solution_str) in answers(int(ground_truth)))


def coverage(number: int, responses: Iterable[str]) -> float:
    """Share of the right answers for `number` that occur among `responses`, in [0, 1]."""
    right = answers(number)
    return len({parse(response) for response in responses} & set(right)) / len(right)


def write_parquet(path: Path, repeat: int = 1) -> None:
    """Write every prompt `repeat` times in verl's schema."""
    import pandas as pd

    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": prompt(number)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": index},
        }
        for index, number in enumerate(NUMBERS)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows * repeat).to_parquet(path)
