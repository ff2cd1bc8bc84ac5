"""What all tasks share: instances, verdicts, references, a reproducible random source, and the graph task.

A task is one small class in a file of its own. Instances and answers are plain JSON values, so that they pass through
parquet files and processes unchanged. Nothing here needs a solver, a trainer or anything else that is not in Python.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, TypeVar

from .parsing import MAX_DIGITS, Unparsed, parse_answer

T = TypeVar("T")
Instance = dict[str, Any]
LEVELS = ("easy", "medium", "hard", "bench")
CATEGORIES = ("graph", "planning", "selection", "partition", "schedule")


@dataclass(frozen=True)
class Verdict:
    """What a task says of an answer.

    Attributes:
        valid: whether the answer satisfies every constraint.
        value: the objective's value; None where not valid.
        reason: why it is not valid, in words that a person can read; empty where it is.
    """

    valid: bool
    value: int | None
    reason: str = ""


@dataclass(frozen=True)
class Reference:
    """The best answer that a solver found.

    Attributes:
        value: of `solution`, by the task's own verifier.
        solution: an answer.
        status: "optimal" where the solver proved that no answer is better, else "feasible".
        solver: its name and version.
        bound: no answer is better than this; equals `value` where the status is "optimal". None: nothing was proved.
    """

    value: int
    solution: Any
    status: str
    solver: str
    bound: float | None = None


def invalid(reason: str) -> Verdict:
    return Verdict(False, None, reason)


class Rng:
    """Random numbers that depend on the seed alone, whatever the machine and the version of Python.

    Of `random.Random` only `random()` and seeding by a string are used, which Python promises not to change.
    """

    def __init__(self, *seed: Any) -> None:
        self._random = Random("/".join(map(str, seed))).random

    def random(self) -> float:
        """From [0, 1)."""
        return self._random()

    def randint(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return low + int(self._random() * (high - low + 1))

    def choice(self, items: Sequence[T]) -> T:
        return items[self.randint(0, len(items) - 1)]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        items = list(items)
        for last in range(len(items) - 1, 0, -1):
            other = self.randint(0, last)
            items[last], items[other] = items[other], items[last]
        return items

    def sample(self, items: Sequence[T], number: int) -> list[T]:
        return self.shuffled(items)[:number]


class Task(ABC):
    """One optimisation problem.

    Class attributes: `name` (the key in `TASKS`), `title` (for people), `category` (one of `CATEGORIES`), `maximise`
    (whether a larger value is better), `sizes` (level -> whatever `generate` needs).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    category: ClassVar[str]
    maximise: ClassVar[bool]
    sizes: ClassVar[dict[str, Any]]

    # --- what a task defines

    @abstractmethod
    def generate(self, rng: Rng, level: str) -> Instance:
        """A random instance of a level, with labels that say nothing about its solution."""

    @abstractmethod
    def question(self, instance: Instance) -> str:
        """The problem in words, up to what kind of answer is wanted."""

    @abstractmethod
    def data(self, instance: Instance) -> str:
        """What the problem is about: the part of the prompt for which a picture may stand."""

    answer_format: ClassVar[str]
    """What to write behind "Answer:", in words."""

    @abstractmethod
    def example(self) -> tuple[Instance, Any]:
        """A small instance and an optimal answer to it, for the prompt."""

    @abstractmethod
    def check(self, instance: Instance, answer: Any) -> int | str:
        """The value of an answer, or the reason why it is not valid.

        The answer is a list of ints and of lists like it, never anything else, but of any shape.
        """

    @abstractmethod
    def solve(self, instance: Instance, time_limit: float = 60.0) -> Reference:
        """The best answer that can be found in `time_limit` seconds. Needs the extra `np`."""

    def canonical(self, instance: Instance, answer: Any) -> str:
        """Equal for two valid answers if and only if they are the same solution.

        As it is here, for answers that are sets; other tasks have their own.
        """
        return str(sorted(answer))

    @abstractmethod
    def trivial(self, instance: Instance) -> Any:
        """An answer that needs no thought; valid in every task but subset_sum, where there is no such answer."""

    @abstractmethod
    def draw(self, instance: Instance, axes: Any, answer: Any = None) -> None:
        """Draw the instance, and a valid answer to it where given, into matplotlib's `axes`.

        Without an answer the picture has all that `data` says.
        """

    how_to_read: ClassVar[str] = "The picture shows the problem."
    """Said of the picture where it stands for the data."""

    # --- what follows from it

    def make(self, level: str, seed: int | str) -> Instance:
        """The instance that (task, level, seed) names.

        Raises:
            ValueError: no such level.
        """
        if level not in self.sizes:
            raise ValueError(f"level must be one of {', '.join(self.sizes)}, got {level!r}")
        return self.generate(Rng(self.name, level, seed), level)

    def prompt(self, instance: Instance, picture: str = "") -> str:
        """What a model is asked: the problem, an example with an optimal answer, and how to answer.

        Args:
            instance: of this task.
            picture: stands for the data, as `<image>` does in verl's prompts; without it the data are in words.
        """
        example, answer = self.example()
        data = f"{picture}\n{self.how_to_read}" if picture else self.data(instance)
        return (
            f"{self.question(instance)}\n{data}\n\n"
            f'End your reply with one line "Answer: " and {self.answer_format}.\n\n'
            f"An example of another, smaller problem:\n{self.question(example)}\n{self.data(example)}\n"
            f"An optimal reply to it ends with\nAnswer: {json.dumps(answer)}"
        )

    def parse(self, text: Any) -> Any:
        """The answer in a model's reply, as nested lists of ints; `Unparsed`, with the reason, if there is none.

        Never raises, and never evaluates anything.
        """
        return parse_answer(text)

    def verify(self, instance: Instance, answer: Any) -> Verdict:
        """Judge an answer, as `parse` returns it or from elsewhere. Never raises for any answer."""
        if isinstance(answer, Unparsed):
            return invalid(answer.reason)
        answer = _plain(answer)
        if answer is None:
            return invalid(f"whole numbers of at most {MAX_DIGITS} digits, or nested lists of them, are wanted")
        result = self.check(instance, [answer] if isinstance(answer, int) else answer)
        return invalid(result) if isinstance(result, str) else Verdict(True, result)

    def quality(self, value: int, reference: int) -> float:
        """Quality ratio of a valid answer: value / reference, or its inverse where less is better; 1 is the reference.

        May exceed 1 only where the reference is not optimal. Values are not negative; zero beside zero is 1.
        """
        above, below = (value, reference) if self.maximise else (reference, value)
        return 1.0 if above == below else above / below if below else float("inf")


