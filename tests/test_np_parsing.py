"""Reading answers to the NP-hard tasks: what is taken, what is refused and why, and that no text does harm."""

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmpo.tasks.np_bench import TASKS, Unparsed, Verdict
from dmpo.tasks.np_bench.parsing import MAX_ANSWER, MAX_DEPTH, MAX_DIGITS, parse_answer


@pytest.mark.parametrize(
    "text",
    [
        "Answer: [0, 1, 2]",
        "answer: [0, 1, 2]",
        "ANSWER : [0, 1, 2]",
        "Answer:[0,1,2]",
        "Answer:   [ 0 ,\t1,2 ]  ",
        "Answer:\n\n[0,\n 1,\n 2]\n",
        "Answer\uff1a[0, 1, 2]",
        "Answer: [0, 1, 2].",
        "Answer: [0, 1, 2,]",
        "Answer: [0 1 2]",
        "Answer: [0; 1; 2]",
        "Answer: [+0, 01, 2]",
        "Answer: (0, 1, 2)",
        "Answer: {0, 1, 2}",
        "Answer: 0, 1, 2",
        "Answer: 0, 1, 2.",
        "Answer: 0 1 2",
        "Answer: 0 -> 1 -> 2",
        "Answer: 0->1->2.",
        "Answer: [0 -> 1 -> 2]",
        "Answer: 0 --> 1 => 2",
        "Answer: 0 \u2192 1 \u21d2 2",
        "Answer: 0-1-2",
        "Answer: 0 \u2013 1 \u2014 2",
        "**Answer:** [0, 1, 2]",
        "**Answer**: [0, 1, 2]",
        "**Answer: [0, 1, 2]**",
        "__Answer:__ [0, 1, 2]",
        "### Answer:\n[0, 1, 2]",
        "Answer: `[0, 1, 2]`",
        "Answer: ```[0, 1, 2]```",
        "Answer:\n```json\n[0, 1, 2]\n```\nThat is all.",
        "```\nAnswer: [0, 1, 2]\n```",
        "Answer: [[0, 1, 2]]",
        "Answer: tour = [0, 1, 2]",
        "Answer: The set is {0, 1, 2}.",
        "Answer: [0, 1, 2] is the best that I can find.",
        "Answer: [0, 1, 2] (of length 40)",
        "Answer: [0, 1, 2], which has 3 vertices [see above]",
        "Answer: [0, 1, 2] with 3 of 5",
        "Answer: [0, 1, 2]: 40",
        "Answer: [0, 1, 2] = 40",
        "Answer: [0, 1, 2] and [3, 4]",
        "Answer: 0, 1, 2\n\nIt has 3 vertices.",
        "\\boxed{0, 1, 2}",
        "\\boxed{[0, 1, 2]}",
        "So it is $\\boxed{[0, 1, 2]}$.",
        "\\boxed {\\{0, 1, 2\\}}",
        "\\boxed{S = \\{0, 1, 2\\}}",
        "\\boxed{\\text{0, 1, 2}}",
        "\\boxed{0 \\to 1 \\rightarrow 2}",
        "\\boxed{\\left[0,\\ 1,\\, 2\\right]}",
        "Answer: $\\{0, 1, 2\\}$",
        "Answer: \\(0, 1, 2\\)",
        "Answer: \\[ [0, 1, 2] \\]",
        "Answer: \\boxed{[0, 1, 2]}",
        "The answer is simple.\nAnswer: [0, 1, 2]",
    ],
)
def test_lists_are_read_in_all_usual_notations(text):
    assert parse_answer(text) == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Answer: [0]\nNo: Answer: [1]", [1]),
        ("Answer: [0]\n\\boxed{1}", [1]),
        ("\\boxed{0}\nAnswer: [1]", [1]),
        ("\\boxed{0} or rather \\boxed{1}", [1]),
        ("Answer: 0 answer: 1", [1]),
    ],
)
def test_the_last_marker_wins(text, expected):
    assert parse_answer(text) == expected


