"""Make verl's parquet files of NP-hard tasks: `python -m dmpo.tasks.np_bench.make --help`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from ...files import replacing
from ...report.text import columns
from . import LEVELS, TASKS, Instance, Reference, Rng, content_hash
from .pictures import png
from .reward import ground_truth

BENCH = "np-bench-v1"
BENCH_SIZE = 100
HASHES = "np_bench_v1.json"
"""In this package: SHA-256 of the instances of `BENCH`, by task."""
IMAGE = "<image>"
"""Where verl puts a picture into a prompt."""
ROW_GROUP = 256
"""Rows that are held in memory while a parquet file is written."""


@dataclass(frozen=True)
class Item:
    """One instance and its place in the data."""

    task: str
    level: str
    seed: str
    hash: str
    instance: Instance


def bench_items(tasks: Sequence[str], number: int = BENCH_SIZE) -> list[Item]:
    """The evaluation set np-bench-v1, or the first `number` instances of each of its tasks."""
    return draw_items(tasks, ["bench"], number, BENCH, set())


def set_hash(items: Sequence[Item]) -> str:
    """SHA-256 of the content hashes of instances, in order."""
    return hashlib.sha256("\n".join(item.hash for item in items).encode()).hexdigest()


def draw_items(tasks: Sequence[str], levels: Sequence[str], number: int, seed: str, known: set[str]) -> list[Item]:
    """`number` instances a task, evenly over the levels, none of which is in `known`, to which they are added."""
    items = []
    for task in tasks:
        for index in range(number):
            level = levels[index % len(levels)]
            for attempt in range(1000):
                name = f"{seed}/{index}" + (f"/{attempt}" if attempt else "")
                instance = TASKS[task].make(level, name)
                digest = content_hash(instance)
                if digest not in known:
                    break
            else:
                raise SystemExit(
                    f"make: {task} has no {number} different instances at level {level}; ask for fewer or harder ones"
                )
            known.add(digest)
            items.append(Item(task, level, name, digest, instance))
    return items


def _solve(item: Item, time_limit: float) -> tuple[str, Reference, float]:
    began = time.monotonic()
    reference = TASKS[item.task].solve(item.instance, time_limit)
    return item.hash, reference, time.monotonic() - began


def solve_all(items: Sequence[Item], cache: Path, time_limit: float, workers: int) -> dict[str, dict[str, Any]]:
    """References by content hash, of which those in `cache` are read and the others computed and added to it."""
    from tqdm import tqdm

    known = {line["hash"]: line for line in _lines(cache)}
    todo = [item for item in items if item.hash not in known]
    if not todo:
        return known
    cache.parent.mkdir(parents=True, exist_ok=True)
    with (
        cache.open("a") as file,
        ProcessPoolExecutor(workers) as pool,
        tqdm(total=len(items), initial=len(items) - len(todo), desc="references", unit=" instances") as bar,
    ):
        if cache.stat().st_size and not cache.read_text().endswith("\n"):
            file.write("\n")  # behind a line that was cut off
        futures = {pool.submit(_solve, item, time_limit): item for item in todo}
        try:
            for future in as_completed(futures):
                item = futures[future]
                digest, reference, seconds = future.result()
                line = {"hash": digest, "task": item.task, "level": item.level, "seconds": round(seconds, 2)}
                known[digest] = line | asdict(reference)
                file.write(json.dumps(known[digest]) + "\n")
                file.flush()
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return known


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of JSON; one that was cut off, where a run was ended, is left out."""
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def _prompt(item: Item, images: bool) -> str:
    return TASKS[item.task].prompt(item.instance, IMAGE if images else "")


