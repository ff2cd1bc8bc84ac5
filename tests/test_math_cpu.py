import json
import subprocess
from pathlib import Path

import pytest
import torch
from verl.utils.config import validate_config

from dmpo.config import validate
from dmpo.cpu import arguments, math_model, math_run
from dmpo.tasks.math.reward import compute_score
from dmpo.tasks.math.word_problems import problems

from .test_config import run_config

ROOT = Path(__file__).parent.parent
FIGURES = {name: float(i) for i, name in enumerate(math_run.COLUMNS)}


def log(folder, name, *entries):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "data": data}) for step, data in entries]
    (folder / name).write_text("\n".join(lines) + "\n")


def validation(scale=1.0):
    return {f"val-samples/word_problems_new/{name}": scale * value for name, value in FIGURES.items()}


def test_figures_of_a_run_are_read_by_step(tmp_path):
    log(tmp_path, "metrics-0.jsonl", (0, validation()), (1, {"critic/score/mean": 0.1}), (10, validation(2)))
    log(tmp_path, "metrics-10.jsonl", (20, validation(3)))
    curve = math_run.curve(tmp_path)
    assert list(curve) == [0, 10, 20]
    assert curve[10] == {name: 2 * value for name, value in FIGURES.items()}
    assert math_run.figures(tmp_path, 1) == {}


def test_table_has_a_row_for_each_validation(tmp_path):
    text = math_run.table({"GRPO": {0: FIGURES, 10: FIGURES}, "dmpo": {0: FIGURES}})
    header, *rows = [line.split() for line in text.splitlines()]
    assert header == ["run", "step", *math_run.COLUMNS]
    assert [row[:3] for row in rows] == [["GRPO", "0", "0.000"], ["GRPO", "10", "0.000"], ["dmpo", "0", "0.000"]]
    math_run.plot({"GRPO": {0: FIGURES, 10: FIGURES}}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("model", ["tiny", "smollm2"])
@pytest.mark.parametrize("mode", ["GRPO", "grpo_dmpo_zero"])
def test_overrides_make_a_valid_configuration(tmp_path, model, mode):
    config = run_config(*math_run.overrides(mode, model, tmp_path / "start", tmp_path / "run", 20, 3), name="dmpo_cpu")
    validate(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    expected = "vanilla" if mode == "GRPO" else mode
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == expected
    assert config.reward.custom_reward_function.path == "pkg://dmpo.tasks.math.reward"
    assert config.trainer.val_before_train
    assert config.data.seed == 3


def test_a_resumed_run_does_not_repeat_the_validation_of_its_checkpoint(tmp_path):
    run = tmp_path / "run"
    tracker = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir(parents=True)
    tracker.write_text("10")

    def option(name):
        given = math_run.overrides("GRPO", "tiny", tmp_path, run, 20, 0)
        return next(text.split("=")[1] for text in given if text.startswith(f"{name}="))

    assert option("trainer.val_before_train") == "true"
    log(run, "metrics-0.jsonl", (10, validation()))
    assert option("trainer.val_before_train") == "false"


def test_the_start_learns_the_written_solutions(tmp_path):
    few = problems()[:34]
    torch.manual_seed(0)
    model, tokenizer = math_model.tiny()
    encoded = math_model.encode(tokenizer, few, [problem.solution() for problem in few])
    assert math_model.solution_probability(model, *encoded, tokenizer.pad_token_id) < 1e-6
    with pytest.raises(RuntimeError, match="right after 0 steps, wanted 20%"):
        math_model.warm_start(tmp_path / "model", "tiny", few, max_steps=0)
    assert not (tmp_path / "model").exists()


def test_solutions_fit_into_the_responses_of_both_models():
    longest = max(problems(), key=lambda problem: len(problem.solution()))
    assert len(longest.solution()) + 1 <= math_run._SIZES["tiny"][1]  # a token a byte, and the end
    assert all(compute_score("", problem.solution(), problem.answer)["acc"] == 1 for problem in problems())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model", "large"], "invalid choice: 'large'"),
        (["--mode", "ppo"], "invalid choice: 'ppo'"),
        (["--steps", "0"], "must be a whole number >= 1, got '0'"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_installed(given, message, capsys):
    with pytest.raises(SystemExit) as error:
        arguments.parse_math(given)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_pipeline_runs_from_problems_to_figures(tmp_path):
    command = ["bash", "scripts/run_math_cpu.sh", "--steps", "2", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = tmp_path / "tiny-seed0" / "steps2"
    results = json.loads((folder / "results.json").read_text())
    found = results["validations"]["grpo_dmpo_fkl"]
    assert set(found) == {"0", "2"}
    for figures in found.values():
        assert set(math_run.COLUMNS) <= set(figures)
        assert 0 <= figures["avg@8"] <= figures["pass@2"] <= figures["pass@8"] <= 1
    assert 0.1 < found["0"]["avg@8"] < 0.6  # the start is right some of the time
    rows = [json.loads(line) for line in (folder / "grpo_dmpo_fkl" / "validation" / "2.jsonl").open()]
    assert len(rows) == 32 * 8
    assert {"acc", "format", "answer", "timeout", "score", "gts"} <= set(rows[0])
    # Again: nothing is left to do.
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "done before" in again.stdout