def test_an_answer_that_is_withdrawn_does_not_count():
    assert isinstance(parse_answer("Answer: [0, 1]\nThat is wrong.\nAnswer: I do not know."), Unparsed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Answer: [[0, 1], [2]]", [[0, 1], [2]]),
        ("Answer: [0, 1], [2]", [[0, 1], [2]]),
        ("Answer: {0, 1} {2}", [[0, 1], [2]]),
        ("Answer: ([0, 1], (2,))", [[0, 1], [2]]),
        ("\\boxed{\\{0, 1\\}, \\{2\\}}", [[0, 1], [2]]),
        ("Answer: {0: 1}", [0, 1]),
        ("Answer: {0: 1, 1: 0}", [[0, 1], [1, 0]]),
        ("Answer: 0: 1, 1: 0", [[0, 1], [1, 0]]),
        ("Answer: [0: 1; 1: 0]", [[0, 1], [1, 0]]),
        ("Answer: {0: 1 1: 0}", [[0, 1], [1, 0]]),
        ("Answer: {2: (0, 1), 3: [1, 0]}", [[2, [0, 1]], [3, [1, 0]]]),
        ("Answer: [(0 -> 1), (1 -> 2)]", [[0, 1], [1, 2]]),
        ("Answer: [-1, -2]", [-1, -2]),
        ("Answer: 7", [7]),
        ("Answer: []", []),
        ("Answer: {}", []),
        ("Answer: [[], [0]]", [[], [0]]),
    ],
)
def test_nesting_pairs_and_signs(text, expected):
    assert parse_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "neither"),
        ("[0, 1, 2]", "neither"),
        ("The answer is [0, 1, 2]", "neither"),
        ("Answer:", "empty"),
        ("Answer: \n ", "empty"),
        ("Answer: .", "empty"),
        ("Answer: none", "'none' is neither a whole number nor a bracket"),
        ("Answer: two", "'two' is neither"),
        ("Answer: [0, two]", "'two]' is neither"),
        ("Answer: 0.5", "'0.5' is neither"),
        ("Answer: [0.5, 1]", "'0.5, 1]' is neither"),
        ("Answer: [0, .5]", "'.5]' is neither"),
        ("Answer: [1.0, 2.0]", "'1.0, 2.0]' is neither"),
        ("Answer: [0, 1e3]", "'1e3]' is neither"),
        ("Answer: [0x10]", "'0x10]' is neither"),
        ("Answer: [1_000]", "'1_000]' is neither"),
        ("Answer: ['0', '1']", "is neither"),
        ("Answer: [None]", "'None]' is neither"),
        ("Answer: [True]", "'True]' is neither"),
        ("Answer: [nan, inf]", "is neither"),
        ("Answer: [0, ..., 9]", "'..., 9]' is neither"),
        ("Answer: [\u0663]", "is neither"),
        ("Answer: [1/2]", "is neither"),
        ("Answer: [-1, - 2]", "is neither"),
        ("Answer: 0, 1 and 2", "'and 2' is neither"),
        ("Answer: [0, 1", "not complete"),
        ("Answer: [0, 1], [2", "not complete"),
        ("\\boxed{0, 1", "not complete"),
        ("Answer: [0, 1)", "do not match"),
        ("Answer: 0, 1]", "do not match"),
        ("Answer: {0: }", "do not match"),
        ("Answer: {: 1}", "colon"),
        ("Answer: {0:: 1}", "colon"),
        ("Answer: {0: 1: 2}", "colon"),
        ("Answer: " + "9" * (MAX_DIGITS + 1), "is neither"),
        ("Answer: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested"),
        ("Answer: [" + "0, " * MAX_ANSWER + "0]", "not complete"),
        (None, "not text"),
        (7, "not text"),
        (b"Answer: [0]", "not text"),
        (["Answer: [0]"], "not text"),
    ],
)
def test_anything_else_is_refused_with_a_reason(text, reason):
    answer = parse_answer(text)
    assert isinstance(answer, Unparsed) and reason in answer.reason


def test_bounds_are_what_they_say():
    assert parse_answer("Answer: " + "9" * MAX_DIGITS) == [10**MAX_DIGITS - 1]
    assert parse_answer("Answer: " + "[0, " * MAX_DEPTH + "]" * MAX_DEPTH) == [0, [0, [0, [0]]]]
    padding = " " * (MAX_ANSWER - 10)
    assert parse_answer(f"Answer: {padding}[0, 1]") == [0, 1]
    assert isinstance(parse_answer(f"Answer: {padding}          [0, 1]"), Unparsed)