def rows(
    items: Sequence[Item],
    references: dict[str, dict[str, Any]],
    split: str,
    pictures: Iterable[bytes] | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows of verl's parquet schema (verl/utils/dataset/rl_dataset.py), in the order of the items.

    Args:
        items: instances.
        references: by content hash, at least of these instances.
        split: name of the data.
        pictures: PNG files of the instances, which stand for their data; without it the data are in words.
    """
    given = None if pictures is None else iter(pictures)
    for index, item in enumerate(items):
        known = references[item.hash]
        reference = Reference(**{name: known[name] for name in ("value", "solution", "status", "solver", "bound")})
        row = {
            "data_source": f"np_bench/{item.task}",
            "prompt": [{"role": "user", "content": _prompt(item, given is not None)}],
            "ability": TASKS[item.task].category,
            "reward_model": {
                "style": "rule",
                "ground_truth": ground_truth(item.task, item.instance, reference),
            },
            "extra_info": {
                "id": item.hash,
                "index": index,
                "split": split,
                "task": item.task,
                "level": item.level,
                "seed": item.seed,
                "status": reference.status,
            },
        }
        # Nothing but the bytes: verl opens them, and fails on an empty "bytes" or on a path that it cannot reach.
        yield row if given is None else row | {"images": [{"bytes": next(given)}]}


def _draw(item: Item) -> bytes:
    return png(TASKS[item.task], item.instance)


def draw_all(items: Sequence[Item], split: str, workers: int) -> Iterator[bytes]:
    """The pictures of instances in order, as PNG files, each drawn shortly before it is wanted."""
    from tqdm import tqdm

    todo = iter(items)
    with (
        ProcessPoolExecutor(workers) as pool,
        tqdm(total=len(items), desc=f"pictures of {split}", unit=" instances") as bar,
    ):
        futures = deque(pool.submit(_draw, item) for item in islice(todo, 8 * workers))
        try:
            while futures:
                picture = futures.popleft().result()
                futures.extend(pool.submit(_draw, item) for item in islice(todo, 1))
                bar.update()
                yield picture
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def make(options: argparse.Namespace) -> None:
    """Everything that the command line asks for."""
    splits: dict[str, list[Item]] = {}
    known: set[str] = set()
    # What is evaluated on comes first: training never has an instance of it.
    if options.bench:
        splits[BENCH] = bench_items(options.tasks, options.bench)
        known |= {item.hash for item in splits[BENCH]}
        _check_bench(splits[BENCH], options)
    for split, number in (("validation", options.validation), ("train", options.train)):
        if number:
            splits[split] = draw_items(options.tasks, options.levels, number, f"{options.seed}/{split}", known)
    if options.train:
        splits["train"] = Rng("order", options.seed).shuffled(splits["train"])
    everything = [item for items in splits.values() for item in items]
    references = solve_all(everything, options.out / "references.jsonl", options.time_limit, options.workers)
    files = {}
    for split, items in splits.items():
        path = options.out / f"{split}.parquet"
        pictures = draw_all(items, split, options.workers) if options.images else None
        write_parquet(path, rows(items, references, split, pictures))
        files[path.name] = {"rows": len(items), "sha256_of_instances": set_hash(items)}
    manifest = {
        "files": files,
        "tasks": options.tasks,
        "levels": options.levels,
        "seed": options.seed,
        "time_limit": options.time_limit,
        "images": options.images,
        "versions": _versions(),
    }
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(f"\n{_table(everything, references, options.images)}\n")
    for name in (*files, "manifest.json"):
        print(options.out / name)


def _check_bench(items: Sequence[Item], options: argparse.Namespace) -> None:
    """Stop if this machine makes other instances than those that np-bench-v1 stands for."""
    if options.bench != BENCH_SIZE:
        print(f"{BENCH}: only the first {options.bench} of {BENCH_SIZE} instances a task")
        return
    expected = json.loads((resources.files(__package__) / HASHES).read_text())
    for task in options.tasks:
        if set_hash([item for item in items if item.task == task]) != expected[task]:
            raise SystemExit(f"make: the instances of {task} are not those of {BENCH}; please report your platform")


def write_parquet(path: Path, data: Iterable[dict[str, Any]]) -> None:
    """Write a parquet file piece by piece; it is there as a whole or not at all."""
    import pyarrow
    from pyarrow import parquet

    left = iter(data)
    first = pyarrow.Table.from_pylist(list(islice(left, ROW_GROUP)))
    with replacing(path) as partial, parquet.ParquetWriter(partial, first.schema) as writer:
        writer.write_table(first)
        while group := list(islice(left, ROW_GROUP)):
            writer.write_table(pyarrow.Table.from_pylist(group, first.schema))


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for package in ("verl-dmpo", "ortools", "networkx", "matplotlib"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _table(items: Sequence[Item], references: dict[str, dict[str, Any]], images: bool) -> str:
    """Of each task and level: instances, share proved optimal, the trivial answer's quality, prompt length, seconds."""
    groups: dict[tuple[str, str], list[Item]] = defaultdict(list)
    for item in items:
        groups[item.task, item.level].append(item)
    lines = [["task", "level", "instances", "optimal %", "trivial QR %", "prompt, longest", "seconds, mean", "longest"]]
    for (name, level), group in groups.items():
        task, found = TASKS[name], [references[item.hash] for item in group]
        quality = 0.0
        for item, reference in zip(group, found, strict=True):
            verdict = task.verify(item.instance, task.trivial(item.instance))
            quality += task.quality(verdict.value, reference["value"]) if verdict.valid else 0.0
        optimal = Counter(reference["status"] for reference in found)["optimal"]
        seconds = [reference["seconds"] for reference in found]
        lines.append(
            [
                *(name, level, str(len(group)), f"{100 * optimal / len(group):.0f}"),
                f"{100 * quality / len(group):.0f}",
                str(max(len(_prompt(item, images)) for item in group)),
                *(f"{sum(seconds) / len(seconds):.1f}", f"{max(seconds):.1f}"),
            ]
        )
    return columns(lines, left=len(lines[0]))


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dmpo.tasks.np_bench.make",
        description="Make train, validation and evaluation parquet files in verl's schema, with references. Run it "
        "again with the same folder to go on after an interruption: what was solved is kept in references.jsonl.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("data/np_bench"), help="folder to write to")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="which tasks")
    parser.add_argument(
        "--levels", nargs="+", choices=LEVELS, default=["easy", "medium"], help="of training and validation, evenly"
    )
    parser.add_argument("--train", type=_number, default=1000, help="training instances a task")
    parser.add_argument("--validation", type=_number, default=20, help="validation instances a task")
    parser.add_argument(
        "--bench",
        type=_number,
        nargs="?",
        const=BENCH_SIZE,
        default=0,
        help=f"also the evaluation set {BENCH}: {BENCH_SIZE} instances a task at level bench, or the first so many",
    )
    parser.add_argument("--seed", type=_number, default=0, help="of training and validation")
    parser.add_argument(
        "--images",
        action="store_true",
        help="pictures of the problems instead of their data in words, for vision-language models",
    )
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds to solve one instance")
    parser.add_argument("--workers", type=_number, default=os.cpu_count() or 1, help="processes that solve and draw")
    options = parser.parse_args(arguments)
    if not (options.train or options.validation or options.bench):
        parser.error("nothing to make: --train, --validation and --bench are all 0")
    if options.bench > BENCH_SIZE:
        parser.error(f"--bench: {BENCH} has {BENCH_SIZE} instances a task, got {options.bench}")
    if options.time_limit <= 0 or options.workers < 1:
        parser.error("--time-limit and --workers must be above 0")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    try:
        make(options)
    except KeyboardInterrupt:
        sys.exit(f"make: stopped; run the same command again to go on, {options.out / 'references.jsonl'} is kept")
    except ImportError as error:
        sys.exit(f"make: {error}")


if __name__ == "__main__":
    main()
