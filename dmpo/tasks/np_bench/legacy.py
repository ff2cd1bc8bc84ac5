"""The public file NP_Bench.json: `python -m dmpo.tasks.np_bench.legacy --help`. Its scores are comparable to no other.

The file is not part of this project; bring your own. It is one JSON object. Each value has `prompt`, `question` (the
problem), `task_type` and `ground_truth` (the value of a reference), and its key has the level in it. Field names are
those of https://github.com/OliverLeeXZ/NP-Engine (Li et al., "NP-Engine", arXiv:2510.16476), no code is.

A legacy score is neither one of np-bench-v1 nor one of those that are published for this file:

- the references are those of the file, some of which no answer reaches and others are beaten, so ratios go beyond 1;
- answers are judged as this project judges them, by what the prompts ask for: nothing is evaluated as code, nothing
  may be named twice, nobody is in two meetings at once; the public validators let some of that pass;
- cuts have weights and meetings have people's free times, unlike the tasks here.

Make a parquet file, and let verl validate on it with
reward.custom_reward_function.path=pkg://dmpo.tasks.np_bench.legacy
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

if not __package__:
    raise ImportError("load this reward as reward.custom_reward_function.path=pkg://dmpo.tasks.np_bench.legacy")

from . import LEVELS, TASKS, Unparsed
from .base import distinct_in_range
from .graphs import graph_of
from .parsing import parse_answer

NOTICE = "legacy scores are not comparable to scores of np-bench-v1, nor to published scores of NP_Bench.json"


@dataclass(frozen=True)
class Problem:
    """One entry of the file.

    Attributes:
        key: its key in the file.
        task_type: a key of `TASK_TYPES`.
        level: one of `LEVELS`.
        prompt: what a model is asked.
        question: the problem, as it is in the file.
        reference: the value of the file's reference; None where it has none.
    """

    key: str
    task_type: str
    level: str
    prompt: str
    question: dict[str, Any]
    reference: float | None


def load(path: Path) -> list[Problem]:
    """The problems of the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file; names the entry.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError("expected one JSON object with an entry for each problem")
    problems = []
    for key, entry in entries.items():
        level = next((level for level in LEVELS if level in key), None)
        if level is None:
            raise ValueError(f"entry {key!r}: none of {', '.join(LEVELS)} is in its key")
        try:
            problem = Problem(
                key, entry["task_type"], level, entry["prompt"], entry["question"], entry.get("ground_truth")
            )
            if problem.task_type not in TASK_TYPES:
                raise ValueError(f"task_type must be one of {', '.join(TASK_TYPES)}, got {problem.task_type!r}")
            if problem.reference is not None and not isinstance(problem.reference, (int, float)):
                raise ValueError(f"ground_truth must be a number, got {problem.reference!r}")
            check = TASK_TYPES[problem.task_type].check
            check(problem.question, [])  # which reads all of the question
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"entry {key!r}: {type(error).__name__}: {error}") from error
        problems.append(problem)
    return problems


