r"""Reward for mathematics with one right answer: verl's `custom_reward_function` on top of math-verify.

    reward.custom_reward_function.path=pkg://dmpo.tasks.math.reward

A response is right if its final answer, the last `\boxed{...}` or `Answer: ...`, means the same as the ground truth.
Answers are compared in a process of their own, which is ended and replaced when it takes too long: math-verify's own
time limit needs the main thread, and verl calls reward functions in others.
"""

import functools
import multiprocessing
import re
import threading
from concurrent.futures import TimeoutError as Timeout
from multiprocessing.util import Finalize
from typing import Any

from pebble import ProcessPool

if not __package__:
    raise ImportError("load this reward as reward.custom_reward_function.path=pkg://dmpo.tasks.math.reward")

MAX_RESPONSE = 16_384
"""Characters at the end of a response in which its final answer is looked for."""
MAX_ANSWER = 512
"""Characters of a final answer; a longer one is none."""
MAX_DEPTH = 20
"""Braces within braces of a final answer; a deeper one is none."""

_ANSWER = re.compile(r"\banswer\s*(?:\*\*)?\s*:\s*(?:\*\*)?\s*([^\n]*)", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_CHOICE = re.compile(r"\(?([A-J])\)?")
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])")
_WRAPPER = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf)|mbox)\s*(?=\{)")
_SPACING = re.compile(r"\\[,!:; ]|\\(?:left|right|displaystyle)(?![a-zA-Z])|~|(?<!\w)\s+|\s+(?!\w)")
_DELIMITERS = (("**", "**"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    format_reward: float = 0.1,
    timeout: float = 5.0,
    **kwargs: Any,
) -> dict[str, Any]:
    """Score one response; raises for none, and takes little more than `timeout` seconds.

    Args:
        data_source, extra_info, kwargs: not used; verl passes them.
        solution_str: the response.
        ground_truth: the right answer, in LaTeX or plain.
        format_reward: added for a response that gives an answer after its reasoning (0.1 in the paper, 0 switches it
            off). Set it by `reward.custom_reward_function.reward_kwargs.format_reward`.
        timeout: seconds to compare two answers; what takes longer is wrong.

    Returns:
        `score` = `acc` + `format_reward` * `format`; `acc` and `format`, 0 or 1; `answer`, a name of the final answer
        that is equal for most ways to write it, "" if there is none; `timeout`, 1 if comparing took too long.

    Raises:
        RewardUnavailable: answers cannot be compared here at all, whatever the response.
    """
    answer, reasoned = final_answer(solution_str)
    acc, name, late = _judge(str(ground_truth).strip(), answer, timeout) if answer else (False, "", False)
    has_format = bool(answer) and reasoned
    return {
        "score": float(acc) + format_reward * has_format,
        "acc": float(acc),
        "format": float(has_format),
        "answer": name,
        "timeout": float(late),
    }


def final_answer(response: str) -> tuple[str, bool]:
    r"""The last complete `\boxed{...}` or `Answer: ...` of a response, whichever begins later.

    Returns:
        The answer without math delimiters and a closing full stop, "" if there is none or it is beyond `MAX_ANSWER` or
        `MAX_DEPTH`; and whether words or numbers come before it.
    """
    if not isinstance(response, str):
        return "", False
    tail = response[-MAX_RESPONSE:]
    start, answer = -1, ""
    for line in _ANSWER.finditer(tail):
        start, answer = line.start(), line.group(1)
    for box in reversed(list(_BOX.finditer(tail))):
        inside = _closed(tail, box.end())
        if inside is not None:
            if box.start() > start:
                start, answer = box.start(), inside
            break
    answer = _bare(answer)
    if not answer or len(answer) > MAX_ANSWER or _depth(answer) > MAX_DEPTH:
        return "", False
    before = re.sub(r"\banswer\b\W*$", "", tail[:start], flags=re.IGNORECASE)
    return answer, len(response) > len(tail) or re.search(r"\w", before) is not None


def _closed(text: str, start: int) -> str | None:
    """What is between `start`, just after an opening brace, and its closing one; None if that is too far away."""
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[start : start + MAX_ANSWER + 1], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if not depth:
            return text[start : start + brace.start()]
    return None


def _depth(answer: str) -> int:
    deepest = depth = 0
    for character in answer:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest


def _bare(answer: str) -> str:
    """An answer without what stands around it in a sentence."""
    while True:
        before = answer
        answer = answer.strip().removesuffix("**")
        if answer.endswith(".") and not answer.endswith("\\."):
            answer = answer[:-1]
        for opening, closing in _DELIMITERS:
            inside = answer[len(opening) : -len(closing)]
            if answer == opening + inside + closing and opening not in inside and closing not in inside:
                answer = inside
        if answer == before:
            return answer


def _plain(answer: str) -> str:
    """An answer without what changes its looks only, to compare as text."""
    answer = _WRAPPER.sub("", answer)
    for other, usual in (("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\varnothing", "\\emptyset")):
        answer = answer.replace(other, usual)
    answer = _SPACING.sub("", answer)
    return answer[1:-1] if re.fullmatch(r"\{[^{}]*\}", answer) else answer


@functools.lru_cache(maxsize=1 << 16)
def _judge(gold: str, answer: str, timeout: float) -> tuple[bool, str, bool]:
    """Whether a non-empty answer is right, its name (the ground truth's if so), and whether comparing took too long."""
    plain_gold, plain = _plain(_bare(gold)), _plain(answer)
    if plain == plain_gold:
        return True, plain_gold, False
    choice = _CHOICE.fullmatch(plain_gold)
    if choice:
        # All letters count: "A, B, C, D" names the right one too.
        letters = sorted(set(_LETTER.findall(_WRAPPER.sub("", answer))))
        right = letters == [choice.group(1)]
        return right, plain_gold if right else ",".join(letters) or plain, False
    pool = _pool()
    try:
        right, name = pool.schedule(_grade, args=(_bare(gold), answer), timeout=timeout).result()
    except Timeout:
        return False, plain, True
    except Exception:  # whatever a library does with such an answer, and the death of the process
        return False, plain, False
    return right, plain_gold if right else name, False


def _grade(gold: str, answer: str) -> tuple[bool, str]:
    from .grading import grade

    return grade(gold, answer)


def _start() -> None:
    """Make a new process ready, so that the time limit of its first comparison covers no import."""
    from .grading import grade, limit_process

    limit_process()
    grade("1", "2")


class RewardUnavailable(RuntimeError):
    """Answers cannot be compared here at all. Without this error every one would be wrong."""


_STARTING = 300  # s
_lock = threading.Lock()
_pools: list[ProcessPool] = []


def _pool() -> ProcessPool:
    """The process that compares, started when first needed. Spawned, since forking a process with threads is unsafe."""
    with _lock:
        if not _pools or not _pools[0].active:
            context = multiprocessing.get_context("spawn")
            pool = ProcessPool(max_workers=1, context=context, initializer=_start)
            try:
                works, _ = pool.schedule(_grade, args=("2", "1+1"), timeout=_STARTING).result()
            except Exception as error:
                raise RewardUnavailable(
                    f"the process that compares mathematical answers does not start ({type(error).__name__}: {error}); "
                    "it needs `pip install 'math-verify[antlr4_9_3]' pebble`, and a parent that may have children "
                    "(multiprocessing's daemons may not)"
                ) from error
            if not works:
                raise RewardUnavailable("math-verify says that 1+1 is not 2: reinstall math-verify[antlr4_9_3]")
            _pools[:] = [pool]
            Finalize(None, _stop, exitpriority=10)  # unlike atexit, also at the end of multiprocessing's children
        return _pools[0]


def _stop() -> None:
    for pool in _pools:
        pool.stop()
        pool.join()
