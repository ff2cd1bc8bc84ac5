"""Where the mathematics questions come from, and how each data set lays them out.

Layouts and revisions are those that public code reading these data sets states; sources: docs/math.md.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


class MissingField(LookupError):
    """A row lacks a field that its data set's layout has."""


@dataclass(frozen=True)
class Question:
    """One question as its source has it.

    Attributes:
        text: the question, without instructions.
        answer: the right answer, "" if the source has none.
        source_id: what the source calls the question, "" if it does not name it.
    """

    text: str
    answer: str
    source_id: str = ""


@dataclass(frozen=True)
class Source:
    """A data set on the Hugging Face hub.

    Attributes:
        path: its id on the hub.
        read: what a row says.
        rows: how many rows it is known to have.
        revision: the commit to load; None where none is known, then the newest.
        config, split: of `datasets.load_dataset`.
    """

    path: str
    read: Callable[[Row], Question]
    rows: int
    revision: str | None
    config: str | None = None
    split: str = "train"


def _field(row: Row, *names: str) -> Any:
    """The first of `names` that the row has; a dot goes into a nested field."""
    for name in names:
        value: Any = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    raise MissingField(f"no field {' or '.join(names)}; the row has {', '.join(map(str, row))}")


def answer_text(value: Any) -> str:
    """An answer as text: whole numbers without decimals or leading zeros, no dollar signs, items joined by commas."""
    if isinstance(value, list | tuple):
        return ", ".join(answer_text(item) for item in value)
    text = re.sub(r"(?<!\\)\$", "", str(value)).strip()
    return str(int(float(text))) if re.fullmatch(r"-?\d{1,15}(\.0+)?", text) else text


def _columns(question: str, answer: str, source_id: str | None = None) -> Callable[[Row], Question]:
    def read(row: Row) -> Question:
        return Question(
            str(_field(row, question)).strip(),
            answer_text(_field(row, answer)),
            str(row.get(source_id, "")) if source_id else "",
        )

    return read


_DAPO_INSTRUCTIONS = (
    re.compile(r"^Solve the following math problem step by step\. The last line of your response[^\n]*\n+"),
    re.compile(r'\n+Remember to put your answer on its own line after "Answer:"\.\s*$'),
)


def _chat(row: Row) -> Question:
    """verl's own schema: the user's message without DAPO's instructions."""
    prompt = _field(row, "prompt")
    if not isinstance(prompt, str):
        said = [message["content"] for message in prompt if message["role"] == "user"]
        if not said:
            raise MissingField("no user message in the field prompt")
        prompt = said[-1]
    for instruction in _DAPO_INSTRUCTIONS:
        prompt = instruction.sub("", prompt)
    answer = _field(row, "reward_model.ground_truth", "solution")
    return Question(prompt.strip(), answer_text(answer), str((row.get("extra_info") or {}).get("index", "")))


def _any_layout(row: Row) -> Question:
    """Data of one's own: verl's schema, or a question and an answer under one of their usual names."""
    if isinstance(row.get("prompt"), list | tuple):
        return _chat(row)
    return Question(
        str(_field(row, "question", "problem", "prompt")).strip(),
        answer_text(_field(row, "answer", "final_answer", "reward_model.ground_truth", "ground_truth", "solution")),
        str(row.get("id", "")),
    )


OWN = Source("one's own data", _any_layout, 0, None)
"""Any file with questions and answers."""


def _olympiad(row: Row) -> Question:
    context = row.get("context")
    question = str(_field(row, "question")).strip()
    if isinstance(context, str) and context.strip():
        question = f"{context.strip()}\n\n{question}"
    return Question(question, answer_text(_field(row, "final_answer")), str(row.get("id", "")))


TRAINING = {
    "openr1": Source("Elliott/Openr1-Math-46k-8192", _chat, 45_792, None),
    "dapo": Source("BytedTsinghua-SIA/DAPO-Math-17k", _chat, 1_791_700, "65877096c24ffa7abc4e4fa5edb95cf3413a5674"),
}
EVALUATION = {
    "aime24": Source(
        "HuggingFaceH4/aime_2024",
        _columns("problem", "answer", "id"),
        30,
        "2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
    ),
    "aime25": Source(
        "math-ai/aime25",
        _columns("problem", "answer", "id"),
        30,
        "563bb8404243c5f09de6ec262f2db674fe5bce9b",
        split="test",
    ),
    "amc": Source(
        "AI-MO/aimo-validation-amc",
        _columns("problem", "answer", "url"),
        83,
        "69d78a4a2c840e82d69af6bc742bda09005f6316",
    ),
    "math500": Source(
        "HuggingFaceH4/MATH-500",
        _columns("problem", "answer", "unique_id"),
        500,
        "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        split="test",
    ),
    "minerva": Source(
        "math-ai/minervamath",
        _columns("question", "answer"),
        272,
        "ee46ddc498933b1977577953250ca5c66be64f96",
        split="test",
    ),
    "olympiadbench": Source(
        "Hothan/OlympiadBench",
        _olympiad,
        674,
        "91184b52131e7fc9455fef848035173aea8cc01a",
        config="OE_TO_maths_en_COMP",
    ),
}
