"""Reward, data and evaluation of the NP-hard tasks."""

import itertools
import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pandas
import pytest
from PIL import Image

from dmpo.tasks.np_bench import TASKS, Reference, content_hash, evaluate, make
from dmpo.tasks.np_bench.reward import compute_score, ground_truth

TSP = TASKS["tsp"]
SQUARE = {"places": [[0, 0], [0, 10], [10, 10], [10, 0]], "distances": [[10, 14, 10], [10, 14], [10], []]}
TRUTH = ground_truth("tsp", SQUARE, Reference(40, [0, 1, 2, 3], "optimal", "by hand", 40.0))
CROSSED = ground_truth(
    "tsp",
    {"places": [[0, 0], [10, 10], [0, 10], [10, 0]], "distances": [[14, 10, 10], [10, 10], [14], []]},
    Reference(40, [0, 2, 1, 3], "optimal", "by hand", 40.0),
)


def test_a_right_answer_has_the_ratio_and_the_format():
    score = compute_score("np_bench/tsp", "So it is.\nAnswer: [0, 1, 2, 3]", TRUTH)
    assert score["score"] == pytest.approx(1.1) and score["ratio"] == 1 and score["acc"] == score["valid"] == 1
    assert score["value"] == 40 and score["reason"] == "" and len(score["answer"]) == 16


def test_a_worse_answer_has_less_and_equal_solutions_have_one_name():
    worse = compute_score("", "Answer: 0, 2, 1, 3", TRUTH)
    assert worse["ratio"] == pytest.approx(40 / 48) and worse["score"] == pytest.approx(0.1 + 40 / 48)
    best, turned = (compute_score("", f"Answer: {tour}", TRUTH)["answer"] for tour in ([0, 1, 2, 3], [2, 1, 0, 3]))
    assert best == turned != worse["answer"]


@pytest.mark.parametrize(
    ("response", "has_format", "reason"),
    [
        ("Answer: [0, 0, 1, 2]", 1, "city 0 is named more than once"),
        ("Answer: [0, 1, 2, 4]", 1, "there is no city 4"),
        ("I do not know.", 0, "neither"),
        (None, 0, "not text"),
        ("Answer: " + "[" * 10_000, 0, "nested"),
    ],
)
def test_what_is_not_valid_has_the_format_at_most(response, has_format, reason):
    score = compute_score("", response, TRUTH)
    assert score["score"] == pytest.approx(0.1 * has_format) and score["valid"] == score["ratio"] == 0
    assert reason in score["reason"] and score["answer"] == ""


def test_every_response_has_the_same_fields_of_the_same_types():
    """verl stacks them over a batch."""
    kinds = [
        {name: type(value) for name, value in compute_score("", response, TRUTH).items()}
        for response in ("Answer: [0, 1, 2, 3]", "Answer: [0]", "", None)
    ]
    assert all(kind == kinds[0] for kind in kinds)


def test_above_trivial_takes_off_what_needs_no_thought():
    """The crossed square: going round by number is 48 long, the optimum 40."""
    trivial, better = "Answer: [0, 1, 2, 3]", "Answer: [0, 2, 1, 3]"
    assert compute_score("", trivial, CROSSED, above_trivial=True)["score"] == pytest.approx(0.1)
    assert compute_score("", better, CROSSED, above_trivial=True, format_reward=0)["score"] == pytest.approx(1)
    assert compute_score("", trivial, CROSSED)["ratio"] == pytest.approx(40 / 48)
    # Where the trivial answer is optimal only an optimal one has a reward.
    assert compute_score("", "Answer: [0, 2, 1, 3]", TRUTH, above_trivial=True)["above_trivial"] == 0
    assert compute_score("", "Answer: [0, 1, 2, 3]", TRUTH, above_trivial=True)["above_trivial"] == 1


def test_a_reference_that_is_beaten_shows_in_the_ratio_and_not_in_the_score():
    beaten = ground_truth("tsp", SQUARE, Reference(48, [0, 2, 1, 3], "feasible", "by hand", None))
    score = compute_score("", "Answer: [0, 1, 2, 3]", beaten)
    assert score["ratio"] == pytest.approx(1.2) and score["score"] == pytest.approx(1.1)


# --- data ------------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict]:
    return pandas.read_parquet(path).to_dict("records")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("np")
    make.main(arguments(folder, train=6))
    return folder


def arguments(folder: Path, train: int, **more: str) -> list[str]:
    extra = list(itertools.chain(*((f"--{name}", value) for name, value in more.items())))
    return [
        *("--out", str(folder), "--tasks", "tsp", "knapsack", "--train", str(train), "--validation", "2"),
        *("--workers", "2", *extra),
    ]


def test_rows_are_in_verls_schema_and_judge_their_own_reference(folder):
    rows = read(folder / "train.parquet")
    assert len(rows) == 12 and {row["data_source"] for row in rows} == {"np_bench/tsp", "np_bench/knapsack"}
    references = {
        line["hash"]: line for line in map(json.loads, (folder / "references.jsonl").read_text().splitlines())
    }
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        info = row["extra_info"]
        instance = TASKS[info["task"]].make(info["level"], info["seed"])
        assert content_hash(instance) == info["id"] and json.loads(truth)["instance"] == instance
        (message,) = row["prompt"]
        assert message["role"] == "user" and message["content"] == TASKS[info["task"]].prompt(instance)
        solution = references[info["id"]]["solution"]
        assert compute_score("", f"Answer: {solution}", truth)["ratio"] == 1
    assert {row["extra_info"]["level"] for row in rows} == {"easy", "medium"}


