"""Reward for the NP-hard tasks: verl's `custom_reward_function`.

    reward.custom_reward_function.path=pkg://dmpo.tasks.np_bench.reward

The ground truth of a row is what `ground_truth` makes: the instance itself, its reference's value and the trivial
answer's, so an answer is judged without a solver.
"""

import hashlib
import json
from typing import Any

if not __package__:
    raise ImportError("load this reward as reward.custom_reward_function.path=pkg://dmpo.tasks.np_bench.reward")

from . import TASKS
from .base import Instance, Reference
from .parsing import Unparsed


def ground_truth(task: str, instance: Instance, reference: Reference) -> str:
    """What `compute_score` needs to know of an instance, as JSON."""
    trivial = TASKS[task].verify(instance, TASKS[task].trivial(instance))
    truth = {
        "task": task,
        "instance": instance,
        "reference": reference.value,
        "status": reference.status,
        "trivial": trivial.value,
    }
    return json.dumps(truth, separators=(",", ":"))


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    format_reward: float = 0.1,
    above_trivial: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Score one response; raises for none.

    Args:
        data_source, extra_info, kwargs: not used; verl passes them.
        solution_str: the response.
        ground_truth: of the row, see `ground_truth`.
        format_reward: added for a response with an answer that can be read (0.1 in the paper).
        above_trivial: reward only what is better than the answer that needs no thought: with t its quality ratio,
            (ratio - t) / (1 - t) instead of ratio. Set both by `reward.custom_reward_function.reward_kwargs`.

    Returns:
        `score` = `format_reward` * `format` + the ratio, clipped to [0, 1]; `acc` = `valid`, 0 or 1; `value` of the
        objective, 0 where not valid; `ratio`, not clipped, 0 where not valid (above 1 only where the reference is not
        proved optimal); `above_trivial`, the normalised ratio; `answer`, the same for the same solution, "" where not
        valid; `reason` why not, "" where valid.
    """
    truth = json.loads(ground_truth)
    task, instance = TASKS[truth["task"]], truth["instance"]
    answer = task.parse(solution_str)
    verdict = task.verify(instance, answer)
    ratio = name = None
    if verdict.valid:
        ratio = task.quality(verdict.value, truth["reference"])
        name = hashlib.sha256(task.canonical(instance, answer).encode()).hexdigest()[:16]
    has_format = not isinstance(answer, Unparsed)
    above = _above_trivial(ratio or 0.0, truth["trivial"], truth["reference"], task)
    return {
        "score": format_reward * has_format + min(max(above if above_trivial else ratio or 0.0, 0.0), 1.0),
        "acc": float(verdict.valid),
        "valid": float(verdict.valid),
        "format": float(has_format),
        "value": float(verdict.value or 0),
        "ratio": ratio or 0.0,
        "above_trivial": above,
        "answer": name or "",
        "reason": verdict.reason,
    }


def _above_trivial(ratio: float, trivial: int | None, reference: int, task: Any) -> float:
    """(ratio - t) / (1 - t), at least 0; the ratio itself where there is no trivial answer, or it is as good."""
    t = 0.0 if trivial is None else min(task.quality(trivial, reference), 1.0)
    return max((ratio - t) / (1 - t), 0.0) if t < 1 else float(ratio >= 1)