def test_pairs_of_pairs_do_not_nest_deeper_than_brackets():
    """Colons in a row, 1:1:1:..., once made a list as deep as the text is long."""
    assert isinstance(parse_answer("Answer: " + ":".join("1" * 5000)), Unparsed)
    assert isinstance(parse_answer("Answer: {" + ":".join("1" * 5000) + "}"), Unparsed)


@pytest.mark.parametrize("form", ["Answer: CODE", "Answer: [CODE]", "\\boxed{CODE}", "Answer: [0, 1], CODE"])
def test_code_is_not_run(tmp_path, form):
    trace = tmp_path / "trace"
    for code in (
        f"__import__('os').system('touch {trace}')",
        f"open('{trace}', 'w')",
        f"(lambda: open('{trace}', 'w'))()",
        f"[open('{trace}', 'w') for _ in [0]]",
        f"$(touch {trace})",
        f"`touch {trace}`",
        f"!!python/object/apply:os.system ['touch {trace}']",
    ):
        answer = parse_answer(form.replace("CODE", code))
        assert isinstance(answer, Unparsed) or answer == [0, 1]
        assert not trace.exists()


MILLIONS = 10_000_000


@pytest.mark.parametrize(
    ("piece", "before"),
    [
        ("[", ""),
        ("[", "Answer: "),
        ("[]", "Answer: ["),
        ("{", "\\boxed{"),
        ("(" + ")" * 2, "Answer: "),
        ("Answer:", ""),
        ("Answer: [", ""),
        ("\\boxed{", ""),
        ("answer", ""),
        ("answer *", ""),
        (" ", "Answer:"),
        ("\n", "Answer: ["),
        ("*", "Answer: "),
        ("`", "Answer: "),
        ("-", "Answer: "),
        ("-->", "Answer: "),
        ("0 - ", "Answer: x"),
        (":", "Answer: 0"),
        ("9", "Answer: "),
        ("a", "Answer: "),
        ("\\", "Answer: ["),
        ("\x00", "Answer: "),
        ("\ud800", "Answer: ["),
    ],
)
def test_ten_megabytes_are_refused_at_once(piece, before):
    text = before + piece * (MILLIONS // len(piece))
    start = time.process_time()
    answer = parse_answer(text)
    assert time.process_time() - start < 2
    assert isinstance(answer, Unparsed) and answer.reason


@pytest.mark.parametrize("text", ["Answer: " + "1, " * 3_000_000, "Answer: " + "[0] " * 2_500_000])
def test_an_endless_list_is_cut_and_no_answer_to_any_task(text):
    start = time.process_time()
    answer = parse_answer(text)
    for task in TASKS.values():
        verdict = task.verify(task.make("easy", 0), answer)
        assert not verdict.valid and verdict.reason
    assert time.process_time() - start < 2


# --- round trips -----------------------------------------------------------------------------------------------------

LARGEST = 10**MAX_DIGITS - 1


def nested(depth: int) -> st.SearchStrategy[list]:
    numbers = st.one_of(st.integers(0, 60), st.integers(-LARGEST, LARGEST))
    return st.lists(st.one_of(numbers, nested(depth - 1)) if depth > 1 else numbers, max_size=4)


def write(answer: Any, brackets: str, between: str) -> str:
    if isinstance(answer, int):
        return str(answer)
    opening, closing = brackets[: len(brackets) // 2], brackets[len(brackets) // 2 :]
    return opening + between.join(write(item, brackets, between) for item in answer) + closing


def without_outer_brackets(answer: list) -> list:
    """Brackets around nothing but a list are not told from those of a box."""
    while len(answer) == 1 and isinstance(answer[0], list):
        answer = answer[0]
    return answer


FRAMES = (
    "Answer: LIST",
    "answer: LIST.",
    "**Answer:** LIST",
    "I take [] first.\nAnswer: LIST",
    "Answer:\n```json\nLIST\n```\nDone.",
    "Answer: x = LIST, I think (not sure)",
    "\\boxed{LIST}",
    "So $\\boxed{ LIST }$.",
)


@settings(max_examples=300, deadline=None)
@given(
    answer=nested(3),
    brackets=st.sampled_from(("[]", "()", "{}", "\\{\\}")),
    between=st.sampled_from((", ", ",", " ", "; ", ",\n  ")),
    frame=st.sampled_from(FRAMES),
)
def test_nested_lists_come_back_from_any_notation(answer, brackets, between, frame):
    text = frame.replace("LIST", write(answer, brackets, between))
    if between == " ":  # where a sign would be a dash
        text, answer = text.replace("-", ""), json.loads(json.dumps(answer).replace("-", ""))
    assert parse_answer(text) == without_outer_brackets(answer)


@settings(max_examples=200, deadline=None)
@given(answer=nested(3), indent=st.sampled_from((None, 2)))
def test_json_comes_back(answer, indent):
    assert parse_answer("Answer: " + json.dumps(answer, indent=indent)) == without_outer_brackets(answer)


@settings(max_examples=200, deadline=None)
@given(
    numbers=st.lists(st.integers(0, LARGEST), min_size=1, max_size=60),
    between=st.sampled_from(
        (", ", ",", " ", "; ", "->", " -> ", "-->", " => ", "\u2192", " \u2192 ", "-", " - ", "\u2013", " \\to ")
    ),
    frame=st.sampled_from(
        ("Answer: LIST", "Answer: LIST.", "**Answer:** LIST\nDone.", "Answer: [LIST]", "\\boxed{LIST}")
    ),
)
def test_rows_of_numbers_come_back_from_any_notation(numbers, between, frame):
    assert parse_answer(frame.replace("LIST", between.join(map(str, numbers)))) == numbers


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.integers(0, 60), st.integers(0, 60), min_size=2), st.booleans())
def test_mappings_come_back_as_pairs(mapping, bare):
    text = str(mapping).strip("{}") if bare else str(mapping)
    assert parse_answer(f"Answer: {text}") == [list(pair) for pair in mapping.items()]


