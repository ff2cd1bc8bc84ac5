"""NP-hard tasks on a CPU: data, reward and validation of the GPU runs, with a tiny model that has learnt from a solver.

`bash scripts/run_np_cpu.sh --help`, or `python -m dmpo.cpu.np_run --help` where everything is installed.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..report.text import columns
from ..tasks.np_bench import TASKS, evaluate, make
from . import training_run
from .arguments import parse_np

SAMPLES = 8
"""Responses to each instance at a validation."""
LEVEL = "easy"
COLUMNS = ("SR@1", "QR@1", f"QR@{SAMPLES}", "above_trivial@1", f"distinct@{SAMPLES}")
INTERVAL = 5
"""Steps between validations."""
_ROOT = __package__.rpartition(".")[0]
_PROMPTS = 16  # of a step
# Of the supervised start: instances of each task, steps, rows of a step, learning rate.
_EXAMPLES, _STEPS, _ROWS, _RATE = 1500, 500, 32, 2e-3
Curve = dict[int, dict[str, dict[str, float]]]
"""By step, the figures of `np_bench.evaluate`."""
# Instances of each task.
_TRAIN, _VALIDATION = 400, 24


def question(item: make.Item) -> list[dict[str, str]]:
    """An instance as short as it can be: a byte is a token here. The real prompt is in np_bench."""
    # The places of cities say nothing that their distances do not.
    data = {name: value for name, value in item.instance.items() if name != "places"}
    return [{"role": "user", "content": f"{item.task} {json.dumps(data, separators=(',', ':'))}"}]


def make_start(folder: Path, tasks: Sequence[str], seed: int) -> None:
    """verl's parquet files and the model that has learnt from a solver in `folder`, unless they are there."""
    if not (folder / "data" / "train.parquet").exists():
        known: set[str] = set()
        splits = {
            split: make.draw_items(tasks, [LEVEL], number, f"cpu/{seed}/{split}", known)
            for split, number in (("validation", _VALIDATION), ("start", _EXAMPLES), ("train", _TRAIN))
        }
        with training_run.complete_or_absent(folder / "data") as partial:
            everything = [item for items in splits.values() for item in items]
            references = make.solve_all(everything, partial / "references.jsonl", 20.0, 2)
            for split, items in splits.items():
                rows = list(make.rows(items, references, split))
                for row, item in zip(rows, items, strict=True):
                    row["prompt"] = question(item)
                    row["extra_info"]["solution"] = json.dumps(references[item.hash]["solution"])
                make.write_parquet(partial / f"{split}.parquet", rows)
    if not (folder / "model").exists():
        import pandas

        rows = pandas.read_parquet(folder / "data" / "start.parquet").to_dict("records")
        with training_run.complete_or_absent(folder / "model") as partial:
            _learn(partial, rows, seed)


def _learn(path: Path, rows: list[dict[str, Any]], seed: int) -> None:
    """Teach a new byte-level model the solver's answers for a while, and save it."""
    import torch
    from tqdm import tqdm

    from . import math_model, toy_model

    torch.manual_seed(seed)
    torch.set_num_threads(1)  # on a busy machine more wait for each other
    model, tokenizer = math_model.tiny()
    answers = [f"Answer: {row['extra_info']['solution']}" for row in rows]
    ids, mask = toy_model.encode(tokenizer, [list(row["prompt"]) for row in rows], answers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.0)
    model.train()
    for _ in (bar := tqdm(range(_STEPS), "learning from a solver", unit=" steps")):
        some = torch.randint(len(ids), (_ROWS,))
        log_prob = toy_model.answer_log_prob(model, ids[some], mask[some], tokenizer.pad_token_id)
        loss = -log_prob.sum() / mask[some].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix_str(f"{loss.item():.2f} nats a token", refresh=False)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def overrides(mode: str, start: Path, folder: Path, steps: int, seed: int) -> list[str]:
    """What a run of `mode` sets on top of `config/dmpo_cpu.yaml`."""
    validated = _dump(folder, training_run.checkpointed_step(folder)).exists()
    return [
        *training_run.task_overrides(
            mode, start, folder, steps=steps, interval=INTERVAL, samples=SAMPLES, seed=seed, validated=validated
        ),
        f"data.train_batch_size={_PROMPTS}",
        "data.max_prompt_length=384",
        "data.max_response_length=64",
        f"reward.custom_reward_function.path=pkg://{_ROOT}.tasks.np_bench.reward",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=4",
        "trainer.project_name=np_cpu",
    ]


def _dump(folder: Path, step: int) -> Path:
    """The validation of the run in `folder` after `step` steps."""
    return folder / "validation" / f"{step}.jsonl"


