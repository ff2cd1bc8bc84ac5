"""Does DMPO help? Every setting on small tasks: a grid without verl, and a verdict through verl.

    python scripts/experiment_cpu.py grid                     # every setting, seconds a run
    python scripts/experiment_cpu.py grid --only GRPO --seeds 1
    python scripts/experiment_cpu.py verl                     # those that matter, minutes a run
    python scripts/experiment_cpu.py report                   # tables and pictures of outputs/experiment
    python scripts/experiment_cpu.py report --output docs/results    # of the runs in docs/results.md

Run a command again to go on where it was interrupted: runs that are done are not done again. What came out is in
docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

STEPS = {"two_digits": 120, "two_digits_long": 120, "maximum_cut": 60}
INTERVAL = {"two_digits": 10, "two_digits_long": 10, "maximum_cut": 20}


def key(task: str, identity: dict[str, Any], seed: int, steps: int) -> str:
    """Names a run by all that its result depends on."""
    return json.dumps([task, identity, seed, steps], sort_keys=True)


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Finished runs by `key`; a line that was being written when a run was stopped is left out."""
    runs = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            run = json.loads(line)
        except json.JSONDecodeError:
            continue
        runs[key(run["task"], run["identity"], run["seed"], run["steps"])] = run
    return runs


def write(file: Path, run: dict[str, Any]) -> None:
    """Add a finished run, its curve to five decimals."""
    curve = [{name: round(value, 5) for name, value in point.items()} for point in run["curve"]]
    with file.open("a") as results:
        results.write(json.dumps({**run, "seconds": round(run["seconds"], 1), "curve": curve}) + "\n")


def run_one(task: str, setting: Any, seed: int, steps: int, output: Path) -> dict[str, Any]:
    """One run of the grid, on one core."""
    import time

    import torch
    from experiment import standin, tasks

    torch.set_num_threads(1)
    world = tasks.TASKS[task](output / "start" / f"{task}-seed{seed}", seed)
    began = time.monotonic()
    curve = standin.train(standin.Policy(world.model(), world), setting, seed, steps, INTERVAL[task])
    return {
        "task": task,
        "name": setting.name,
        "family": setting.family,
        "identity": setting.identity(),
        "seed": seed,
        "steps": steps,
        "seconds": time.monotonic() - began,
        "curve": curve,
    }


def grid(options: argparse.Namespace) -> None:
    """Run what is missing of the grid."""
    from experiment import settings, tasks
    from tqdm import tqdm

    file = options.output / "grid.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    done = read(file)
    wanted = []
    for task in options.task:
        steps = options.steps or STEPS[task]
        cells = [s for s in settings.of_task(task) if re.search(options.only, s.name)]
        for seed in range(options.seeds):
            wanted += [(task, s, seed, steps) for s in cells if key(task, s.identity(), seed, steps) not in done]
    print(f"{len(wanted)} runs to do, {len(done)} in {file}")
    for task, seed in dict.fromkeys((task, seed) for task, _, seed, _ in wanted):
        tasks.TASKS[task](options.output / "start" / f"{task}-seed{seed}", seed)
    with ProcessPoolExecutor(options.jobs) as pool:
        running = [pool.submit(run_one, *run, options.output) for run in wanted]
        try:
            for future in tqdm(as_completed(running), "runs", len(running), mininterval=1):
                write(file, future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def verl(options: argparse.Namespace) -> None:
    """Run what is missing of the verdict through verl, one seed of every setting after the other."""
    from experiment import settings, through_verl

    from dmpo.cpu import training_run

    training_run.end_like_ctrl_c()
    file = options.output / "verl.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    done = read(file)
    steps = options.steps or through_verl.STEPS
    cells = [s for s in settings.verdict() if re.search(options.only, s.name)]
    runs = [(seed, setting) for seed in range(options.seeds) for setting in cells]
    wanted = [(d, s) for d, s in runs if key("two_digits", s.identity(), d, steps) not in done]
    print(f"{len(wanted)} runs to do, {len(runs) - len(wanted)} of them done before")
    for index, (seed, setting) in enumerate(wanted, 1):
        title = f"run {index} of {len(wanted)}, {setting.name}, seed {seed}"
        write(file, through_verl.run(setting, options.output, seed, title, steps))


def report(options: argparse.Namespace) -> None:
    """Tables of all runs as Markdown on the terminal, pictures in the output folder."""
    from experiment import results

    pictures = options.output / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for source in ("grid", "verl"):
        runs = list(read(options.output / f"{source}.jsonl").values())
        for task, steps in sorted({(run["task"], run["steps"]) for run in runs}):
            found = results.by_setting(runs, task, steps)
            figures, levels, figure = results.FIGURES[task]
            print(f"## {source}: {task}, {steps} steps\n\n{results.end_table(found, figures, levels, figure)}\n")
            if results.GRPO in found:
                print(f"{results.against(found, results.GRPO, figure)}\n")
            name = f"{source}-{task}-{steps}"
            panels = {results.TITLES[f]: f for f in figures[:4]}
            main = {setting: found[setting] for setting in results.MAIN if setting in found}
            if main:
                results.plot_curves(main, panels, pictures / f"{name}-curves.png")
            results.plot_trade_off(found, figure, results.TITLES[figure], results.MAIN, pictures / f"{name}.png")
    print(f"pictures: {pictures}")


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("grid", help="train every setting without verl, and measure it")
    command.set_defaults(run=grid)
    command.add_argument("--task", nargs="+", default=["two_digits"], choices=STEPS, help="default: two_digits")
    command.add_argument("--only", default="", metavar="REGEX", help="settings whose name matches (default: all)")
    command.add_argument("--seeds", type=int, default=5, help="of each setting (default: 5)")
    command.add_argument("--steps", type=int, help=f"training steps (default: {STEPS})")
    command.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each (default: 1)")
    command = commands.add_parser("verl", help="train the settings that matter through verl, minutes a run")
    command.set_defaults(run=verl)
    command.add_argument("--only", default="", metavar="REGEX", help="settings whose name matches (default: all)")
    command.add_argument("--seeds", type=int, default=3, help="of each setting (default: 3)")
    command.add_argument("--steps", type=int, help="training steps (default: 60)")
    command = commands.add_parser("report", help="tables and pictures of the runs that are done")
    command.set_defaults(run=report)
    for command in commands.choices.values():
        command.add_argument("--output", type=Path, default=Path("outputs/experiment"), help="default: %(default)s")
    options = parser.parse_args()
    try:
        options.run(options)
    except KeyboardInterrupt:
        sys.exit("\nexperiment_cpu: stopped; run the same command again to go on")


if __name__ == "__main__":
    main()
