"""Reads the answer at the end of a model's reply: whole numbers in lists, sets, tuples or arrows. Evaluates nothing.

Every bound is on purpose: the text comes from a model, and may be anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

MAX_ANSWER = 20_000
"""Characters behind the last marker that are read."""
MAX_DEPTH = 4
MAX_DIGITS = 12

_MARKER = re.compile(r"answer\W{0,4}?[:\uff1a]|\\boxed\s{0,3}\{", re.IGNORECASE)
_BLANKS = re.compile(r"[^\S\n]+")
_NOTHING = re.compile(r"\\(?:(?:left|right|quad|text)\b|[,;!: \[\]()])|\$|`+(?:json|python|text|plaintext)?|\*+|~")
_ARROW = re.compile(
    r"-->?|->|[=\u21d2\u2192]>?|\\(?:to|rightarrow|Rightarrow)\b|(?<=[0-9]) ?[-\u2013\u2014] ?(?=[0-9])"
)
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?[0-9]{1,12})(?!\w|\.[0-9])|(?P<open>[\[({])|(?P<close>[\])}])|(?P<sep>[,;:]))"
)
_PAIRS = {"[": "]", "(": ")", "{": "}"}
# Words before a list, as in "Answer: tour = [0, 1]".
_LABEL = re.compile(r"[^\d\[({})\]\n]{0,40}(?=[\[({])")


@dataclass(frozen=True)
class Unparsed:
    """No answer could be read.

    Attributes:
        reason: why, in words that a person can read.
    """

    reason: str


def parse_answer(text: Any) -> list | Unparsed:
    """The answer behind the last "Answer:" or in the last `\\boxed{}` of a reply: nested lists of ints.

    Takes `[0, 1]`, `(0, 1)`, `{0, 1}`, `0, 1`, `0 1`, `0 -> 1`, `{0: 1, 2: 3}` (pairs) and several lists in a row, in
    code fences or LaTeX, with a full stop or words behind it. Anything else gives `Unparsed`; never raises.
    """
    if not isinstance(text, str):
        return Unparsed("the reply is not text")
    markers = list(_MARKER.finditer(text, max(0, len(text) - 5 * MAX_ANSWER)))
    if not markers:
        return Unparsed('there is neither "Answer:" nor \\boxed{} at the end of the reply')
    marker = markers[-1]
    rest = text[marker.end() : marker.end() + MAX_ANSWER].replace("\\{", "{").replace("\\}", "}")
    rest = _BLANKS.sub(" ", _NOTHING.sub(" ", rest))
    rest = rest.lstrip()
    if label := _LABEL.match(rest):
        rest = rest[label.end() :]
    if marker.group().startswith("\\"):
        rest = "{" + rest
    if not rest.startswith(tuple(_PAIRS)):
        rest = rest.split("\n", 1)[0].rstrip(" .")
        return _read(_ARROW.sub(",", rest), whole=True)
    answer = _read(_ARROW.sub(",", rest), whole=False)
    # The brackets around the answer, or around the box, are a level that it does not have.
    while isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], list):
        answer = answer[0]
    return answer


def _read(text: str, whole: bool) -> list | Unparsed:
    """Items in a row: numbers and lists. To the end of the text, or (not `whole`) of the lists at its start."""
    # One for each open bracket, and the outermost: its items, and whether a colon joins the last to the next.
    stack: list[list] = [[]]
    joining = [False]
    closers: list[str] = []
    position = 0
    pair: list | None = None

    def add(item: Any) -> None:
        nonlocal pair
        if joining[-1]:
            item = pair = [stack[-1].pop(), item]
        stack[-1].append(item)
        joining[-1] = False

    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            rest = text[position:].strip()
            if not rest:
                break
            if not whole and stack[0]:
                return stack[0]  # words behind the lists, maybe in brackets
            return Unparsed(f"{rest[:20]!r} is neither a whole number nor a bracket")
        if not whole and not closers and token["number"] and stack[0]:
            break  # words behind the list that begin with a number
        position = token.end()
        if token["number"]:
            add(int(token["number"]))
        elif token["open"]:
            if len(closers) == MAX_DEPTH:
                return Unparsed(f"brackets are nested more than {MAX_DEPTH} deep")
            closers.append(_PAIRS[token["open"]])
            stack.append([])
            joining.append(False)
        elif token["close"]:
            if not closers and not whole:
                break
            if not closers or closers.pop() != token["close"] or joining.pop():
                return Unparsed("the brackets do not match")
            add(stack.pop())
        elif token["sep"] == ":":
            if not closers and not whole:
                break
            if not stack[-1] or joining[-1] or stack[-1][-1] is pair:
                return Unparsed("there is a colon without one thing on each side")
            joining[-1] = True
    if closers or joining[0]:
        return Unparsed("the answer is not complete")
    if not stack[0]:
        return Unparsed("the answer is empty")
    return stack[0]
