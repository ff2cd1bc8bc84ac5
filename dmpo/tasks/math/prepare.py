"""Make verl's parquet files for mathematics: `python -m dmpo.tasks.math.prepare --help`."""

import argparse
import collections
import hashlib
import json
import random
import re
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...files import replacing
from ...report.text import columns
from .sources import EVALUATION, OWN, TRAINING, MissingField, Question, Source

if TYPE_CHECKING:
    from datasets import Dataset

TEMPLATES = {
    # The Qwen2.5-Math model card's.
    "qwen": (r"Please reason step by step, and put your final answer within \boxed{}.", "{question}"),
    # The format that the DMPO paper rewards: reasoning, then `Answer: [solution]`.
    "answer": (
        None,
        "{question}\n\nReason step by step. End with your final answer on a line of its own:\nAnswer: [solution]",
    ),
    # The question alone, for a model that was taught to answer it.
    "plain": (None, "{question}"),
}
"""System message (None: none) and user message."""


class PrepareError(Exception):
    """The data cannot be prepared; the message says what to do."""


@dataclass
class Counts:
    """What became of a source's rows."""

    read: int = 0
    repeated: int = 0
    contradicting: int = 0
    unanswered: int = 0
    evaluated: int = 0
    too_long: int = 0
    kept: int = 0


@dataclass
class Prepared:
    """One source: its questions by normalised text, in the source's order."""

    name: str
    origin: str
    counts: Counts = field(default_factory=Counts)
    questions: dict[str, Question] = field(default_factory=dict)


def normalised(question: str) -> str:
    """What makes two questions the same: letters, digits and signs, without case, spacing, punctuation and dollars."""
    text = unicodedata.normalize("NFKC", question).casefold()
    text = re.sub(
        r"\\(?:left|right|displaystyle|dfrac|tfrac|[,;:! ])", lambda m: "frac" if "frac" in m[0] else "", text
    )
    return re.sub(r"[^\w+\-*/^=<>]|_", "", text)


def load(name: str, source: Source, local: Path | None, cache: str) -> "tuple[Dataset, str]":
    """Rows of a source from the hub, or from a file or folder of parquet or JSON Lines; and where they come from.

    Args:
        name: of the source.
        source: where it is on the hub.
        local: file or folder to take instead.
        cache: folder for what `datasets` makes of local files.

    Raises:
        PrepareError: if they cannot be had.
    """
    import datasets

    if local is not None:
        files = sorted(p for p in local.rglob("*") if p.suffix in _FORMATS) if local.is_dir() else [local]
        if not files or not local.exists():
            raise PrepareError(f"--from {name}={local}: no parquet or JSON Lines file there")
        formats = {_FORMATS.get(file.suffix) for file in files}
        if len(formats) > 1 or None in formats:
            raise PrepareError(f"--from {name}={local}: expected files of one kind, .parquet, .jsonl or .json")
        try:
            data = datasets.load_dataset(
                formats.pop(), data_files=[str(file) for file in files], split="train", cache_dir=cache
            )
        except Exception as error:
            raise PrepareError(f"--from {name}={local}: cannot be read: {_first_line(error)}") from error
        return data, str(local)
    origin = f"{source.path}@{source.revision or 'main'}"
    try:
        return datasets.load_dataset(source.path, source.config, split=source.split, revision=source.revision), origin
    except Exception as error:  # hub, proxy and cache each raise their own
        raise PrepareError(
            f"{name}: {source.path} cannot be loaded from the Hugging Face hub: {_first_line(error)}\n"
            f"Without a connection, fetch the data set elsewhere (hf download --repo-type dataset {source.path}"
            f"{' --revision ' + source.revision if source.revision else ''}) and name the file or folder: "
            f"--from {name}=PATH (parquet or JSON Lines in the same layout)"
        ) from error


_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def collect(name: str, source: Source, data: Iterable[dict[str, Any]], origin: str) -> Prepared:
    """Read each question once. Rows that say the same are one; those that contradict each other are left out.

    Raises:
        PrepareError: if a row is not laid out as the source is.
    """
    result = Prepared(name, origin)
    contradicting: set[str] = set()
    for number, row in enumerate(data):
        try:
            question = source.read(row)
        except (MissingField, KeyError, TypeError, AttributeError) as error:
            raise PrepareError(
                f"{name}: row {number} of {origin} is not in the layout of {source.path}: {error.args[0]}"
            ) from error
        result.counts.read += 1
        key = normalised(question.text)
        known = result.questions.get(key)
        if not question.answer or not key:
            result.counts.unanswered += 1
        elif known is None:
            result.questions[key] = question
        else:
            result.counts.repeated += 1
            if known.answer != question.answer:
                contradicting.add(key)
    for key in contradicting:
        del result.questions[key]
    result.counts.contradicting = len(contradicting)
    return result


