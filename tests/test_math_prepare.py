"""Each source's real column layout, as public code that reads it states it (docs/math.md names the sources)."""

import json

import datasets
import pytest

from dmpo.tasks.math import prepare, word_problems
from dmpo.tasks.math.prepare import main, normalised
from dmpo.tasks.math.sources import EVALUATION, OWN, TRAINING, MissingField, answer_text

WRAPPED = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def openr1(question, answer):
    return {
        "data_source": "olympiads",
        "prompt": [{"content": "Your task is to follow", "role": "system"}, {"content": question, "role": "user"}],
        "target": [{"content": "<think>\n1+1 </think>\n 2", "role": "assistant"}],
        "ability": "",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": -1, "split": "default"},
    }


def dapo(question, answer, index="9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"):
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": WRAPPED.format(question), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


ROWS = {
    "openr1": openr1("What is $1+1$?", "2"),
    "dapo": dapo("What is $1+1$?", "2"),
    "aime24": {"id": 60, "problem": "Find N.", "solution": "...", "answer": "025", "url": "u", "year": "2024"},
    "aime25": {"problem": "Find N.", "answer": "70", "id": "0"},
    "amc": {"id": 0, "problem": "Find N.", "answer": 142.0, "url": "https://artofproblemsolving.com/p1"},
    "math500": {
        "problem": "Convert the point.",
        "solution": "...",
        "answer": r"\left( 3, \frac{\pi}{2} \right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/807.json",
    },
    "minerva": {"question": "How far?", "answer": "4.5e33"},
    "olympiadbench": {
        "id": 1709,
        "question": "Find all triples.",
        "solution": ["..."],
        "final_answer": ["$(1,8,19), (2,7,13), (4,5,7)$"],
        "context": None,
        "image_1": None,
        "modality": "Text-only",
        "difficulty": "Competition",
        "is_multiple_answer": True,
        "unit": None,
        "answer_type": "Tuple",
        "error": None,
        "question_type": "Open-ended",
        "subfield": "Number Theory",
        "subject": "Math",
        "language": "English",
    },
}
READ = {
    "openr1": ("What is $1+1$?", "2", "-1"),
    "dapo": ("What is $1+1$?", "2", "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"),
    "aime24": ("Find N.", "25", "60"),
    "aime25": ("Find N.", "70", "0"),
    "amc": ("Find N.", "142", "https://artofproblemsolving.com/p1"),
    "math500": ("Convert the point.", r"\left( 3, \frac{\pi}{2} \right)", "test/precalculus/807.json"),
    "minerva": ("How far?", "4.5e33", ""),
    "olympiadbench": ("Find all triples.", "(1,8,19), (2,7,13), (4,5,7)", "1709"),
}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path, rows):
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


def rows_of(path):
    return datasets.Dataset.from_parquet(str(path), keep_in_memory=True).to_list()


@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_every_source_is_read_in_its_own_layout(name):
    read = (TRAINING | EVALUATION)[name].read(ROWS[name])
    assert (read.text, read.answer, read.source_id) == READ[name]


def test_the_processed_form_of_dapo_is_read_as_well():
    row = {
        "prompt": "What is 1+1?",
        "solution": "2",
        "data_source": "math_dapo",
        "source_prompt": [],
        "ability": "Math",
    }
    row |= {"reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {"index": "a"}}
    assert TRAINING["dapo"].read(row).text == "What is 1+1?"


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1+1?", "answer": 2},
        {"problem": "1+1?", "answer": "2.0"},
        {"problem": "1+1?", "solution": "2"},
        {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}},
    ],
)
def test_data_of_ones_own_has_usual_names_or_verls_schema(row):
    read = OWN.read(row)
    assert (read.text, read.answer) == ("1+1?", "2")


@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_a_missing_field_is_named_with_what_there_is(name):
    with pytest.raises(MissingField, match="no field .*; the row has text, label"):
        (TRAINING | EVALUATION)[name].read({"text": "x", "label": 1})


