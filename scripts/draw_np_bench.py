"""One picture of all NP-hard tasks: an instance of each, with an optimal answer.

.venv/bin/python scripts/draw_np_bench.py --help
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from tqdm import tqdm

from dmpo.tasks.np_bench import CATEGORIES, TASKS
from dmpo.tasks.np_bench.pictures import PALETTE

SMALL = ("hamiltonian_cycle", "tsp", "dominating_set", "feedback_vertex_set", "set_cover")
"""Of these a medium instance is as easy to look at as an easy one of the others."""


def draw(path: Path, seed: int) -> None:
    figure = Figure(figsize=(16, 10), dpi=100, layout="constrained")
    panels = figure.subplots(3, 5).flat
    order = sorted(TASKS.values(), key=lambda task: CATEGORIES.index(task.category))
    for task, axes in zip(tqdm(order, desc="tasks"), panels, strict=False):
        instance = task.make("medium" if task.name in SMALL else "easy", seed)
        reference = task.solve(instance, 30)
        if reference.status != "optimal":
            sys.exit(f"draw_np_bench: no optimal answer to {task.name} in 30 s; try another --seed")
        task.draw(instance, axes, reference.solution)
        given = f", {axes.get_title()}" if axes.get_title() else ""
        axes.set_title(f"{task.title}\noptimum {reference.value}{given}", fontsize=11)
    last = figure.axes[-1]
    last.axis("off")
    last.legend(
        handles=[
            Patch(facecolor=PALETTE[0], edgecolor="black", label="chosen, or one side"),
            Patch(facecolor=PALETTE[1], edgecolor="black", label="the other side"),
            Line2D([], [], color="tab:red", linewidth=2, label="edges that count"),
            Line2D([], [], color="tab:orange", linewidth=1.6, label="the tour"),
        ],
        title="Optimal answers",
        loc="center",
        fontsize=12,
        title_fontsize=13,
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent.parent / "docs" / "np_bench.png"
    parser.add_argument("--out", type=Path, default=default, help="PNG file (default: docs/np_bench.png)")
    parser.add_argument("--seed", type=int, default=2, help="of the instances (default: %(default)s)")
    options = parser.parse_args()
    with style.context("default"):
        draw(options.out, options.seed)
    print(options.out)


if __name__ == "__main__":
    main()
