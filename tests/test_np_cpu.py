"""The NP-hard tasks' run on a CPU."""

import json
import subprocess
from pathlib import Path

import pandas
import pytest
from verl.utils.config import validate_config

from dmpo.config import validate
from dmpo.cpu import arguments, np_run, toy_model, training_run
from dmpo.tasks.np_bench import TASKS, make
from dmpo.tasks.np_bench.reward import compute_score, ground_truth

from .test_config import run_config

ROOT = Path(__file__).parent.parent
TSP = TASKS["tsp"]


def dump(folder: Path, step: int, *responses: str) -> None:
    """A validation as verl writes it: each response to one instance."""
    instance = TSP.make("easy", 0)
    truth = ground_truth("tsp", instance, TSP.solve(instance, 10))
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"output": response, "gts": truth, "step": step}) for response in responses]
    (folder / f"{step}.jsonl").write_text("\n".join(lines) + "\n")


def test_arguments_know_all_tasks():
    assert arguments.parse_np(["--task", *TASKS]).task == list(TASKS)
    options = arguments.parse_np(["--task", "tsp", "tsp", "knapsack"])
    assert options.task == ["tsp", "knapsack"] and options.mode == ["GRPO", "grpo_dmpo_fkl"]


@pytest.mark.parametrize("task", TASKS)
def test_instances_and_answers_fit_the_limits_of_the_run(task):
    tokenizer = toy_model.build_tokenizer()
    limits = {name: int(value) for name, _, value in (o.partition("=") for o in settings("GRPO")) if "length" in name}
    for item in make.draw_items([task], [np_run.LEVEL], 20, "limits", set()):
        asked = tokenizer.apply_chat_template(np_run.question(item), add_generation_prompt=True, tokenize=False)
        solution = TASKS[task].solve(item.instance, 10).solution
        assert len(tokenizer.encode(asked)) <= limits["data.max_prompt_length"]
        assert len(tokenizer.encode(f"Answer: {json.dumps(solution)}")) < limits["data.max_response_length"]


def settings(mode: str, folder: Path = Path("run")) -> list[str]:
    return np_run.overrides(mode, Path("start"), folder, 20, 3)


@pytest.mark.parametrize("mode", ["GRPO", "grpo_dmpo_zero"])
def test_overrides_make_a_valid_configuration(mode):
    config = run_config(*settings(mode), name="dmpo_cpu")
    validate(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == ("vanilla" if mode == "GRPO" else mode)
    assert config.reward.custom_reward_function.path == "pkg://dmpo.tasks.np_bench.reward"
    assert config.trainer.val_before_train and config.data.seed == 3


def test_validations_become_a_table_and_a_picture(tmp_path):
    cities = len(TSP.make("easy", 0)["places"])
    dump(tmp_path / "run" / "validation", 0, "?", f"Answer: {list(range(cities))}", *["?"] * 6)
    dump(tmp_path / "run" / "validation", 20, *[f"Answer: {list(range(cities))}"] * 8)
    curve = np_run.curve(tmp_path / "run")
    assert list(curve) == [0, 20]
    assert curve[0]["tsp"]["SR@1"] == pytest.approx(1 / 8) and curve[20]["tsp"]["SR@1"] == 1
    header, *rows = [line.split() for line in np_run.table({"GRPO": [curve]}).splitlines()]
    assert header == ["run", "task", "step", *np_run.COLUMNS]
    assert [row[:4] for row in rows] == [["GRPO", "tsp", "0", "0.125"], ["GRPO", "tsp", "20", "1.000"]]
    two = {20: {"tsp": {name: value + 0.2 for name, value in curve[20]["tsp"].items()}}}
    text = np_run.table({"GRPO": [{20: curve[20]}, two]})
    assert "1.100 ±0.141" in text  # of 1 and 1.2
    np_run.plot({"GRPO": [curve, curve], "dmpo": [curve, curve]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_resumed_run_does_not_repeat_the_validation_of_its_checkpoint(tmp_path):
    tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir()
    tracker.write_text("10")
    assert "trainer.val_before_train=true" in settings("GRPO", tmp_path)
    dump(tmp_path / "validation", 10, "?")
    assert "trainer.val_before_train=false" in settings("GRPO", tmp_path)


def test_the_start_has_data_that_its_reward_grades_and_a_model(tmp_path, monkeypatch):
    for name, value in {"_EXAMPLES": 12, "_STEPS": 2, "_TRAIN": 8, "_VALIDATION": 4}.items():
        monkeypatch.setattr(np_run, name, value)
    np_run.make_start(tmp_path, ["tsp", "knapsack"], 0)
    rows = {name: pandas.read_parquet(tmp_path / "data" / f"{name}.parquet").to_dict("records") for name in SPLITS}
    assert {name: len(found) for name, found in rows.items()} == {"train": 16, "validation": 8, "start": 24}
    assert len({row["extra_info"]["id"] for found in rows.values() for row in found}) == 48
    for row in rows["train"]:
        truth, solution = row["reward_model"]["ground_truth"], row["extra_info"]["solution"]
        assert compute_score("", f"Answer: {solution}", truth)["ratio"] == 1
    assert (tmp_path / "model" / "model.safetensors").exists()
    before = (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns
    np_run.make_start(tmp_path, ["tsp", "knapsack"], 0)
    assert (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns == before


SPLITS = ("train", "validation", "start")


@pytest.mark.slow
def test_the_run_trains_both_methods_and_goes_on(tmp_path):
    command = ["bash", "scripts/run_np_cpu.sh", "--task", "tsp", "--steps", "2", "--output", str(tmp_path)]
    for attempt in range(2):
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
        assert run.stdout.count("done before") == (2 if attempt else 0)
    folder = tmp_path / "tsp-seed0-steps2"
    results = json.loads((folder / "results.json").read_text())
    for mode in ("GRPO", "grpo_dmpo_fkl"):
        (found,) = results["validations"][mode]
        assert list(found) == ["0", "2"] and found["0"]["tsp"]["SR@1"] > 0
        assert list(training_run.metrics(tmp_path / "tsp-seed0" / "steps2" / mode)) == [0, 1, 2]
    assert (folder / "curves.png").exists()