def _plain(answer: Any, depth: int = 4) -> Any:
    """Tuples, sets and mappings as lists; None if the answer holds anything but ints, or is too large or deep."""
    if isinstance(answer, bool) or depth < 0:
        return None
    if isinstance(answer, int):
        return answer if abs(answer) < 10**MAX_DIGITS else None
    if isinstance(answer, dict):
        answer = list(answer.items())
    if isinstance(answer, (set, frozenset)):
        try:
            answer = sorted(answer)
        except TypeError:
            return None
    if not isinstance(answer, (list, tuple)) or len(answer) > 10_000:
        return None
    items = [_plain(item, depth - 1) for item in answer]
    return None if any(item is None for item in items) else items


def content_hash(instance: Instance) -> str:
    """SHA-256 of an instance's content, hexadecimal."""
    return hashlib.sha256(json.dumps(instance, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def distinct_in_range(answer: Any, size: int, what: str) -> str | None:
    """Why `answer` is not a list of distinct numbers from 0 to `size` - 1; None if it is one."""
    if not isinstance(answer, list) or not all(isinstance(item, int) for item in answer):
        return f"a list of {what} numbers is wanted"
    for item in answer:
        if not 0 <= item < size:
            return f"there is no {what} {item}; they are numbered from 0 to {size - 1}"
    if len(set(answer)) < len(answer):
        repeated = next(item for index, item in enumerate(answer) if item in answer[:index])
        return f"{what} {repeated} is named more than once"
    return None
