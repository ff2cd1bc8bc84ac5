import json
import math
import os
import subprocess
import sys
import time

import matplotlib.image
import pytest

from dmpo.config import MODES
from dmpo.cpu import arguments, quickstart, toy_report, toy_task, training_run


def write_dump(file, responses_of, rows=slice(None)):
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"gts": str(number), "output": response, "score": 0.0})
        for number in toy_task.NUMBERS
        for response in responses_of(number)
    ]
    file.write_text("\n".join(lines[rows]) + "\n")


def test_validation_counts_right_samples_and_distinct_right_answers(tmp_path):
    write_dump(tmp_path / "0.jsonl", lambda number: [toy_task.answers(number)[0]] * 3 + ["nonsense"])
    accuracy, coverage = toy_report.read_validation(tmp_path / "0.jsonl", samples=4)
    assert accuracy == 0.75
    shares = [1 / len(toy_task.answers(number)) for number in toy_task.NUMBERS]
    assert coverage == pytest.approx(sum(shares) / len(shares))


def test_validation_that_is_missing_or_cut_short_does_not_count(tmp_path):
    assert toy_report.read_validation(tmp_path / "0.jsonl", samples=4) is None
    write_dump(tmp_path / "0.jsonl", lambda number: ["1+1"] * 4, rows=slice(-1))
    assert toy_report.read_validation(tmp_path / "0.jsonl", samples=4) is None
    write_dump(tmp_path / "0.jsonl", lambda number: ["1+1"] * 4)
    whole = (tmp_path / "0.jsonl").read_text()
    (tmp_path / "0.jsonl").write_text(whole[:-10])
    assert toy_report.read_validation(tmp_path / "0.jsonl", samples=4) is None


def test_curve_is_ordered_by_step(tmp_path):
    for step in (100, 20, 0):
        write_dump(tmp_path / f"{step}.jsonl", lambda number: ["1+1"])
    assert toy_report.read_curve(tmp_path, samples=1).steps == [0, 20, 100]


CURVES = {
    "GRPO": toy_report.Curve([0, 20, 40], [0.2, 0.6, 0.8], [0.9, 0.5, 0.3], 2.0, 300.0),
    "other": toy_report.Curve([0, 20, 40], [0.2, 0.4, 0.7], [0.9, 0.8, 0.6], 2.5, 330.0),
}


def test_coverage_at_equal_accuracy_is_interpolated():
    assert toy_report.coverage_at(CURVES["GRPO"], 0.7) == pytest.approx(0.4)
    assert toy_report.coverage_at(CURVES["GRPO"], 0.1) == 0.9
    assert toy_report.coverage_at(CURVES["GRPO"], 0.81) is None


def test_summary_says_what_was_seen_whoever_is_better():
    text = toy_report.summary(CURVES, "GRPO")
    assert "other is right in 70.0% of its samples and finds 60.0% of the right answers; GRPO: 80.0% and 30.0%" in text
    assert "Where both are right 70.0% of the time, other finds 60.0%, GRPO 40.0%" in text
    swapped = toy_report.summary({"GRPO": CURVES["other"], "other": CURVES["GRPO"]}, "GRPO")
    assert "Where both are right 70.0% of the time, other finds 40.0%, GRPO 60.0%" in swapped
    stuck = toy_report.Curve([0, 20], [0.2, 0.1], [0.9, 0.9])
    assert "no accuracy above the start in common" in toy_report.summary(
        {"GRPO": CURVES["GRPO"], "other": stuck}, "GRPO"
    )


def test_table_has_every_validation_of_every_run():
    short = toy_report.Curve([0], [0.2], [0.9], math.nan, 60.0)
    rows = [line.split() for line in toy_report.table(CURVES | {"short": short}).splitlines()]
    assert ["20", "0.600", "0.500", "0.400", "0.800", "-", "-"] in rows
    assert ["40", "0.800", "0.300", "0.700", "0.600", "-", "-"] in rows
    assert ["minutes", "5.0", "5.5", "1.0"] in rows