def chat(question: str, template: str) -> list[dict[str, str]]:
    """The question as chat messages."""
    system, user = TEMPLATES[template]
    messages = [{"role": "user", "content": user.replace("{question}", question)}]
    return [{"role": "system", "content": system}, *messages] if system else messages


def drop_long(prepared: Prepared, template: str, tokenizer: Any, max_tokens: int) -> None:
    """Leave out questions whose prompt has more than `max_tokens` tokens."""
    for key, question in _progress(list(prepared.questions.items()), f"{prepared.name}: lengths"):
        tokens = tokenizer.apply_chat_template(chat(question.text, template), add_generation_prompt=True, tokenize=True)
        if len(tokens["input_ids"] if hasattr(tokens, "keys") else tokens) > max_tokens:
            del prepared.questions[key]
            prepared.counts.too_long += 1


def verl_rows(prepared: Prepared, split: str, template: str) -> list[dict[str, Any]]:
    """Rows of verl's parquet schema (verl/utils/dataset/rl_dataset.py)."""
    return [
        {
            "data_source": prepared.name,
            "prompt": chat(question.text, template),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {
                # Of the question itself: the same whatever is added to, or left out of, the data.
                "id": f"{prepared.name}/{hashlib.sha256(key.encode()).hexdigest()[:16]}",
                "index": index,
                "split": split,
                "source_id": question.source_id,
            },
        }
        for index, (key, question) in enumerate(prepared.questions.items())
    ]


def prepare(options: argparse.Namespace) -> None:
    """Everything that the command line asks for.

    Raises:
        PrepareError: if a source cannot be had or nothing is left of the data.
    """
    known_sources = TRAINING | EVALUATION
    chosen = {name: known_sources.get(name, OWN) for name in (*options.train, *options.eval)}
    prepared = {}
    for name, source in chosen.items():
        with tempfile.TemporaryDirectory() as cache:
            data, origin = load(name, source, options.local.get(name), cache)
            prepared[name] = collect(name, source, _progress(data, f"{name}: questions"), origin)
        if name not in options.local and prepared[name].counts.read != source.rows:
            print(
                f"warning: {name} has {prepared[name].counts.read} rows; {source.rows} were expected", file=sys.stderr
            )
        if not prepared[name].questions:
            raise PrepareError(f"{name}: no question with an answer in {origin}")
    training = [prepared[name] for name in options.train]
    evaluation = [prepared[name] for name in options.eval]

    seen = {key for source in evaluation for key in source.questions}
    for source in training:
        overlap = [key for key in source.questions if key in seen]
        source.counts.evaluated = len(overlap)
        for key in overlap:
            del source.questions[key]
    # What two training sets share is trained on once.
    known: set[str] = set()
    for source in training:
        shared = [key for key in source.questions if key in known]
        source.counts.repeated += len(shared)
        for key in shared:
            del source.questions[key]
        known |= source.questions.keys()

    if options.tokenizer:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        except (OSError, ValueError) as error:
            raise PrepareError(f"--tokenizer {options.tokenizer}: {_first_line(error)}") from error
        for source in prepared.values():
            drop_long(source, options.template, tokenizer, options.max_prompt_tokens)
    _sample(training, options.samples, options.seed)

    options.out.mkdir(parents=True, exist_ok=True)
    files = {}
    for file, split, sources in (("train", "train", training), ("validation", "test", evaluation)):
        rows = [row for source in sources for row in verl_rows(source, split, options.template)]
        if split == "train":
            random.Random(options.seed).shuffle(rows)
        if sources and not rows:
            raise PrepareError(f"no question is left for {file}.parquet; see the counts: {_table(prepared.values())}")
        if rows:
            files[f"{file}.parquet"] = _write_parquet(options.out / f"{file}.parquet", rows)
    for source in prepared.values():
        source.counts.kept = len(source.questions)
    manifest = {
        "sources": {p.name: {"from": p.origin, **asdict(p.counts)} for p in prepared.values()},
        "files": files,
        "template": options.template,
        "tokenizer": str(options.tokenizer) if options.tokenizer else None,
        "max_prompt_tokens": options.max_prompt_tokens if options.tokenizer else None,
        "samples": options.samples,
        "seed": options.seed,
    }
    with replacing(options.out / "manifest.json") as partial:
        partial.write_text(json.dumps(manifest, indent=1) + "\n")
    print(f"\n{_table(prepared.values())}\n")
    for name in (*files, "manifest.json"):
        print(options.out / name)