@pytest.mark.parametrize(
    ("value", "text"),
    [("025", "25"), (142.0, "142"), (-4.0, "-4"), ("0", "0"), ("0.50", "0.50"), (r"$\frac12$", r"\frac12")]
    + [(["$1$", "$2$"], "1, 2"), (r"336^\circ", r"336^\circ"), (r"\$5", r"\$5"), ("1,234", "1,234")],
)
def test_answers_become_text(value, text):
    assert answer_text(value) == text


def test_questions_are_the_same_whatever_they_look_like():
    same = ["What is $\\frac{1}{2} + 1$?", "what is  \\dfrac{1}{2}+1", "What is \\frac{1}{2} + 1 ?"]
    assert len({normalised(text) for text in same}) == 1
    different = ["What is 1+2?", "What is 1-2?", "What is 12?", "What is 1*2?", "What is 1<2?"]
    assert len({normalised(text) for text in different}) == len(different)


def test_files_have_verls_schema_and_the_manifest_says_what_became_of_every_row(tmp_path, capsys):
    questions = [openr1(f"What is {n}+1?", str(n + 1)) for n in range(6)]
    train = [
        *questions,
        questions[0],  # repeated
        openr1("What is 1+1 ?", "3"),  # contradicts another
        openr1("Prove that 2 > 1.", ""),  # has no answer
        openr1("Find the N of the evaluation set.", "7"),
    ]
    extra = [dapo("What is 5+1?", "6"), dapo("What is 50+1?", "51"), dapo("What is 50+1?", "51")]
    evaluation = [ROWS["aime25"] | {"problem": "Find the N of the EVALUATION set"}]
    out = tmp_path / "out"
    main(
        ["--out", str(out), "--train", "openr1", "dapo", "--eval", "aime25"]
        + ["--from", f"openr1={parquet(tmp_path / 'a.parquet', train)}"]
        + ["--from", f"dapo={jsonl(tmp_path / 'b.jsonl', extra)}"]
        + ["--from", f"aime25={jsonl(tmp_path / 'c.jsonl', evaluation)}"]
    )
    rows = rows_of(out / "train.parquet")
    asked = {row["prompt"][1]["content"]: row["reward_model"]["ground_truth"] for row in rows}
    assert asked == {f"What is {n}+1?": str(n + 1) for n in (0, 2, 3, 4, 5, 50)}
    assert {row["data_source"] for row in rows} == {"openr1", "dapo"}
    (row,) = rows_of(out / "validation.parquet")
    assert row == {
        "data_source": "aime25",
        "prompt": [
            {"role": "system", "content": r"Please reason step by step, and put your final answer within \boxed{}."},
            {"role": "user", "content": "Find the N of the EVALUATION set"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "70"},
        "extra_info": {"id": row["extra_info"]["id"], "index": 0, "split": "test", "source_id": "0"},
    }
    manifest = json.loads((out / "manifest.json").read_text())
    counts = {name: value for name, value in manifest["sources"]["openr1"].items() if name != "from"}
    assert counts == {
        "read": 10,
        "repeated": 2,
        "contradicting": 1,
        "unanswered": 1,
        "evaluated": 1,
        "too_long": 0,
        "kept": 5,
    }
    assert manifest["sources"]["dapo"]["repeated"] == 2
    assert manifest["files"]["train.parquet"]["rows"] == 6
    assert "in evaluation" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "train.parquet", "validation.parquet"]


def small(tmp_path, *arguments, count=20, out="out"):
    data = jsonl(tmp_path / "own.jsonl", [{"question": f"{n}+1?", "answer": n + 1} for n in range(count)])
    main(["--out", str(tmp_path / out), "--train", "own", "--eval", "--from", f"own={data}", *arguments])
    return rows_of(tmp_path / out / "train.parquet")


def test_the_seed_decides_sample_and_order_and_ids_stay(tmp_path):
    everything = small(tmp_path)
    assert len(everything) == 20
    first = small(tmp_path, "--samples", "5", "--seed", "1")
    assert small(tmp_path, "--samples", "5", "--seed", "1", out="again") == first
    other = small(tmp_path, "--samples", "5", "--seed", "2", out="other")
    assert len(first) == 5
    assert other != first
    ids = {row["prompt"][-1]["content"]: row["extra_info"]["id"] for row in everything}
    assert len(set(ids.values())) == 20
    assert all(row["extra_info"]["id"] == ids[row["prompt"][-1]["content"]] for row in first + other)


