"""The filter that keeps the instances that a model solves now and then."""

import json
import subprocess
import sys

import pandas
import pytest

from dmpo.tasks.np_bench import TASKS, Reference, content_hash, filter, make
from dmpo.tasks.np_bench.reward import ground_truth

TASK = TASKS["tsp"]
SEEDS = range(5)
VALID = (0, 1, 2, 4, 3)
"""Valid responses of four to each instance; the last has no rollouts in `dump`."""


def instances():
    return [TASK.make("easy" if seed < 3 else "medium", seed) for seed in SEEDS]


RATIO = 0.5
"""Of the valid responses; tours are to be short."""


def truth(instance) -> str:
    value = TASK.verify(instance, TASK.trivial(instance)).value
    return ground_truth("tsp", instance, Reference(round(value * RATIO), [], "feasible", "by hand"))


@pytest.fixture
def data(tmp_path):
    rows = [
        {
            "reward_model": {"style": "rule", "ground_truth": truth(instance)},
            "extra_info": {"id": content_hash(instance), "task": "tsp", "level": "easy" if seed < 3 else "medium"},
            "images": [{"bytes": bytes([seed])}],
        }
        for seed, instance in enumerate(instances())
    ]
    make.write_parquet(tmp_path / "data.parquet", rows)
    return tmp_path / "data.parquet"


