"""Reward functions for the tests, in verl's signature. verl loads this file by its path, and picks one by name."""

import math
import time
import zlib


def graded(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Something between 0 and 1 that depends on the response alone, so that groups of any model have a signal."""
    return zlib.crc32(solution_str.encode()) % 5 / 4


def raising(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Raises for all rollouts of the number 2, and of the others for "1+...", which the second session answers."""
    if ground_truth == "2" or solution_str.startswith("1+"):
        raise ValueError(f"cannot grade {solution_str!r}")
    return graded(data_source, solution_str, ground_truth)


def always_raising(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    raise ValueError(f"cannot grade {solution_str!r}")


def text(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """A string for the number 2."""
    return "0.5" if ground_truth == "2" else graded(data_source, solution_str, ground_truth)


def not_a_number(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return math.nan if ground_truth == "3" else graded(data_source, solution_str, ground_truth)


def nothing(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return None if ground_truth == "3" else graded(data_source, solution_str, ground_truth)


def faulty(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Raises for all rollouts of the number 2, gives a string for some of 3, and NaN for 12."""
    score = graded(data_source, solution_str, ground_truth)
    match ground_truth:
        case "2":
            raise ValueError("cannot grade the number 2")
        case "3":
            return str(score) if score < 0.5 else score
        case "12":
            return math.nan
    return score


def hanging(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Hangs for the number 12."""
    if ground_truth == "12":
        time.sleep(3600)
    return graded(data_source, solution_str, ground_truth)
