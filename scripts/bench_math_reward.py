"""Throughput of the mathematics reward: answers a second, by what has to be done with them.

.venv/bin/python scripts/bench_math_reward.py --help
"""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tqdm import tqdm

from dmpo.tasks.math.reward import compute_score

# Every answer differs, so that none is known from before.
KINDS = {
    "equal text": lambda i: (str(i), f"so \\boxed{{{i}}}"),
    "number": lambda i: (str(i), f"so \\boxed{{{i + 1}}}"),
    "fraction": lambda i: (f"\\frac{{{i}}}{{7}}", f"so \\boxed{{{2 * i}/14}}"),
    "expression": lambda i: (f"{i}\\sqrt{{2}}+1", f"so \\boxed{{1+\\sqrt{{{2 * i * i}}}}}"),
    "set": lambda i: (f"\\{{1,{i},{i + 1}\\}}", f"so \\boxed{{{i + 1}, 1, {i}}}"),
    "given before": lambda i: ("5", f"so \\boxed{{{i % 8}+1}}"),
}


def work(kind: str, first: int, count: int, threads: int) -> tuple[float, int]:
    """Grade `count` answers of a kind in one process; seconds without its start, and how many were right."""
    make = KINDS[kind]
    compute_score("", "so \\boxed{1+1}", "2")  # starts the process that compares
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as executor:
        results = executor.map(lambda i: compute_score("", make(i)[1], make(i)[0])["acc"], range(first, first + count))
        right = sum(results)
    return time.perf_counter() - began, int(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=2000, help="of each kind (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="as verl's reward.num_workers (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=6, help="of each worker (default: %(default)s)")
    options = parser.parse_args()
    if min(options.answers, options.workers, options.threads) < 1:
        parser.error("--answers, --workers and --threads must be 1 or more")
    each = -(-options.answers // options.workers)
    print(f"{options.workers} workers x {options.threads} threads, {each * options.workers} answers of each kind")
    print(f"{'kind':14}{'answers/s':>12}{'right':>8}")
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        for kind in tqdm(KINDS, leave=False):
            done = [pool.submit(work, kind, 1 + n * each, each, options.threads) for n in range(options.workers)]
            done = [future.result() for future in done]
            rate = each * options.workers / max(seconds for seconds, _ in done)
            tqdm.write(f"{kind:14}{rate:12.0f}{sum(right for _, right in done) / (each * options.workers):8.0%}")


if __name__ == "__main__":
    main()