def _sample(training: Sequence[Prepared], samples: int | None, seed: int) -> None:
    keys = [(source.name, key) for source in training for key in source.questions]
    if samples is None or samples >= len(keys):
        return
    chosen = set(random.Random(seed).sample(keys, samples))
    for source in training:
        source.questions = {key: q for key, q in source.questions.items() if (source.name, key) in chosen}


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    import datasets

    with replacing(path) as partial:
        datasets.Dataset.from_list(rows).to_parquet(str(partial))
    content = json.dumps(rows, sort_keys=True, ensure_ascii=False).encode()
    return {"rows": len(rows), "sha256_of_rows": hashlib.sha256(content).hexdigest()}


def _progress(items: Any, title: str) -> Any:
    from tqdm import tqdm

    return tqdm(items, desc=title, unit=" rows", mininterval=0.1 if sys.stderr.isatty() else 10)


def _table(sources: Iterable[Prepared]) -> str:
    header = ["source", "read", "repeated", "contradicting", "no answer", "in evaluation", "too long", "kept"]
    rows = [
        [p.name, *map(str, (c.read, c.repeated, c.contradicting, c.unanswered, c.evaluated, c.too_long, c.kept))]
        for p in sources
        for c in [p.counts]
    ]
    return columns([header, *rows], left=1)


def _local(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise argparse.ArgumentTypeError(f"expected NAME=PATH, got {text!r}")
    return name, Path(path)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dmpo.tasks.math.prepare",
        description="Make train.parquet and validation.parquet in verl's schema, with a manifest of what is in them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("data/math"), help="folder to write to")
    parser.add_argument(
        "--train",
        nargs="*",
        metavar="NAME",
        default=["openr1"],
        help=f"training sets: {', '.join(TRAINING)}, or any other name that --from gives data to",
    )
    parser.add_argument(
        "--eval",
        nargs="*",
        metavar="NAME",
        default=list(EVALUATION),
        help=f"evaluation sets: {', '.join(EVALUATION)}, or any other name that --from gives data to",
    )
    parser.add_argument(
        "--from",
        dest="local",
        metavar="NAME=PATH",
        type=_local,
        action="append",
        default=[],
        help="take a set from a file or folder (parquet, JSON Lines) instead of the hub; may be repeated. Sets of your "
        "own need a question (or problem) and an answer in each row, or verl's schema",
    )
    parser.add_argument("--template", choices=TEMPLATES, default="qwen", help="how the question is put")
    parser.add_argument("--tokenizer", help="model whose tokenizer measures prompts; without it none is too long")
    parser.add_argument("--max-prompt-tokens", type=_positive, default=1024, help="longest prompt, with --tokenizer")
    parser.add_argument("--samples", type=_positive, help="training questions to draw at random (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing and the order of the training questions")
    options = parser.parse_args(arguments)
    repeated = [name for name, count in collections.Counter(name for name, _ in options.local).items() if count > 1]
    if repeated:
        parser.error(f"--from names {', '.join(repeated)} twice")
    options.local = dict(options.local)
    wanted = [*options.train, *options.eval]
    for name, count in collections.Counter(wanted).items():
        if count > 1:
            parser.error(f"{name} is asked for twice")
        known = TRAINING if name in options.train else EVALUATION
        if name not in known and name not in options.local:
            parser.error(f"unknown set {name}; choose from {', '.join(known)}, or give it data: --from {name}=PATH")
    unused = options.local.keys() - set(wanted)
    if unused:
        parser.error(f"--from names {', '.join(sorted(unused))}, which neither --train nor --eval asks for")
    if not options.train and not options.eval:
        parser.error("nothing to prepare: --train and --eval are both empty")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    try:
        prepare(options)
    except PrepareError as error:
        sys.exit(f"prepare: {error}")


if __name__ == "__main__":
    main()