def test_long_prompts_are_left_out_by_a_tokenizer(tmp_path):
    from dmpo.cpu.toy_model import build_tokenizer

    build_tokenizer().save_pretrained(tmp_path / "tokenizer")  # one token a byte
    data = jsonl(tmp_path / "own.jsonl", [{"question": "x" * n, "answer": 1} for n in (10, 100)])
    arguments = ["--train", "own", "--eval", "--from", f"own={data}", "--tokenizer", str(tmp_path / "tokenizer")]
    main(["--out", str(tmp_path / "out"), *arguments, "--max-prompt-tokens", "150"])
    assert [row["prompt"][-1]["content"] for row in rows_of(tmp_path / "out" / "train.parquet")] == ["x" * 10]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["sources"]["own"]["too_long"] == 1


def test_the_answer_template_asks_for_the_papers_format(tmp_path):
    (row, *_) = small(tmp_path, "--template", "answer")
    assert [message["role"] for message in row["prompt"]] == ["user"]
    assert row["prompt"][0]["content"].endswith("\nAnswer: [solution]")


def test_without_a_hub_the_error_says_how_to_use_a_file(tmp_path):
    with pytest.raises(SystemExit) as error:
        main(["--out", str(tmp_path / "out"), "--train", "--eval", "aime25"])
    message = str(error.value)
    assert "aime25: math-ai/aime25 cannot be loaded" in message
    assert "--from aime25=PATH" in message
    assert "hf download --repo-type dataset math-ai/aime25" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "1+1?"}\n', "row 0 .* is not in the layout of math-ai/aime25: no field problem; the row has text"),
        ('{"problem": "1+1?", "answer": ""}\n', "no question with an answer"),
        ("nonsense\n", "cannot be read"),
        ("", "cannot be read|no question"),
    ],
)
def test_a_bad_file_stops_before_anything_is_written(tmp_path, content, message):
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(SystemExit, match=message):
        main(["--out", str(tmp_path / "out"), "--train", "--eval", "aime25", "--from", f"aime25={file}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["missing.jsonl", "a.csv", "empty"])
def test_a_file_of_another_kind_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(SystemExit, match="--from aime25="):
        main(["--out", str(tmp_path / "out"), "--train", "--eval", "aime25", "--from", f"aime25={tmp_path / name}"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train", "own"], "unknown set own; choose from openr1, dapo"),
        (["--train", "aime24"], "aime24 is asked for twice"),
        (["--from", "aime24"], "expected NAME=PATH"),
        (["--from", "x=y"], "which neither --train nor --eval asks for"),
        (["--from", "aime24=a", "--from", "aime24=b"], "twice"),
        (["--train", "--eval"], "nothing to prepare"),
        (["--samples", "0"], "whole number from 1 on"),
        (["--max-prompt-tokens", "many"], "whole number from 1 on"),
        (["--template", "other"], "invalid choice"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        prepare.parse_arguments(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    small(tmp_path)
    before = (tmp_path / "out" / "train.parquet").read_bytes()

    def fail(self, path):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(datasets.Dataset, "to_parquet", fail)
    with pytest.raises(OSError, match="disk full"):
        small(tmp_path, count=5)
    assert (tmp_path / "out" / "train.parquet").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "train.parquet"]


def test_word_problems_are_right_and_split_without_overlap(tmp_path):
    from dmpo.tasks.math.reward import compute_score

    made = word_problems.problems()
    assert len(made) == len({problem.question for problem in made}) == len({problem.id for problem in made})
    assert all(compute_score("", problem.solution(), problem.answer)["score"] == 1.1 for problem in made)
    word_problems.write(tmp_path, validation=32)
    read = [
        [json.loads(line)["id"] for line in (tmp_path / f"{name}.jsonl").open()] for name in ("train", "validation")
    ]
    assert len(read[1]) == 32
    assert sorted(read[0] + read[1]) == sorted(problem.id for problem in made)
    with pytest.raises(ValueError, match="validation must be from 1"):
        word_problems.write(tmp_path, validation=10_000)