def curve(folder: Path) -> Curve:
    """The figures of `np_bench.evaluate` of every validation of the run in `folder`, by step."""
    files = {int(file.stem): file for file in (folder / "validation").glob("*.jsonl")}
    found = {}
    for step in sorted(files):
        with files[step].open() as lines:
            found[step] = evaluate.evaluate(evaluate.read(lines))
    return found


def _values(curves: Sequence[Curve], step: int, task: str, name: str) -> np.ndarray:
    """A figure of each seed."""
    return np.array([curve[step][task][name] for curve in curves])


def _tasks(curves: dict[str, list[Curve]]) -> list[str]:
    first = next(iter(curves.values()))[0]
    return [name for name in next(iter(first.values())) if name in TASKS]


def table(curves: dict[str, list[Curve]]) -> str:
    """A text table with a row for each run, task and validation: means over seeds and their standard deviation.

    Args:
        curves: of each mode, those of its seeds.
    """
    rows = [["run", "task", "step", *COLUMNS]]
    for mode, found in curves.items():
        for task in _tasks(curves):
            for step in found[0]:
                row = [mode, task, str(step)]
                for name in COLUMNS:
                    values = _values(found, step, task, name)
                    spread = f" ±{values.std(ddof=1):.3f}" if len(found) > 1 else ""
                    row.append(f"{values.mean():.3f}{spread}")
                rows.append(row)
    return columns(rows)


def plot(curves: dict[str, list[Curve]], file: Path) -> None:
    """SR, QR and distinct solutions against training steps: a row of panels for each task, a line for each mode.

    Lines are means over seeds, bands go from the least to the greatest.
    """
    from matplotlib.figure import Figure

    panels = {
        "Valid answers (SR)": "SR@1",
        "Quality (QR)": "QR@1",
        f"Quality, best of {SAMPLES}": f"QR@{SAMPLES}",
        f"Distinct valid solutions in {SAMPLES}": f"distinct@{SAMPLES}",
    }
    tasks = _tasks(curves)
    figure = Figure(figsize=(14, 3.2 * len(tasks)), layout="constrained")
    grid = figure.subplots(len(tasks), len(panels), sharex=True, squeeze=False)
    for task, line in zip(tasks, grid, strict=True):
        for axes, (title, name) in zip(line, panels.items(), strict=True):
            for (mode, found), marker in zip(curves.items(), "osD^vP*X<>", strict=False):
                steps = list(found[0])
                values = np.stack([_values(found, step, task, name) for step in steps])
                axes.plot(steps, values.mean(1), marker=marker, label=mode, linewidth=2)
                axes.fill_between(steps, values.min(1), values.max(1), alpha=0.2)
            axes.set(title=title, ylim=(0, SAMPLES if name.startswith("distinct") else 1.02))
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(TASKS[task].title)
        line[-1].legend(frameon=False)
    for axes in grid[-1]:
        axes.set_xlabel("training step")
    figure.savefig(file, dpi=130)


def main() -> None:
    options = parse_np()
    training_run.end_like_ctrl_c()
    began = time.monotonic()
    curves: dict[str, list[Curve]] = {mode: [] for mode in options.mode}
    seconds: dict[str, list[float]] = {mode: [] for mode in options.mode}
    seeds = range(options.seed, options.seed + options.seeds)
    runs = [(seed, mode) for seed in seeds for mode in options.mode]
    try:
        for index, (seed, mode) in enumerate(runs, 1):
            title = f"run {index} of {len(runs)}, {mode}, seed {seed}"
            start = options.output / f"{'+'.join(options.task)}-seed{seed}"
            start.mkdir(parents=True, exist_ok=True)
            make_start(start, options.task, seed)
            run = start / f"steps{options.steps}" / mode
            if _dump(run, options.steps).exists():
                print(f"{title}: done before, {run}")
            else:
                training_run.train(run, options.steps, overrides(mode, start, run, options.steps, seed), title)
            curves[mode].append(curve(run))
            seconds[mode].append(training_run.seconds_per_step(run))
    except KeyboardInterrupt:
        sys.exit("\nrun_np_cpu: stopped; run the same command again to go on from here")
    except training_run.TrainingFailed as error:
        sys.exit(f"{error}\nrun_np_cpu: failed; run the same command again to go on from the last checkpoint")

    name = f"{'+'.join(options.task)}-seed{options.seed}"
    if options.seeds > 1:
        name += f"-{seeds[-1]}"
    folder = options.output / f"{name}-steps{options.steps}"
    folder.mkdir(exist_ok=True)
    results = {"seeds": list(seeds), "validations": curves, "seconds_per_step": seconds}
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    plot(curves, folder / "curves.png")
    print(f"\n{table(curves)}\n")
    if options.seeds > 1:
        print(f"means over {options.seeds} seeds ± standard deviation")
    for mode, medians in seconds.items():
        print(f"{mode}: {np.median(medians):.1f} s a step (median)")
    print(f"\n{folder / 'curves.png'}\n{folder / 'results.json'}\nin {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
