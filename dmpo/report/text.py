"""Tables for a terminal."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """Rows of cells as lines, the first `left` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