def test_no_instance_is_in_two_places(folder):
    ids = [row["extra_info"]["id"] for name in ("train", "validation") for row in read(folder / f"{name}.parquet")]
    assert len(set(ids)) == len(ids) == 16


def test_a_second_run_solves_only_what_is_new(folder, tmp_path, monkeypatch):
    solved = (folder / "references.jsonl").read_text()
    copy = tmp_path / "copy"
    copy.mkdir()
    # As a run leaves it that was killed while writing: the last line is cut.
    (copy / "references.jsonl").write_text(solved[:-20])
    make.main(arguments(copy, train=6))
    lines = list(make._lines(copy / "references.jsonl"))
    assert len({line["hash"] for line in lines}) == len(lines) == 16
    assert read(copy / "train.parquet") == read(folder / "train.parquet")
    monkeypatch.setattr(make, "_solve", lambda *args: pytest.fail("solved again"))
    make.main(arguments(copy, train=6))


def test_the_manifest_says_what_was_made(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"]["train.parquet"]["rows"] == 12 and manifest["versions"]["ortools"]
    assert manifest["tasks"] == ["tsp", "knapsack"] and manifest["seed"] == 0


def test_np_bench_v1_is_what_the_repository_says():
    expected = json.loads((resources.files("dmpo.tasks.np_bench") / make.HASHES).read_text())
    assert set(expected) == set(TASKS)
    items = make.bench_items(list(TASKS))
    assert len({item.hash for item in items}) == len(TASKS) * make.BENCH_SIZE
    for task in TASKS:
        assert make.set_hash([item for item in items if item.task == task]) == expected[task], task


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--tasks", "chess"], "invalid choice: 'chess'"),
        (["--train", "0", "--validation", "0"], "nothing to make"),
        (["--bench", "101"], "np-bench-v1 has 100 instances a task, got 101"),
        (["--train", "-1"], "expected a whole number, got '-1'"),
        (["--time-limit", "0"], "must be above 0"),
    ],
)
def test_bad_arguments_are_named(extra, message, capsys):
    with pytest.raises(SystemExit):
        make.parse_arguments(extra)
    assert message in capsys.readouterr().err


# --- evaluation ------------------------------------------------------------------------------------------------------


def samples(*tours: list[int], truth: str = TRUTH) -> list[tuple[str, str, str]]:
    return [("tsp", truth, f"Answer: {tour}") for tour in tours]


def test_figures_are_means_over_all_draws():
    tours = [[0, 1, 2, 3], [0, 2, 1, 3], [0, 0], [2, 1, 0, 3]]
    ratios = [1, 40 / 48, 0, 1]
    figures = evaluate.evaluate(samples(*tours))["tsp"]
    for k in (1, 2, 4):
        draws = list(itertools.combinations(range(4), k))
        assert figures[f"QR@{k}"] == pytest.approx(np.mean([max(ratios[i] for i in draw) for draw in draws]))
        assert figures[f"SR@{k}"] == pytest.approx(np.mean([any(ratios[i] for i in draw) for draw in draws]))
    assert figures["distinct@4"] == 2 and figures["instances"] == 1 and figures["samples"] == 4


def test_the_overall_figure_is_the_mean_over_categories():
    task = TASKS["knapsack"]
    instance = task.make("easy", 0)
    truth = ground_truth("knapsack", instance, task.solve(instance, 10))
    result = evaluate.evaluate(
        [*samples([0, 1, 2, 3]), *samples([0, 2, 1, 3], truth=CROSSED), ("knapsack", truth, "no")]
    )
    assert result["tsp"]["instances"] == 2 and result["[planning]"] == result["tsp"]
    assert result["overall"]["QR@1"] == pytest.approx((result["tsp"]["QR@1"] + 0) / 2)
    assert list(result) == ["tsp", "knapsack", "[planning]", "[selection]", "overall"]


def test_the_command_writes_a_table_json_and_a_picture(tmp_path):
    file = tmp_path / "responses.jsonl"
    with file.open("w") as lines:
        for (_, truth, response), names in zip(
            samples([0, 1, 2, 3], [0, 2, 1, 3]), [("gts", "output"), ("ground_truth", "response")], strict=True
        ):
            lines.write(json.dumps({names[0]: truth, names[1]: response}) + "\n")
    command = [sys.executable, "-W", "ignore", "-m", "dmpo.tasks.np_bench.evaluate", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "SR@1" in run.stdout and "overall" in run.stdout
    assert json.loads((tmp_path / "responses.json").read_text())["tsp"]["SR@1"] == 1
    with Image.open(tmp_path / "responses.png") as picture:
        assert picture.width > 800


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: JSONDecodeError"),
        ('{"output": "x"}', "line 1 needs a response (output or response) and a ground truth (gts or ground_truth)"),
        ('{"output": "x", "gts": "7"}', "line 1: TypeError"),
        ("", "there is no response"),
    ],
)
def test_a_line_that_is_no_response_is_named(tmp_path, line, message):
    (tmp_path / "r.jsonl").write_text(line + "\n")
    with pytest.raises(SystemExit, match="evaluate: ") as error:
        evaluate.main([str(tmp_path / "r.jsonl")])
    assert message in str(error.value)
