"""The public file NP_Bench.json: read, judged strictly, and kept apart from np-bench-v1."""

import json

import pandas
import pytest

from dmpo.tasks.np_bench import evaluate, legacy

TRIANGLE = {"0": ["1", "2"], "1": [0, 2], "2": [0, 1], "3": []}
MEETINGS = {
    "meetings": {
        "0": {"attendees": [0, 1], "duration": 60},
        "1": {"attendees": [1], "duration": 30},
        "2": {"attendees": [0, 1, 2], "duration": 30},
    },
    "attendee_availability": {"0": [[540, 720]], "1": [[540, 600], [780, 840]], "2": [[540, 840]]},
    "rooms": {"0": 2, "1": 2},
}
# Of each type: a question, its reference, and answers with what they are worth; None: not valid.
CASES = {
    "TSP": (
        {"0": {"1": 2, "2": 3}, "1": {"0": 2, "2": 5}, "2": {"0": 3, "1": 5}},
        10,
        {"[0, 1, 2, 0]": 1, "0 -> 1 -> 2": 1, "[0, 1, 0]": None, "[0, 1, 1, 0]": None},
    ),
    "hamiltonian-cycle": (TRIANGLE, 4, {"[0, 1, 2, 0]": 3 / 4, "[0, 1, 3, 0]": None, "[0, 1, 0, 1, 2, 0]": None}),
    "GCP-D": (TRIANGLE, 3, {"[1, 2, 3, 1]": 1, "[1, 2, 3, 4]": 3 / 4, "[1, 1, 2, 3]": None}),
    "maximum_clique_problem": (TRIANGLE, 4, {"[0, 1, 2]": 3 / 4, "[0, 0, 1, 2]": None, "[0, 3]": None}),
    "maximum-set": ({"0": {"1": 1}, "1": {"0": 1}, "2": {}}, 1, {"[0, 2]": 2, "[0, 1]": None, "[0, 0, 0]": None}),
    "minimum-cut": (
        {"0": {"1": 3, "2": 1}, "1": {"0": 3, "3": 2}, "2": {"0": 1, "3": 0}, "3": {"1": 2, "2": 0}},
        3,
        {
            "[[0, 1], [2, 3]]": 1,
            "[0, 1]": 1,
            "[[0, 3], [1, 2]]": 1 / 2,
            "[[0], [1, 2, 3]]": None,
            "[[0, 1], [2]]": None,
        },
    ),
    "knapsack": (
        {"capacity": 5, "items": {"0": {"weight": 3, "value": 4}, "1": {"weight": 4, "value": 2}}},
        8,
        {"[0]": 1 / 2, "[0, 1]": None, "[0, 0]": None},
    ),
    "subset-sum": ({"target": 4, "numbers": {"0": 2, "1": 2, "2": 4}}, 2, {"[0, 1]": 1, "[2]": 1 / 2, "[0, 0]": None}),
    "set-cover": (
        {"U": [3, 5, 7], "S": {"0": [3, 5], "1": [7], "2": [3, 5, 7]}},
        1,
        {"[2]": 1, "{0, 1}": 1 / 2, "[0]": None, "[9]": None},
    ),
    "meeting-schedule": (
        MEETINGS,
        6,
        {
            "[(0, 0, 540), (1, 1, 780)]": 3 / 6,
            "(1, 0, 540)": 1 / 6,
            "[(0, 0, 540), (1, 1, 540)]": None,  # person 1 twice
            "[(1, 0, 540), (1, 1, 780)]": None,  # one meeting twice
            "[(2, 0, 540)]": None,  # three people, two seats
            "[(0, 0, 600)]": None,  # person 1 is not free
            "[(0, 5, 540)]": None,
        },
    ),
}


def entries() -> dict:
    return {
        f"{name}_bench_question1": {
            "prompt": f"{name}?",
            "question": question,
            "task_type": name,
            "ground_truth": reference,
        }
        for name, (question, reference, _) in CASES.items()
    }


def test_all_task_types_have_a_case():
    assert set(CASES) == set(legacy.TASK_TYPES)


@pytest.mark.parametrize(
    ("name", "answer", "ratio"),
    [(name, answer, ratio) for name, (_, _, answers) in CASES.items() for answer, ratio in answers.items()],
)
def test_answers_are_judged_against_the_files_reference(name, answer, ratio):
    question, reference, _ = CASES[name]
    truth = legacy.ground_truth(legacy.Problem("key", name, "bench", "?", question, reference))
    score = legacy.compute_score("", f"So it is.\nAnswer: {answer}", truth)
    assert score["legacy_valid"] == (ratio is not None), score["reason"]
    assert score["score"] == score["legacy_ratio"] == pytest.approx(ratio or 0)
    assert bool(score["reason"]) == (ratio is None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("response", [None, "", "Answer: []", "Answer: [[[0]]]", "Answer: [[0], 1, [[2, 3]]]", "no"])
def test_no_response_raises(name, response):
    question, reference, _ = CASES[name]
    truth = legacy.ground_truth(legacy.Problem("key", name, "bench", "?", question, reference))
    score = legacy.compute_score("", response, truth)
    assert {type(value) for value in score.values()} == {float, str}


def test_the_command_makes_rows_that_evaluate_does_not_take_for_its_own(tmp_path, capsys):
    file, out = tmp_path / "NP_Bench.json", tmp_path / "legacy.parquet"
    easy = {"easy_question1": entries()["TSP_bench_question1"]}
    file.write_text(json.dumps(entries() | easy))
    legacy.main([str(file), "--out", str(out)])
    assert "not comparable" in capsys.readouterr().out
    rows = pandas.read_parquet(out).to_dict("records")
    assert len(rows) == len(CASES)
    assert {row["data_source"] for row in rows} == {f"np_bench_legacy/{name}" for name in CASES}
    for row in rows:
        name = row["data_source"].split("/")[1]
        best = next(iter(CASES[name][2]))
        truth = row["reward_model"]["ground_truth"]
        assert row["prompt"][0]["content"] == f"{name}?"
        assert legacy.compute_score("", f"Answer: {best}", truth)["legacy_valid"] == 1
        with pytest.raises(evaluate.Malformed):
            list(evaluate.read([json.dumps({"output": "x", "gts": truth})]))


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("question1", {}, "entry 'question1': none of easy, medium, hard, bench is in its key"),
        ("bench_1", {"task_type": "chess"}, "entry 'bench_1': ValueError: task_type must be one of TSP,"),
        ("bench_1", {"ground_truth": "7"}, "ground_truth must be a number, got '7'"),
        ("bench_1", {"question": {"1": {}}}, "expected the numbers 0 to 0 as keys"),
        ("bench_1", {"question": {"0": {}, "1": {}}}, "entry 'bench_1': KeyError: '1'"),
        ("bench_1", {"question": 7}, "entry 'bench_1': AttributeError"),
    ],
)
def test_an_entry_that_is_none_is_named(tmp_path, key, change, message):
    file = tmp_path / "NP_Bench.json"
    file.write_text(json.dumps({key: entries()["TSP_bench_question1"] | change}))
    with pytest.raises(SystemExit, match="legacy: .*NP_Bench.json") as error:
        legacy.main([str(file), "--out", str(tmp_path / "out.parquet")])
    assert message in str(error.value) and not (tmp_path / "out.parquet").exists()