# --- noise -----------------------------------------------------------------------------------------------------------

PIECES = (
    *"[[[]]](({)}){,,,,   \n:;-=.0123456789",
    *("12", "0, 1", "[0, 1]", "[2, 0, 1]", "(1", "1)", "{0: 1}", "-1", "0.5", "1e3", "999999999999", "9999999999999"),
    *("Answer:", "answer: ", "Answer: [", "**Answer:**", "\\boxed{", "\\{", "\\}", "\\to", "\\text{", "\\[", "\\"),
    *(
        "->",
        "-->",
        "\u2192",
        "\u2013",
        "```",
        "```json\n",
        "**",
        "$",
        "a",
        "None",
        "\u00e9",
        "\u0663",
        "\x00",
        "\ud800",
    ),
)


def check_answer(answer: Any) -> None:
    """It is what `parse_answer` promises."""

    def depth(item: Any) -> int:
        assert type(item) in (int, list)
        if isinstance(item, int):
            assert abs(item) <= LARGEST
            return 0
        return 1 + max(map(depth, item), default=0)

    if isinstance(answer, Unparsed):
        assert answer.reason
    else:
        assert isinstance(answer, list) and depth(answer) <= 2 * MAX_DEPTH + 2


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_no_text_raises(text):
    check_answer(parse_answer(text))
    check_answer(parse_answer("Answer: " + text))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_no_text_of_pieces_of_answers_raises(text):
    check_answer(parse_answer(text))
    check_answer(parse_answer("Answer: " + text))


@pytest.mark.slow
def test_a_hundred_thousand_texts_never_raise_in_any_task():
    draw = random.Random(0)
    instances = [(task, task.make("easy", 0)) for task in TASKS.values()]
    parsed, valid = 0, dict.fromkeys(TASKS, 0)
    for _ in range(100_000):
        text = "".join(draw.choices(PIECES, k=draw.randint(0, 30)))
        if draw.random() < 0.3:  # a list that some task may take, with a little noise
            text = str(draw.choices(range(9), k=draw.randint(1, 9)))
            for _ in range(draw.randint(0, 2)):
                place = draw.randint(0, len(text))
                text = text[:place] + draw.choice(PIECES) + text[place:]
        answer = parse_answer("Answer: " + text if draw.random() < 0.7 else text)
        check_answer(answer)
        parsed += not isinstance(answer, Unparsed)
        for task, instance in instances:
            verdict = task.verify(instance, answer)
            assert isinstance(verdict, Verdict)
            assert (verdict.value is not None and not verdict.reason) if verdict.valid else verdict.reason
            if verdict.valid:
                valid[task.name] += 1
                assert isinstance(task.canonical(instance, answer), str)
    # Enough of them were answers for this to say something.
    assert parsed > 15_000 and sum(count > 0 for count in valid.values()) > 10, valid.values()
