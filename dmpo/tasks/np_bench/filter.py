"""Keep the instances that a model solves now and then: `python -m dmpo.tasks.np_bench.filter --help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files import replacing
from ...report.text import columns
from .base import content_hash
from .evaluate import Malformed, read
from .reward import compute_score

ROW_GROUP = 256
"""Rows that are held in memory."""


@dataclass
class Rollouts:
    """What a model made of one instance.

    Attributes:
        number: how many responses there are.
        valid: how many of them are valid.
        ratio: sum of their quality ratios, each 1 at most and 0 where not valid.
    """

    number: int = 0
    valid: int = 0
    ratio: float = 0.0

    def rate(self, by_ratio: bool) -> float:
        """The mean ratio, or the share of valid responses."""
        return (self.ratio if by_ratio else self.valid) / self.number


def dumps(paths: Sequence[Path]) -> list[Path]:
    """The files, and of each folder its files *.jsonl by name.

    Raises:
        ValueError: a folder has no such file.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
        elif inside := sorted(path.glob("*.jsonl")):
            files += inside
        else:
            raise ValueError(f"{path}: there is no file *.jsonl in this folder")
    return files


def rollouts(files: Sequence[Path]) -> dict[str, Rollouts]:
    """What the responses in JSON Lines files are worth, by the content hash of their instance.

    Raises:
        OSError: a file cannot be read.
        ValueError: names the file, and the line that is no response.
    """
    from tqdm import tqdm

    result: dict[str, Rollouts] = defaultdict(Rollouts)
    hashes: dict[str, str] = {}
    for path in files:
        with path.open() as file:
            try:
                for _, truth, response in read(tqdm(file, desc=path.name, unit=" lines", mininterval=1)):
                    if truth not in hashes:
                        hashes[truth] = content_hash(json.loads(truth)["instance"])
                    score, found = compute_score("", response, truth), result[hashes[truth]]
                    found.number += 1
                    found.valid += int(score["valid"])
                    found.ratio += min(score["ratio"], 1.0)
            except (Malformed, UnicodeDecodeError) as error:
                raise ValueError(f"{path}: {error}") from error
    return dict(result)


def keep(options: argparse.Namespace) -> dict[tuple[str, str], list[int]]:
    """Write the rows that stay.

    Returns:
        By task and level: rows, rows with rollouts, rows kept.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the data are none of `dmpo.tasks.np_bench.make`, a line is no response, or no row stays.
    """
    import pyarrow
    from pyarrow import parquet

    known = rollouts(dumps(options.rollouts))
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        data = parquet.ParquetFile(options.data)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{options.data}: {error}") from error
    with data, replacing(options.out) as partial:
        with parquet.ParquetWriter(partial, data.schema_arrow) as writer:
            for batch in data.iter_batches(ROW_GROUP):
                stays = [_stays(row, known, counts, options) for row in _infos(batch, options.data)]
                table = pyarrow.Table.from_batches([batch], data.schema_arrow)
                writer.write_table(table.filter(pyarrow.array(stays, pyarrow.bool_())))
        if not any(kept for _, _, kept in counts.values()):
            seen = sum(seen for _, seen, _ in counts.values())
            raise ValueError(
                f"{options.data}: none of {data.metadata.num_rows} instances, {seen} of them with rollouts, lies "
                f"within [{options.min}, {options.max}]; nothing was written"
            )
    return dict(counts)


def _infos(batch: Any, path: Path) -> list[dict[str, Any]]:
    """`extra_info` of the rows of a batch."""
    if "extra_info" in batch.schema.names:
        infos = batch.column("extra_info").to_pylist()
        if all(isinstance(info, dict) and info.keys() >= {"id", "task", "level"} for info in infos):
            return infos
    raise ValueError(f"{path}: needs the columns that dmpo.tasks.np_bench.make writes: extra_info with id, task, level")


def _stays(
    info: dict[str, Any],
    known: dict[str, Rollouts],
    counts: dict[tuple[str, str], list[int]],
    options: argparse.Namespace,
) -> bool:
    found = known.get(info["id"])
    stays = options.keep_unseen if found is None else options.min <= found.rate(options.ratio) <= options.max
    count = counts[info["task"], info["level"]]
    for place, yes in enumerate((True, found is not None, stays)):
        count[place] += yes
    return stays


def table(counts: dict[tuple[str, str], list[int]]) -> str:
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    lines = [["task", "level", "instances", "with rollouts", "kept", "kept %"]]
    for name, (number, seen, kept) in [*sorted(counts.items()), (("all", ""), total)]:
        lines.append([*name, str(number), str(seen), str(kept), f"{100 * kept / number:.0f}"])
    return columns(lines, left=len(lines[0]))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dmpo.tasks.np_bench.filter",
        description="Keep the instances of a parquet file on which a model's success rate lies within [MIN, MAX]: "
        "those that it always or never solves teach it nothing. Prints how many are kept by task and level.",
    )
    parser.add_argument("data", type=Path, help="parquet file of dmpo.tasks.np_bench.make")
    parser.add_argument(
        "--rollouts",
        type=Path,
        nargs="+",
        required=True,
        metavar="DUMP",
        help="JSON Lines with a response (output or response) and the data's ground truth (gts or ground_truth) in "
        "each line, or folders of such files, as verl writes to trainer.validation_data_dir and rollout_data_dir",
    )
    parser.add_argument("--min", type=_share, default=0.05, help="least rate, from 0 to 1 (default: %(default)s)")
    parser.add_argument("--max", type=_share, default=0.95, help="greatest rate, from 0 to 1 (default: %(default)s)")
    parser.add_argument(
        "--ratio", action="store_true", help="the rate is the mean quality ratio, not the share of valid answers"
    )
    parser.add_argument("--keep-unseen", action="store_true", help="keep instances without rollouts too")
    parser.add_argument("--out", type=Path, required=True, help="parquet file to write")
    options = parser.parse_args(arguments)
    if options.min > options.max:
        parser.error(f"--min must not be above --max, got {options.min} and {options.max}")
    return options


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    try:
        counts = keep(options)
    except (OSError, ValueError) as error:
        sys.exit(f"filter: {error}")
    without = sum(number - seen for number, seen, _ in counts.values())
    print(f"\n{table(counts)}\n\n{without} instances without rollouts {'kept' if options.keep_unseen else 'dropped'}")
    print(options.out)


if __name__ == "__main__":
    main()
