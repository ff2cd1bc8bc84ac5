"""Whether two final answers mean the same, decided by math-verify. Runs in a process of its own: see `reward`.

Answers are read by math-verify's LaTeX grammar alone; its other extractors evaluate text with Python.
"""

import contextlib
import logging
import re

from math_verify import LatexExtractionConfig, parse, verify

MEMORY_LIMIT = 4 << 30
"""Bytes of address space of a process that grades."""

_LATEX = (LatexExtractionConfig(boxed_match_priority=0),)


def limit_process() -> None:
    """Bound the memory of this process, and silence math-verify about the time limit that `reward` sets."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))


def grade(gold: str, answer: str) -> tuple[bool, str]:
    """Compare two non-empty answers, written in LaTeX or plain.

    Returns:
        Whether they mean the same, and a name for `answer`: what it was read as, equal for most ways to write it.
    """
    read = _read(answer)
    equal = verify(_read(gold), read, allow_set_relation_comp=True, timeout_seconds=None) if read else False
    return equal, str(read[0]) if read else answer


def _read(answer: str) -> list:
    # math-verify knows a percentage by the sign after the formula.
    percentage = re.fullmatch(r"(.+?)\s*\\?%", answer, re.DOTALL)
    text = f"${percentage.group(1)}$\\%" if percentage else f"\\boxed{{{answer}}}"
    return parse(text, _LATEX, fallback_mode="no_fallback", parsing_timeout=None)