@pytest.fixture
def dump(tmp_path):
    """As verl writes it, in a folder, over two steps."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    for step in range(2):
        with (folder / f"{step}.jsonl").open("w") as file:
            for instance, valid in zip(instances()[:-1], VALID, strict=False):
                for sample in (2 * step, 2 * step + 1):
                    answer = TASK.trivial(instance) if sample < valid else [0]
                    line = {"input": "?", "output": f"Answer: {answer}", "gts": truth(instance), "score": 0.7}
                    file.write(json.dumps(line | {"step": step}) + "\n")
    return folder


def kept(path) -> list[int]:
    return [row[0]["bytes"][0] for row in pandas.read_parquet(path).images]


def run(data, dump, *extra: str) -> list[int]:
    out = data.with_name("out.parquet")
    filter.main([str(data), "--rollouts", str(dump), "--out", str(out), *extra])
    return kept(out)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ((), [1, 2]),
        (("--min", "0.25", "--max", "0.25"), [1]),  # the ends belong to it
        (("--min", "0", "--max", "1"), [0, 1, 2, 3]),
        (("--min", "0.9", "--max", "1"), [3]),
        (("--keep-unseen",), [1, 2, 4]),
        (("--ratio", "--min", "0.2", "--max", "0.3"), [2]),
        (("--ratio", "--min", "0.4", "--max", "1"), [3]),
    ],
)
def test_instances_whose_rate_lies_within_stay(data, dump, extra, expected):
    assert run(data, dump, *extra) == expected


def test_a_ratio_above_1_counts_as_1(data, dump, monkeypatch):
    """Where a response beats a reference that is not optimal."""
    monkeypatch.setitem(globals(), "RATIO", 2)
    for file in dump.iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line, instance in zip(lines, (i for i in instances()[:-1] for _ in range(2)), strict=True):
            line["gts"] = truth(instance)
        file.write_text("\n".join(map(json.dumps, lines)))
    assert run(data, dump, "--ratio", "--min", "0.5", "--max", "0.5") == [2]


def test_rows_stay_as_they_are_and_the_table_counts_them(data, dump, capsys):
    run(data, dump, "--keep-unseen")
    before, after = (pandas.read_parquet(path) for path in (data, data.with_name("out.parquet")))
    assert list(after.columns) == list(before.columns)
    assert after.reward_model.tolist() == before.reward_model[[1, 2, 4]].tolist()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["tsp", "easy", "3", "3", "2", "67"] in lines and ["tsp", "medium", "2", "1", "1", "50"] in lines
    assert ["all", "5", "4", "3", "60"] in lines
    assert ["1", "instances", "without", "rollouts", "kept"] in lines


def test_several_files_add_up_and_others_responses_do_not_matter(data, dump, tmp_path):
    other = TASK.make("easy", "other")
    (tmp_path / "other.jsonl").write_text(json.dumps({"response": "Answer: [0]", "ground_truth": truth(other)}) + "\n")
    out = tmp_path / "out.parquet"
    files = [str(dump / "0.jsonl"), str(dump / "1.jsonl"), str(tmp_path / "other.jsonl")]
    filter.main([str(data), "--rollouts", *files, "--out", str(out)])
    assert kept(out) == [1, 2]


def test_data_of_more_than_one_row_group_and_in_place(tmp_path):
    instance = TASK.make("easy", 0)
    row = {"extra_info": {"id": content_hash(instance), "task": "tsp", "level": "easy"}}
    data = tmp_path / "data.parquet"
    make.write_parquet(data, [row | {"number": number} for number in range(2 * filter.ROW_GROUP + 3)])
    lines = [{"output": f"Answer: {answer}", "gts": truth(instance)} for answer in (TASK.trivial(instance), [0])]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
    filter.main([str(data), "--rollouts", str(tmp_path / "r.jsonl"), "--out", str(data)])
    assert pandas.read_parquet(data).number.tolist() == list(range(2 * filter.ROW_GROUP + 3))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "bad.jsonl: line 2: JSONDecodeError"),
        ('{"output": "x"}', "bad.jsonl: line 2 needs a response"),
        ('{"output": "x", "gts": "{}"}', "bad.jsonl: line 2: KeyError: 'task'"),
        (
            json.dumps({"output": "x", "gts": json.dumps(dict.fromkeys(("instance", "reference", "trivial", "task")))}),
            "bad.jsonl: line 2: there is no task None",
        ),
    ],
)
def test_a_line_that_is_no_response_is_named_and_nothing_is_written(data, tmp_path, line, message):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f"\n{line}\n")
    with pytest.raises(SystemExit, match="filter: ") as error:
        run(data, bad)
    assert message in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"data.parquet", "bad.jsonl"}


def test_what_cannot_be_filtered_is_named(data, dump, tmp_path):
    (tmp_path / "empty").mkdir()
    make.write_parquet(tmp_path / "foreign.parquet", [{"prompt": "?"}])
    (tmp_path / "text.parquet").write_text("no parquet file, whatever its name says")
    for arguments, message in (
        ((tmp_path / "none.parquet", dump), "none.parquet"),
        ((tmp_path / "text.parquet", dump), "text.parquet"),
        ((tmp_path / "foreign.parquet", dump), "foreign.parquet: needs the columns"),
        ((data, tmp_path / "empty"), "empty: there is no file *.jsonl"),
        ((data, dump, "--min", "0.6", "--max", "0.7"), "none of 5 instances, 4 of them with rollouts, lies within"),
    ):
        with pytest.raises(SystemExit) as error:
            run(*arguments)
        assert message in str(error.value)
    assert not list(tmp_path.glob(".*")) and not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--min", "2"], "expected a number from 0 to 1, got '2'"),
        (["--max", "half"], "expected a number from 0 to 1, got 'half'"),
        (["--min", "0.9", "--max", "0.1"], "--min must not be above --max, got 0.9 and 0.1"),
    ],
)
def test_bad_arguments_are_named(extra, message, capsys):
    with pytest.raises(SystemExit):
        filter.parse_arguments(["data", "--rollouts", "dump", "--out", "out", *extra])
    assert message in capsys.readouterr().err


def test_the_command_runs(data, dump):
    command = [sys.executable, "-W", "ignore", "-m", "dmpo.tasks.np_bench.filter", str(data), "--rollouts", str(dump)]
    out = data.with_name("out.parquet")
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert str(out) in done.stdout and kept(out) == [1, 2]
