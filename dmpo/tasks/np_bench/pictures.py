"""What several tasks draw, with matplotlib, and the picture of an instance as a PNG file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Instance, Task

PALETTE = (
    "#f6a04d",
    "#8cc5e3",
    "#a1d99b",
    "#f2c4d0",
    "#ffe066",
    "#c9b1e6",
    "#d9b38c",
    "#66c2a5",
    "#e8756a",
    "#c0c0c0",
    "#d4e157",
    "#7f9fd6",
)
"""Light enough for black numbers on them."""

ROWS = 20
"""Of a table, before it goes on in the next column."""
SIDE = 7.0
"""Width and height of a picture, inches."""
DPI = 128
"""Pixels an inch: 896 pixels a side, a multiple of the patches of 28 and of 32 pixels that vision models read."""


def png(task: Task, instance: Instance, answer: Any = None) -> bytes:
    """The picture of an instance, and of a valid answer where given, as a PNG file of 896 x 896 pixels.

    Equal for equal arguments and equal versions of matplotlib, whatever styles the user has set.

    Raises:
        ImportError: matplotlib or networkx is missing.
    """
    try:
        import numpy as np
        from matplotlib import style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from PIL import Image
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'verl-dmpo[np]'") from error
    file = BytesIO()
    with style.context("default"):
        figure = Figure(figsize=(SIDE, SIDE), dpi=DPI, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        task.draw(instance, figure.add_subplot(), answer)
        canvas.draw()
    # Without an alpha channel, which not every image processor takes.
    Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]).save(file, "PNG")
    return file.getvalue()


def points(axes: Any) -> tuple[float, float]:
    """About the width and height of axes in points, which is what fonts and markers are measured in."""
    box, size = axes.get_position(), axes.figure.get_size_inches()
    return 72 * size[0] * box.width, 72 * size[1] * box.height


def draw_table(axes: Any, header: Sequence[str], rows: Sequence[Sequence[Any]], marked: Collection[int]) -> None:
    """A table in blocks side by side; the rows in `marked` have a colour."""
    blocks = -(-len(rows) // ROWS)
    height = -(-len(rows) // blocks)
    cells = [[""] * (len(header) * blocks) for _ in range(height)]
    colours = [["white"] * (len(header) * blocks) for _ in range(height)]
    for index, row in enumerate(rows):
        block, line = divmod(index, height)
        for column, cell in enumerate(row):
            cells[line][block * len(header) + column] = str(cell)
            plain = "white" if column else "0.94"
            colours[line][block * len(header) + column] = PALETTE[0] if index in marked else plain
    longest = [
        max(len(str(cell)) for cell in (name, *(row[column] for row in rows))) for column, name in enumerate(header)
    ]
    # Rows are not made higher than a tenth of the picture.
    row_height = min(0.1, 1 / (height + 1))
    table = axes.table(
        cellText=cells,
        cellColours=colours,
        colLabels=list(header) * blocks,
        colColours=["0.86"] * (len(header) * blocks),
        colWidths=[length / (sum(longest) * blocks) for length in longest] * blocks,
        cellLoc="center",
        bbox=(0, 1 - row_height * (height + 1), 1, row_height * (height + 1)),
    )
    width, full = points(axes)
    table.auto_set_font_size(False)
    table.set_fontsize(min(13, 0.62 * full * row_height, 1.5 * width / (sum(longest) * blocks)))
    for cell in table.get_celld().values():
        cell.set_linewidth(0.6)
    axes.axis("off")


def draw_matrix(
    axes: Any,
    rows: Sequence[Collection[int]],
    columns: int,
    names: tuple[str, str],
    fill: Callable[[int, int], str],
    labels: Mapping[int, str],
) -> None:
    """A row for each collection, with a square for each of its members, in whose column it lies.

    Args:
        axes: matplotlib's.
        rows: members of each row, from 0 to `columns` - 1.
        columns: their number.
        names: what rows and columns are.
        fill: colour of the square in a row and column.
        labels: colours behind the numbers of some rows.
    """
    from matplotlib.colors import to_rgb

    width, height = points(axes)
    size = min(11.0, 0.72 * width / columns, 0.9 * height / len(rows))
    axes.imshow(
        [
            [to_rgb(fill(row, column) if column in members else "white") for column in range(columns)]
            for row, members in enumerate(rows)
        ],
        aspect="auto",
        interpolation="nearest",
    )
    for row, members in enumerate(rows):
        for column in members:
            axes.text(column, row, str(column), ha="center", va="center_baseline", fontsize=size)
    axes.set_xticks(range(columns))
    axes.set_yticks(range(len(rows)))
    for axis, number in (("x", columns), ("y", len(rows))):
        getattr(axes, f"set_{axis}ticks")([place - 0.5 for place in range(number + 1)], minor=True)
    axes.tick_params(labelsize=min(10.0, size + 1), length=0, pad=3, top=False, labeltop=True, right=False)
    axes.tick_params(axis="y", labelright=True)
    # Next to each other, the numbers of the columns must not run together.
    axes.tick_params(axis="x", labelsize=min(10.0, 0.9 * size if columns > 10 else size))
    axes.tick_params(which="minor", length=0)
    axes.grid(which="minor", color="0.8", linewidth=0.5)
    axes.set_ylabel(names[0])
    axes.set_xlabel(names[1])
    for row, colour in labels.items():
        tick = axes.yaxis.get_major_ticks()[row]
        for label in (tick.label1, tick.label2):
            label.set_bbox({"facecolor": colour, "edgecolor": "none", "pad": 1.2})