def rows(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """Rows of verl's parquet schema."""
    return [
        {
            "data_source": f"np_bench_legacy/{problem.task_type}",
            "prompt": [{"role": "user", "content": problem.prompt}],
            "ability": TASKS[TASK_TYPES[problem.task_type].task].category,
            "reward_model": {"style": "rule", "ground_truth": ground_truth(problem)},
            "extra_info": {"index": index, "split": "legacy", "key": problem.key, "level": problem.level},
        }
        for index, problem in enumerate(problems)
    ]


def ground_truth(problem: Problem) -> str:
    """What `compute_score` needs to know of a problem, as JSON, which `dmpo.tasks.np_bench.evaluate` does not take."""
    return json.dumps(
        {"legacy": problem.task_type, "question": problem.question, "reference": problem.reference},
        separators=(",", ":"),
    )


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """The legacy score of one response; raises for none.

    Args:
        data_source, extra_info, kwargs: not used; verl passes them.
        solution_str: the response.
        ground_truth: of the row, see `ground_truth`.

    Returns:
        `score` = `legacy_ratio`: value / reference, or its inverse where less is better, not clipped; 0 where not valid
        or without reference. `legacy_valid`, 0 or 1; `value`; `reason` why not valid.
    """
    truth = json.loads(ground_truth)
    kind = TASK_TYPES[truth["legacy"]]
    answer = parse_answer(solution_str)
    value = answer.reason if isinstance(answer, Unparsed) else kind.check(truth["question"], answer)
    if isinstance(value, str):
        return {"score": 0.0, "legacy_ratio": 0.0, "legacy_valid": 0.0, "value": 0.0, "reason": value}
    reference = truth["reference"]
    above, below = (value, reference) if TASKS[kind.task].maximise else (reference, value)
    ratio = 0.0 if reference is None else 1.0 if above == below else above / below if below else 0.0
    return {
        "score": float(ratio),
        "legacy_ratio": float(ratio),
        "legacy_valid": 1.0,
        "value": float(value),
        "reason": "",
    }


# --- what the task types are


@dataclass(frozen=True)
class TaskType:
    """A kind of problem in the file.

    Attributes:
        task: the task of this project with the same goal.
        check: the value of an answer to a question, or the reason why it is not valid.
    """

    task: str
    check: Callable[[dict[str, Any], Any], float | str]


def _by_number(entries: dict[str, Any]) -> list[Any]:
    """Values in the order of their keys, which must be "0", "1", ..."""
    if entries.keys() != {str(number) for number in range(len(entries))}:
        raise ValueError(f"expected the numbers 0 to {len(entries) - 1} as keys")
    return [entries[str(number)] for number in range(len(entries))]


def _like(task: str, instance: Callable[[dict[str, Any]], dict[str, Any]]) -> TaskType:
    """A kind whose questions are instances of a task."""
    return TaskType(task, lambda question, answer: TASKS[task].check(instance(question), answer))


def _graph(question: dict[str, Any]) -> dict[str, Any]:
    """A graph of {"0": [1, 2], ...} or {"0": {"1": 1, "2": 1}, ...}."""
    near = _by_number(question)
    edges = {(min(a, b), max(a, b)) for a, others in enumerate(near) for b in map(int, others) if a != b}
    if any(not 0 <= b < len(near) for _, b in edges):
        raise ValueError("an edge leads to a vertex that is not there")
    return graph_of(len(near), edges)


def _cities(question: dict[str, Any]) -> dict[str, Any]:
    """Distances of {"0": {"1": 10, ...}, ...}."""
    rows = _by_number(question)
    return {
        "places": [None] * len(rows),
        "distances": [[row[str(b)] for b in range(a + 1, len(rows))] for a, row in enumerate(rows)],
    }


def _items(question: dict[str, Any]) -> dict[str, Any]:
    items = [[item["weight"], item["value"]] for item in _by_number(question["items"])]
    return {"capacity": question["capacity"], "items": items}


def _numbers(question: dict[str, Any]) -> dict[str, Any]:
    return {"numbers": _by_number(question["numbers"]), "target": question["target"]}


def _sets(question: dict[str, Any]) -> dict[str, Any]:
    place = {element: index for index, element in enumerate(question["U"])}
    sets = [[place[element] for element in members] for members in _by_number(question["S"])]
    return {"elements": len(place), "sets": sets}


def _cut(question: dict[str, Any], answer: Any) -> float | str:
    """The weight between two sides, whose sizes differ by one at most."""
    near = _by_number(question)
    weights = {(min(a, int(b)), max(a, int(b))): w for a, others in enumerate(near) for b, w in others.items()}
    sides = answer if answer and all(isinstance(side, list) for side in answer) else [answer]
    if len(sides) > 2 or not all(isinstance(item, int) for side in sides for item in side):
        return "two lists of vertex numbers are wanted"
    if problem := distinct_in_range([item for side in sides for item in side], len(near), "vertex"):
        return problem
    if len(sides) == 2 and len(sides[0]) + len(sides[1]) < len(near):
        return "some vertices are on neither side"
    side = set(sides[0])
    if abs(2 * len(side) - len(near)) > 1:
        return f"the sides have {len(side)} and {len(near) - len(side)} vertices"
    return sum(weight for (a, b), weight in weights.items() if (a in side) != (b in side))


def _meetings(question: dict[str, Any], answer: Any) -> float | str:
    """The number of people in the meetings that take place."""
    meetings, rooms = _by_number(question["meetings"]), _by_number(question["rooms"])
    people = [set(meeting["attendees"]) for meeting in meetings]
    lengths = [meeting["duration"] for meeting in meetings]
    free = {int(person): times for person, times in question["attendee_availability"].items()}
    if len(answer) == 3 and all(isinstance(item, int) for item in answer):
        answer = [answer]
    if not all(isinstance(e, list) and len(e) == 3 and all(isinstance(item, int) for item in e) for e in answer):
        return "a list with (meeting, room, start) for each meeting is wanted"
    for number, room, start in answer:
        if not (0 <= number < len(meetings) and 0 <= room < len(rooms)):
            return f"there is no meeting {number} or no room {room}"
        if len(people[number]) > rooms[room]:
            return f"meeting {number} does not fit into room {room}"
        for person in people[number]:
            if not any(begin <= start and start + lengths[number] <= end for begin, end in free.get(person, ())):
                return f"person {person} is not free for meeting {number}"
    for (one, room, start), (two, other_room, other_start) in combinations(answer, 2):
        if one == two:
            return f"meeting {one} takes place more than once"
        if start + lengths[one] <= other_start or other_start + lengths[two] <= start:
            continue
        if room == other_room:
            return f"the meetings {one} and {two} are in room {room} at the same time"
        if both := people[one] & people[two]:
            return f"person {min(both)} is in the meetings {one} and {two} at the same time"
    return sum(len(people[number]) for number, _, _ in answer)


TASK_TYPES: dict[str, TaskType] = {
    "TSP": _like("tsp", _cities),
    "hamiltonian-cycle": _like("hamiltonian_cycle", _graph),
    "GCP-D": _like("graph_coloring", _graph),
    "maximum_clique_problem": _like("maximum_clique", _graph),
    "maximum-set": _like("maximum_independent_set", _graph),
    "minimum-cut": TaskType("minimum_cut", _cut),
    "knapsack": _like("knapsack", _items),
    "subset-sum": _like("subset_sum", _numbers),
    "set-cover": _like("set_cover", _sets),
    "meeting-schedule": TaskType("meeting_scheduling", _meetings),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dmpo.tasks.np_bench.legacy",
        description=f"Make a parquet file in verl's schema of the public NP_Bench.json. Mind that {NOTICE}.",
    )
    parser.add_argument("file", type=Path, help="NP_Bench.json, which is not part of this project")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=["bench"], help="which (default: bench)")
    parser.add_argument("--out", type=Path, required=True, help="parquet file to write")
    options = parser.parse_args(arguments)
    try:
        problems = [problem for problem in load(options.file) if problem.level in options.levels]
        if not problems:
            raise ValueError(f"there is no problem of level {' or '.join(options.levels)}")
        from .make import write_parquet

        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_parquet(options.out, rows(problems))
    except (OSError, ValueError) as error:
        sys.exit(f"legacy: {options.file}: {error}")
    for task_type, number in Counter(problem.task_type for problem in problems).items():
        print(f"{task_type}: {number}")
    print(f"{options.out}\nMind that {NOTICE}.")


if __name__ == "__main__":
    main()