def test_picture_is_drawn(tmp_path):
    toy_report.plot(CURVES, tmp_path / "curves.png", samples=64)
    pixels = matplotlib.image.imread(tmp_path / "curves.png")
    assert pixels.std() > 0.01  # not a blank sheet


def test_modes_are_those_of_the_configuration():
    assert set(arguments.MODES) == set(MODES)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--mode", "ppo"], "invalid choice: 'ppo'"),
        (["--steps", "0"], "--steps: must be a whole number >= 1, got '0'"),
        (["--steps", "many"], "--steps: must be a whole number >= 1, got 'many'"),
        (["--seed", "-1"], "--seed: must be a whole number from 0 to 2147483647, got '-1'"),
        (["--output", __file__], "is not a folder"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_argument_ends_with_a_message(given, message, capsys):
    with pytest.raises(SystemExit) as ended:
        arguments.parse(given)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_same_mode_twice_is_one_run():
    assert arguments.parse(["--mode", "dmpo", "dmpo_js", "dmpo"]).mode == ["dmpo", "dmpo_js"]


def test_repeated_steps_of_a_resumed_run_count_once(tmp_path):
    (tmp_path / "metrics-0.jsonl").write_text(
        '{"step": 1, "data": {"a": 1}}\n{"step": 2, "data": {"a": 2}}\n{"step": 3, "data": {"a": 3}}\n{"step": 4, "da'
    )
    (tmp_path / "metrics-2.jsonl").write_text('{"step": 3, "data": {"a": 30}}\n')
    (tmp_path / "metrics-10.jsonl").write_text('{"step": 11, "data": {"a": 11}}\n')
    assert {step: data["a"] for step, data in training_run.metrics(tmp_path).items()} == {1: 1, 2: 2, 3: 30, 11: 11}


def options(folder, steps=40):
    return dict(
        option.split("=", 1) for option in quickstart.overrides("GRPO", folder / "start", folder / "run", steps, seed=0)
    )


def test_resumed_run_validates_at_its_checkpoint_only_if_that_is_missing(tmp_path):
    assert options(tmp_path)["trainer.val_before_train"] == "true"

    tracker = tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir(parents=True)
    tracker.write_text("20")
    assert options(tmp_path)["trainer.val_before_train"] == "true"
    write_dump(tmp_path / "run" / "validation" / "20.jsonl", lambda number: ["1+1"] * quickstart.SAMPLES)
    assert options(tmp_path)["trainer.val_before_train"] == "false"
    assert options(tmp_path)["trainer.val_only"] == "false"

    # stopped between the last checkpoint and the last validation: no step is left to train
    tracker.write_text("40")
    assert options(tmp_path)["trainer.val_before_train"] == "true"
    assert options(tmp_path)["trainer.val_only"] == "true"


def test_paths_reach_verl_whatever_characters_they_have():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    path = "/a b/it's, (c)=d"
    (parsed,) = OverridesParser.create().parse_overrides([f"key={training_run.quoted(path)}"])
    assert parsed.value() == path


def test_run_is_stopped_with_all_that_it_started(tmp_path):
    # A grandchild in a session of its own that ignores SIGTERM and has lost its parent, as bad as it gets.
    grandchild = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True).pid"
    )
    env = os.environ | {"DMPO_TRAINING_RUN": str(tmp_path)}
    subprocess.run([sys.executable, "-c", child], env=env, check=True)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        time.sleep(0.5)
        assert len(training_run._processes(tmp_path)) == 1
        training_run.stop(tmp_path, patience=0.5)
        assert not training_run._processes(tmp_path)
        assert bystander.poll() is None
    finally:
        bystander.kill()


def test_failure_shows_the_end_of_the_log(tmp_path, monkeypatch):
    # The real entry point, refused by its own checks: nothing is trained.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(
        training_run.TrainingFailed, match=r"no_such_field[\s\S]*exit code 1; all of its output: .*log\.txt"
    ):
        training_run.train(tmp_path, 1, ["trainer.no_such_field=1"], "test")
