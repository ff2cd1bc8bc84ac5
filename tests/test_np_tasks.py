"""The fourteen NP-hard tasks: instances, prompts, verifiers, solvers, names of solutions, pictures."""

import functools
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.table import Table
from matplotlib.text import Text

from dmpo.tasks.np_bench import CATEGORIES, LEVELS, TASKS, Instance, Reference, Rng, Task, Unparsed, content_hash
from dmpo.tasks.np_bench.graphs import GraphTask

NAMES = list(TASKS)
GRAPHS = [name for name, task in TASKS.items() if isinstance(task, GraphTask)]
VERTEX_SETS = (
    *("maximum_clique", "maximum_independent_set", "vertex_cover", "dominating_set"),
    "feedback_vertex_set",
)
CUTS = ("minimum_cut", "maximum_cut")
ROUTES = ("tsp", "hamiltonian_cycle")
CHOICES = (*VERTEX_SETS, "knapsack", "subset_sum", "set_cover")
"""Tasks whose answers are sets of numbers."""

every_task = pytest.mark.parametrize("name", NAMES)
every_level = pytest.mark.parametrize("level", LEVELS)


@functools.cache
def solved(name: str, level: str = "easy", seed: int = 0) -> tuple[Task, Instance, Reference]:
    task = TASKS[name]
    instance = task.make(level, seed)
    return task, instance, task.solve(instance, 30)


def size(name: str, instance: Instance) -> int:
    """From 0 to it less one are the numbers that an answer may have; for colours and meetings, those of its keys."""
    kinds = {"tsp": "places", "knapsack": "items", "subset_sum": "numbers", "set_cover": "sets"}
    if name == "meeting_scheduling":
        return len(instance["meetings"])
    return len(instance[kinds[name]]) if name in kinds else instance["vertices"]


def as_graph(instance: Instance) -> networkx.Graph:
    graph = networkx.Graph()
    graph.add_nodes_from(range(instance["vertices"]))
    graph.add_edges_from(instance["edges"])
    return graph


# --- instances -------------------------------------------------------------------------------------------------------

HASHES = {
    "tsp": ("d42b3794489425ea", "9fc3905387c47e2d"),
    "hamiltonian_cycle": ("8c4bdab764c30689", "fb08d3f447c2b940"),
    "graph_coloring": ("ba0ea8e930d55b98", "4a90447ba94ec720"),
    "maximum_clique": ("a3c6faab42b3e8ce", "188b1f1f72e95d2c"),
    "maximum_independent_set": ("8b0266cd84093c82", "a3f5843cecaf46b7"),
    "vertex_cover": ("6e7e2581b0d53ca9", "c76ba6193ca3f2a8"),
    "dominating_set": ("d51d3800e99cdf5d", "3579eb1ac5266beb"),
    "feedback_vertex_set": ("ff95716a596c156e", "06b2747355333e39"),
    "minimum_cut": ("941a79b967a2cb9d", "e75ad0b4cb939105"),
    "maximum_cut": ("e531f2ae1e335771", "544bd7c136422723"),
    "knapsack": ("11677b8dcad04ff2", "ccdd2caa370d791e"),
    "subset_sum": ("0ec52f493eb7e0dc", "3a72be3e7e4a3079"),
    "set_cover": ("c7bc5df554357075", "8c177ed0255cac76"),
    "meeting_scheduling": ("f7cdccd03954eb29", "ac6b114301716e4a"),
}
"""Of the easy instance of seed 0 and the bench instance of seed 7."""


def test_there_are_fourteen_tasks_in_the_categories():
    assert len(TASKS) == 14 and all(name == task.name for name, task in TASKS.items())
    assert {task.category for task in TASKS.values()} == set(CATEGORIES)
    assert all(tuple(task.sizes) == LEVELS for task in TASKS.values())


@every_task
def test_instances_are_those_of_the_first_release(name):
    task = TASKS[name]
    assert tuple(content_hash(task.make(*item))[:16] for item in (("easy", 0), ("bench", 7))) == HASHES[name]


@every_level
@every_task
def test_an_instance_depends_on_task_level_and_seed_alone(name, level):
    task = TASKS[name]
    instances = [task.make(level, seed) for seed in range(8)]
    assert instances == [task.make(level, seed) for seed in range(8)]
    assert len(set(map(content_hash, instances))) == 8
    assert json.loads(json.dumps(instances)) == instances


def test_levels_and_tasks_have_random_numbers_of_their_own():
    draws = {tuple(Rng(name, level, 0).random() for _ in range(3)) for name in NAMES for level in LEVELS}
    assert len(draws) == len(NAMES) * len(LEVELS)


@every_task
def test_a_level_that_there_is_not_is_named(name):
    with pytest.raises(ValueError, match="level must be one of easy, medium, hard, bench, got 'simple'"):
        TASKS[name].make("simple", 0)


@every_level
@every_task
def test_sizes_are_those_of_the_level(name, level):
    task = TASKS[name]
    sizes = task.sizes[level]
    for seed in range(5):
        instance = task.make(level, seed)
        number = size(name, instance)
        if name == "set_cover":
            (few, many), (low, high) = sizes
            assert few <= instance["elements"] <= many and low <= number <= high
            assert all(sum(element in found for found in instance["sets"]) > 1 for element in range(few))
        elif name == "meeting_scheduling":
            (low, high), (_, people), (few, many), hours = sizes
            assert low <= number <= high and few <= len(instance["seats"]) <= many and instance["hours"] == hours
            assert all(0 <= person < people for meeting in instance["meetings"] for person in meeting["people"])
        elif name == "minimum_cut":
            assert number % 2 == 0 and sizes[0] <= number // 2 <= sizes[1]
        else:
            assert sizes[0] <= number <= sizes[1]
        if name in GRAPHS:
            edges = instance["edges"]
            assert edges == sorted(edges) and all(a < b for a, b in edges) and len(set(map(tuple, edges))) == len(edges)
            assert networkx.is_connected(as_graph(instance)) and len(edges) >= number + 2


# --- prompts ---------------------------------------------------------------------------------------------------------


@every_task
def test_the_worked_example_is_right(name):
    """Half of those of another implementation are wrong."""
    task = TASKS[name]
    example, answer = task.example()
    reference = task.solve(example, 30)
    assert reference.status == "optimal"
    assert task.verify(example, answer).value == reference.value
    # It is what the prompt ends with, and what is read there.
    prompt = task.prompt(task.make("easy", 0))
    assert prompt.endswith(f"Answer: {json.dumps(answer)}")
    assert task.verify(example, task.parse(prompt)).value == reference.value


@every_level
@every_task
def test_prompts_are_short(name, level):
    """Those of another implementation have 25,000 characters, most of them zeros."""
    task = TASKS[name]
    most = {"easy": 4_000, "bench": 12_000}.get(level, 8_000)
    assert max(len(task.prompt(task.make(level, seed))) for seed in range(5)) < most


@every_task
def test_a_picture_stands_for_the_data(name):
    task = TASKS[name]
    instance = task.make("medium", 1)
    text, picture = task.prompt(instance), task.prompt(instance, picture="<image>")
    assert task.data(instance) in text and "<image>" not in text
    assert task.data(instance) not in picture and picture.count("<image>") == 1 and task.how_to_read in picture
    assert task.question(instance) in text and task.question(instance) in picture


@every_task
def test_the_prompt_says_all_that_the_instance_has(name):
    """Two instances with the same prompt would be the same problem; of TSP, the distances are the problem."""
    task = TASKS[name]
    seen = {}
    for seed in range(30):
        instance = task.make("easy", seed)
        seen.setdefault(task.prompt(instance), instance)
        content = instance["distances"] if name == "tsp" else instance
        known = seen[task.prompt(instance)]
        assert content == (known["distances"] if name == "tsp" else known)
    if name in GRAPHS:  # the edges can be read off
        _, *lines = task.data(instance).splitlines()
        rows = [line.split(": ") for line in lines]
        assert [[int(a), int(b)] for a, others in rows for b in others.split()] == instance["edges"]


# --- verifiers and solvers, against the definitions ------------------------------------------------------------------


def objective(name: str, instance: Instance, answer: Any) -> int | None:
    """The value of an answer of the right shape, from the problem's definition; None where it is not valid."""
    if name in GRAPHS:
        graph = as_graph(instance)
    if name in VERTEX_SETS:
        chosen = set(answer)
        left = graph.subgraph(set(graph) - chosen)
        inside = graph.subgraph(chosen).number_of_edges()
        valid = {
            "maximum_clique": lambda: inside == len(chosen) * (len(chosen) - 1) // 2,
            "maximum_independent_set": lambda: inside == 0,
            "vertex_cover": lambda: left.number_of_edges() == 0,
            "dominating_set": lambda: networkx.is_dominating_set(graph, chosen),
            "feedback_vertex_set": lambda: not networkx.cycle_basis(left),
        }[name]
        return len(chosen) if chosen and valid() else None
    if name in CUTS:
        sizes = len(answer), len(graph) - len(answer)
        wrong = sizes[0] != sizes[1] if name == "minimum_cut" else 0 in sizes
        return None if wrong else networkx.cut_size(graph, answer)
    if name == "graph_coloring":
        return None if any(answer[a] == answer[b] for a, b in graph.edges) else len(set(answer))
    if name == "tsp":
        steps = zip(answer, [*answer[1:], answer[0]], strict=True)
        return sum(instance["distances"][min(step)][max(step) - min(step) - 1] for step in steps)
    if name == "hamiltonian_cycle":
        closed = len(answer) > 2 and networkx.is_path(graph, [*answer, answer[0]])
        return len(answer) if closed else None
    if name == "knapsack":
        weight, value = (sum(instance["items"][item][part] for item in answer) for part in (0, 1))
        return value if weight <= instance["capacity"] else None
    if name == "subset_sum":
        return len(answer) if sum(instance["numbers"][place] for place in answer) == instance["target"] else None
    if name == "set_cover":
        covered = set(itertools.chain.from_iterable(instance["sets"][number] for number in answer))
        return len(answer) if len(covered) == instance["elements"] else None
    taken = Counter()
    for number, room, start in answer:
        meeting = instance["meetings"][number]
        if len(meeting["people"]) > instance["seats"][room] or start + meeting["hours"] > instance["hours"]:
            return None
        for hour in range(start, start + meeting["hours"]):
            taken.update([("room", room, hour), *(("person", person, hour) for person in meeting["people"])])
    if not answer or max(taken.values()) > 1:
        return None
    return sum(instance["meetings"][number]["importance"] for number, _, _ in answer)


def every_answer(name: str, instance: Instance) -> Iterator[Any]:
    """All answers of the right shape. A cut is met twice, by either side, and so is a route, in either direction."""
    number = size(name, instance)
    if name == "tsp":
        return ([0, *order] for order in itertools.permutations(range(1, number)))
    if name == "hamiltonian_cycle":
        return (
            [chosen[0], *order]
            for length in range(1, number + 1)
            for chosen in itertools.combinations(range(number), length)
            for order in itertools.permutations(chosen[1:])
        )
    if name == "graph_coloring":

        def grow(colours: list[int]) -> Iterator[list[int]]:
            if len(colours) == number:
                yield colours
                return
            for colour in range(max(colours, default=-1) + 2):
                yield from grow([*colours, colour])

        return grow([])
    if name == "meeting_scheduling":
        places = list(itertools.product(range(len(instance["seats"])), range(instance["hours"])))
        plans = itertools.product([None, *places], repeat=number)
        return ([[meeting, *place] for meeting, place in enumerate(plan) if place] for plan in plans)
    return (list(chosen) for length in range(number + 1) for chosen in itertools.combinations(range(number), length))


@pytest.mark.parametrize("seed", [0, 1])
@every_task
def test_no_answer_beats_an_optimal_reference_and_verifier_and_names_follow_the_definition(name, seed):
    """References of another implementation are beaten (TSP), or reached by no answer (clique, independent set, ...)."""
    task, instance, reference = solved(name, seed=seed)
    if name == "meeting_scheduling":  # all answers to four meetings and three hours, or there are too many
        instance = {**instance, "hours": 3, "meetings": instance["meetings"][:4]}
        reference = task.solve(instance, 30)
    assert reference.status == "optimal" and reference.bound == reference.value
    best, valid, names = None, 0, set()
    for answer in every_answer(name, instance):
        value, verdict = objective(name, instance, answer), task.verify(instance, answer)
        assert (verdict.valid, verdict.value) == (value is not None, value), (answer, verdict)
        if value is None:
            assert verdict.reason
            continue
        valid += 1
        names.add(task.canonical(instance, answer))
        best = value if best is None else (max if task.maximise else min)(best, value)
        assert 0 < task.quality(value, reference.value) <= 1 or value == 0
    assert best == reference.value
    assert task.quality(best, reference.value) == 1
    assert len(names) == valid / (2 if name in (*CUTS, *ROUTES) else 1)


@pytest.mark.parametrize("level", ["easy", "medium"])
@every_task
def test_a_reference_is_a_valid_answer_of_its_value(name, level):
    for seed in range(3):
        task, instance, reference = solved(name, level, seed)
        verdict = task.verify(instance, reference.solution)
        assert verdict.valid and verdict.value == reference.value and verdict.reason == ""
        assert task.quality(verdict.value, reference.value) == 1
        assert reference.status == "optimal" and reference.solver
        assert json.loads(json.dumps(reference.solution)) == reference.solution
        assert task.parse(f"Answer: {json.dumps(reference.solution)}") in (
            reference.solution,
            reference.solution[0],  # one meeting alone
        )


@every_task
def test_whatever_a_solver_finds_is_valid_and_no_worse_than_the_trivial_answer(name):
    task = TASKS[name]

    @settings(max_examples=12, deadline=None)
    @given(st.sampled_from(LEVELS[:2]), st.integers(0, 10**9))
    def check(level: str, seed: int) -> None:
        instance = task.make(level, seed)
        reference = task.solve(instance, 30)
        verdict = task.verify(instance, reference.solution)
        assert verdict.valid and verdict.value == reference.value
        trivial = task.verify(instance, task.trivial(instance))
        assert name == "subset_sum" or trivial.valid
        assert not trivial.valid or task.quality(trivial.value, reference.value) <= 1

    check()


@pytest.mark.parametrize("name", ["hamiltonian_cycle", "graph_coloring", "maximum_clique", "knapsack", "set_cover"])
def test_bench_instances_are_solved_to_optimality(name):
    task, instance, reference = solved(name, "bench", 0)
    assert reference.status == "optimal" and task.verify(instance, reference.solution).value == reference.value


def test_a_solver_out_of_time_says_so():
    task = TASKS["minimum_cut"]
    reference = task.solve(task.make("bench", 0), 0)
    assert reference.status == "feasible" and reference.bound < reference.value
    with pytest.raises(RuntimeError, match="found no solution in 0 s: .*; give it more time"):
        TASKS["tsp"].solve(TASKS["tsp"].make("bench", 0), 0)


@pytest.mark.parametrize(
    ("name", "value", "reference", "expected"),
    [
        ("knapsack", 5, 10, 0.5),
        ("knapsack", 10, 10, 1.0),
        ("knapsack", 0, 10, 0.0),
        ("knapsack", 0, 0, 1.0),
        ("knapsack", 12, 10, 1.2),
        ("tsp", 20, 10, 0.5),
        ("tsp", 10, 10, 1.0),
        ("tsp", 8, 10, 1.25),
    ],
)
def test_quality_is_the_ratio_to_the_reference(name, value, reference, expected):
    assert TASKS[name].quality(value, reference) == pytest.approx(expected)


# --- answers that break a constraint ---------------------------------------------------------------------------------


def broken(name: str, instance: Instance, solution: Any) -> Iterator[tuple[Any, str]]:
    """Answers that are not valid, and what the reason says."""
    number = size(name, instance)
    what = {"tsp": "city", "knapsack": "item", "subset_sum": "position", "set_cover": "set"}.get(name, "vertex")
    if name in (*ROUTES, *CHOICES, *CUTS):
        one, *rest = solution
        twice = [*solution, one] if name not in ROUTES else [one, *rest[:-1], rest[0]]
        yield twice, f"{what} {twice[-1]} is named more than once"
        for wrong in (number, -1, -number, 10**11):
            yield [*rest, wrong], f"there is no {what} {wrong}; they are numbered from 0 to {number - 1}"
        yield [[[one]]], f"a list of {what} numbers is wanted"
        yield [*rest, [one]], f"a list of {what} numbers is wanted"
    if name in GRAPHS:
        graph = as_graph(instance)
        everything = set(graph)
        a, b = min(networkx.non_edges(graph))
        a, b = sorted((a, b))
        c, d = instance["edges"][-1]
        apart, joined = f"no edge joins the vertices {a} and {b}", f"edge joins the vertices {c} and {d}"
    if name in VERTEX_SETS:
        yield [], "no vertex is chosen"
    if name == "tsp":
        yield solution[:-1], f"city {solution[-1]} is not visited"
        yield [], "city 0 is not visited"
        yield [*solution, solution[1]], f"city {solution[1]} is named more than once"
        yield [*solution, *solution], "is named more than once"
    elif name == "hamiltonian_cycle":
        yield [a, b, next(iter(everything - {a, b}))], apart
        yield [c, d], "at least three vertices"
        yield [c, d, c], "at least three vertices"
        yield [c], "at least three vertices"
        yield [], "at least three vertices"
        yield [*solution, *solution], "is named more than once"
    elif name == "graph_coloring":
        colours = list(range(number))
        colours[d] = c
        yield colours, f"an {joined}, and both have the colour {c}"
        yield [[vertex, colours[vertex]] for vertex in reversed(range(number))], f"an {joined}"
        yield [0] * number, "both have the colour 0"
        yield solution[:-1], f"{number - 1} colours for {number} vertices"
        yield [*solution, 0], f"{number + 1} colours for {number} vertices"
        pairs = [[vertex, colour] for vertex, colour in enumerate(solution)]
        yield pairs[:-1], f"{number - 1} colours for {number} vertices"
        yield [*pairs[:-1], [number, 0]], f"there is no vertex {number}"
        yield [*pairs[:-1], [-1, 0]], "there is no vertex -1"
        yield [*pairs[:-1], [2, 0]], "vertex 2 is named more than once"
        yield [*pairs[:-1], [1, 0, 2]], "pairs of a vertex and its colour"
        yield [*pairs[:-1], 0], "a list of the vertices' colours is wanted"
        yield [], "a list of colours is wanted"
    elif name == "maximum_clique":
        yield [a, b], apart
        # One more than an optimal clique has is none.
        yield [*solution, min(everything - set(solution))], "no edge joins the vertices"
    elif name == "maximum_independent_set":
        yield [d, c], joined
        yield [*solution, min(everything - set(solution))], "an edge joins the vertices"
    elif name == "vertex_cover":
        yield sorted(everything - {c, d}), f"neither end of the edge {c}-{d} is chosen"
        yield solution[1:], "neither end of the edge"
    elif name == "dominating_set":
        chosen = everything - {a} - set(graph[a])
        bare = min(vertex for vertex in everything - chosen if not chosen & set(graph[vertex]))
        yield sorted(chosen), f"vertex {bare} is not chosen and has no neighbour that is"
        if len(solution) > 1:
            yield solution[1:], "is not chosen and has no neighbour that is"
    elif name == "feedback_vertex_set":
        cycle = min(networkx.simple_cycles(graph), key=len)
        last = max(graph.subgraph(cycle).edges, key=sorted)
        yield sorted(everything - set(cycle)), f"a cycle through the edge {min(last)}-{max(last)} is left"
        if len(solution) > 1:
            yield solution[1:], "a cycle through the edge"
    elif name in CUTS:
        other = sorted(everything - set(solution))
        yield [solution, other[:-1]], f"vertex {other[-1]} is on neither side"
        yield [solution, [*other, solution[0]]], f"vertex {solution[0]} is named more than once"
        yield [solution, [*other[:-1], number]], f"there is no vertex {number}"
        yield [solution, [other]], "each side must be a list of vertex numbers"
        yield [solution, other, []], "a list of vertex numbers is wanted"
        for wrong, count in ((sorted(everything), number), ([], 0), ([[], sorted(everything)], 0)):
            sizes = f"the sides have {count} and {number - count} vertices"
            yield wrong, sizes if name == "minimum_cut" else "one side has no vertices"
        if name == "minimum_cut":
            yield solution[1:], f"the sides have {number // 2 - 1} and {number // 2 + 1} vertices"
            yield [solution[1:], [*other, solution[0]]], "they must have the same number"
    elif name == "knapsack":
        weight = sum(weight for weight, _ in instance["items"])
        yield list(range(number)), f"the items weigh {weight}; at most {instance['capacity']} is allowed"
    elif name == "subset_sum":
        total, left = instance["target"], sorted(set(range(number)) - set(solution))
        yield solution[1:], f"the numbers add up to {total - instance['numbers'][solution[0]]}, not to {total}"
        yield [*solution, left[0]], f"the numbers add up to {total + instance['numbers'][left[0]]}, not to {total}"
        yield [], f"the numbers add up to 0, not to {total}"
    elif name == "set_cover":
        left = set().union(*(instance["sets"][chosen] for chosen in solution[1:]))
        yield solution[1:], f"element {min(set(range(instance['elements'])) - left)} is in none of the sets"
        yield [], "element 0 is in none of the sets"
    elif name == "meeting_scheduling":
        (one, room, start), *rest = solution
        length, rooms, hours = instance["meetings"][one]["hours"], len(instance["seats"]), instance["hours"]
        yield [[one, room, hours - length + 1]], f"meeting {one} does not lie between the hours 0 and {hours}"
        yield [[one, room, -1]], f"meeting {one} does not lie between the hours 0 and {hours}"
        yield [*rest, [number, room, start]], f"there is no meeting {number}"
        yield [*rest, [-1, room, start]], "there is no meeting -1"
        yield [*rest, [one, rooms, start]], f"there is no room {rooms}"
        yield [*rest, [one, -1, start]], "there is no room -1"
        yield [*solution, [one, room, start]], f"meeting {one} takes place more than once"
        for wrong in ([], [one, room], [one, room, start, 0], [[one, room]], [[one, [room]]], [[one], room, start]):
            yield wrong, "[meeting, room, hour] for each meeting is wanted"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", ["easy", "medium"])
@every_task
def test_what_breaks_a_constraint_is_not_valid_and_the_reason_names_it(name, level, seed):
    task, instance, reference = solved(name, level, seed)
    answers = list(broken(name, instance, reference.solution))
    assert len(answers) > 7
    for answer, reason in answers:
        verdict = task.verify(instance, answer)
        assert not verdict.valid and verdict.value is None, answer
        assert reason in verdict.reason, (answer, verdict.reason)


MEETINGS = {
    "hours": 4,
    "seats": [3, 2],
    "meetings": [
        {"hours": 2, "importance": 5, "people": [0, 1]},
        {"hours": 1, "importance": 4, "people": [1, 2]},
        {"hours": 2, "importance": 3, "people": [3, 4]},
        {"hours": 1, "importance": 2, "people": [2, 3, 4]},
    ],
}


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ([[0, 0, 0], [1, 1, 1]], "person 1 is in the meetings 0 and 1 at the same time"),
        ([[1, 1, 1], [0, 0, 0]], "person 1 is in the meetings 1 and 0 at the same time"),
        ([[2, 1, 1], [3, 0, 2]], "person 3 is in the meetings 2 and 3 at the same time"),
        ([[0, 0, 0], [2, 0, 1]], "the meetings 0 and 2 are in room 0 at the same time"),
        ([[0, 0, 2], [2, 0, 2]], "the meetings 0 and 2 are in room 0 at the same time"),
        ([[0, 0, 0], [0, 1, 2]], "meeting 0 takes place more than once"),
        ([[0, 0, 3]], "meeting 0 does not lie between the hours 0 and 4"),
        ([[1, 0, 4]], "meeting 1 does not lie between the hours 0 and 4"),
        ([[3, 1, 0]], "room 1 has 2 seats and meeting 3 has 3 people"),
        ([[0, 0, 0], [1, 1, 2], [2, 0, 2]], 12),
        ([[0, 0, 0], [1, 0, 2], [3, 0, 3], [2, 1, 0]], 14),
        ([[0, 0, 2]], 5),
        ([0, 0, 2], 5),
        ([[0, [0, 2]]], 5),
        ([0, [0, 2]], 5),
        ([[0, [0, 0]], [2, [0, 2]]], 8),
    ],
)
def test_plans_of_meetings(plan, reason):
    verdict = TASKS["meeting_scheduling"].verify(MEETINGS, plan)
    assert (verdict.value or verdict.reason) == reason


def test_a_plan_as_a_mapping_is_read():
    task = TASKS["meeting_scheduling"]
    for text, value in (
        ("{0: (0, 2)}", 5),
        ("{0: [0, 0], 2: [0, 2]}", 8),
        ("[0, 0, 2]", 5),
        ("(0, 0, 0), (2, 0, 2)", 8),
    ):
        answer = task.parse(f"Answer: {text}")
        assert task.verify(MEETINGS, answer).value == value
        assert task.canonical(MEETINGS, answer) in ("[[0, 0, 2]]", "[[0, 0, 0], [2, 0, 2]]")


# --- names of solutions ----------------------------------------------------------------------------------------------


def same(name: str, instance: Instance, answer: Any) -> Iterator[Any]:
    """Other ways to say the same."""
    if name in ROUTES:
        for turn in range(len(answer)):
            turned = answer[turn:] + answer[:turn]
            yield from (turned, turned[::-1], [*turned, turned[0]], [*turned[::-1], turned[-1]])
    elif name == "graph_coloring":
        yield [7 - colour for colour in answer]
        yield [(colour + 1) * 1000 for colour in answer]
        pairs = [[vertex, colour] for vertex, colour in enumerate(answer)]
        yield from (pairs, pairs[::-1])
    elif name in CUTS:
        other = sorted(set(range(instance["vertices"])) - set(answer))
        yield from (answer[::-1], other, other[::-1], [answer, other], [other, answer], [other[::-1], answer])
    elif name == "meeting_scheduling":
        yield answer[::-1]
        yield [[number, [room, start]] for number, room, start in answer]
    else:
        yield from (answer[::-1], answer[1:] + answer[:1])


@every_task
def test_the_same_solution_has_the_same_name_however_it_is_said(name):
    for seed in range(3):
        task, instance, reference = solved(name, "medium", seed)
        canonical = task.canonical(instance, reference.solution)
        others = list(same(name, instance, reference.solution))
        assert len(others) > 1
        for answer in others:
            assert task.verify(instance, answer).value == reference.value, answer
            assert task.canonical(instance, answer) == canonical, answer
            # As a reply says it.
            read = task.parse(f"Answer: {json.dumps(answer)}")
            assert task.verify(instance, read).value == reference.value
            assert task.canonical(instance, read) == canonical


@every_task
def test_different_solutions_have_different_names(name):
    task, instance, reference = solved(name, "medium")
    trivial = task.trivial(instance)
    if task.verify(instance, trivial).valid:
        assert task.canonical(instance, trivial) != task.canonical(instance, reference.solution)
    pairs = {
        "tsp": ([0, 1, 2, 3, *range(4, size(name, instance))], [0, 2, 1, 3, *range(4, size(name, instance))]),
        "graph_coloring": (
            list(range(instance.get("vertices", 0))),
            [0, 0, *range(1, instance.get("vertices", 2) - 1)],
        ),
        "minimum_cut": (list(range(instance.get("vertices", 0) // 2)), list(range(0, instance.get("vertices", 0), 2))),
        "maximum_cut": ([1], [2]),
        "meeting_scheduling": ([[0, 0, 0]], [[0, 0, 1]]),
        "hamiltonian_cycle": ([0, 1, 2, 3], [0, 2, 1, 3]),
        "subset_sum": ([0, 1], [0, 2]),
    }
    one, other = pairs.get(name, ([0], [1]))
    assert task.canonical(instance, one) != task.canonical(instance, other)


# --- answers that need no thought ------------------------------------------------------------------------------------


@every_level
@every_task
def test_the_trivial_answer_is_valid(name, level):
    task = TASKS[name]
    verdicts = [task.verify(instance, task.trivial(instance)) for instance in (task.make(level, s) for s in range(8))]
    if name == "subset_sum":
        assert sum(verdict.valid for verdict in verdicts) <= 4
    else:
        assert all(verdict.valid for verdict in verdicts)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *(("tsp", 0.6), ("hamiltonian_cycle", 0.4), ("graph_coloring", 0.5), ("maximum_clique", 0.4)),
        *(("maximum_independent_set", 0.4), ("vertex_cover", 0.6), ("dominating_set", 0.4), ("minimum_cut", 0.6)),
        *(("feedback_vertex_set", 0.5), ("maximum_cut", 0.8), ("knapsack", 0.8), ("set_cover", 0.6)),
        ("meeting_scheduling", 0.5),
    ],
)
def test_the_trivial_answer_is_a_bad_one(name, most):
    """In another implementation the split by number has half of the best cut, since communities are in order."""
    ratios = []
    for seed in range(8):
        task, instance, reference = solved(name, "medium", seed)
        ratios.append(task.quality(task.verify(instance, task.trivial(instance)).value, reference.value))
    assert statistics.mean(ratios) < most


@pytest.mark.parametrize("name", GRAPHS)
def test_vertex_numbers_say_nothing_of_the_graph(name):
    """Neither of degrees nor of who is joined: planted cycles, covers and sides do not follow the numbers."""
    task = TASKS[name]
    low, high, steps, pairs, edges, number = 0, 0, 0, 0, 0, 0
    for seed in range(300):
        instance = task.make("medium", seed)
        vertices = instance["vertices"]
        for a, b in instance["edges"]:
            steps += b - a in (1, vertices - 1)
            for vertex in (a, b):
                low, high = low + (vertex < vertices // 2), high + (vertex >= vertices - vertices // 2)
        number += vertices
        edges += len(instance["edges"])
        pairs += vertices * (vertices - 1) / 2
    assert low / high == pytest.approx(1, abs=0.05)
    assert (steps / number) / (edges / pairs) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", CHOICES)
def test_solutions_lie_anywhere(name):
    """The mean place of what is chosen is the middle."""
    places = []
    for seed in range(200):
        task = TASKS[name]
        instance = task.make("easy", 10_000 + seed)
        number = size(name, instance)
        places += [item / (number - 1) for item in task.solve(instance, 30).solution]
    assert statistics.mean(places) == pytest.approx(0.5, abs=0.1)


# --- junk ------------------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-2, 9),
    st.integers(),
    st.sampled_from((10**11, -(10**11), 10**12, 2**63, -(2**200), 10**4000)),
)
LEAVES = st.one_of(NUMBERS, st.none(), st.booleans(), st.floats(), st.text(max_size=3), st.binary(max_size=3))


def containers(items: st.SearchStrategy) -> st.SearchStrategy:
    keys = st.one_of(
        st.integers(-2, 9), st.text(max_size=2), st.none(), st.tuples(st.integers(0, 3), st.integers(0, 3))
    )
    return st.one_of(
        st.lists(items, max_size=9),
        st.lists(items, max_size=4).map(tuple),
        st.dictionaries(keys, items, max_size=4),
        st.sets(st.one_of(st.integers(-2, 9), st.text(max_size=2), st.none()), max_size=5),
        st.frozensets(st.frozensets(st.integers(0, 9), max_size=3), max_size=3),
    )


JUNK = st.one_of(
    st.recursive(LEAVES, containers, max_leaves=20),
    st.recursive(st.integers(-1, 8), lambda items: st.lists(items, max_size=9), max_leaves=30),
    st.lists(st.lists(st.integers(-1, 4), min_size=3, max_size=3), max_size=5),
    st.permutations(range(8)),
)
EASY = {name: task.make("easy", 0) for name, task in TASKS.items()}


@settings(max_examples=400, deadline=None)
@given(JUNK)
def test_no_answer_whatever_raises(answer):
    for name, task in TASKS.items():
        verdict = task.verify(EASY[name], answer)
        assert type(verdict.valid) is bool
        assert (type(verdict.value) is int and not verdict.reason) if verdict.valid else verdict.reason


def nested(depth: int) -> list:
    answer: list = []
    for _ in range(depth):
        answer = [answer]
    return answer


@pytest.mark.parametrize(
    "answer",
    [
        *(None, True, False, 0.0, float("nan"), "", "0", b"0", object(), int, 10**5000, -(10**5000)),
        *([None], [True] * 8, [0.0, 1.0], ["0", "1"], [[0], None], [10**5000], [[10**5000]], {0: None}, {"0": 1}),
        *({None, 0}, {0, "a"}, nested(3), nested(5_000), [[]], [[[]]], {}, set(), (), [0] * 1_000_000, range(8)),
        *(np.arange(8), np.int64(3), [np.int64(0)], Unparsed("no reason"), Unparsed),
    ],
    ids=lambda answer: type(answer).__name__,
)
@every_task
def test_odd_answers_are_not_valid(name, answer):
    """In another implementation None or a nested list ends the whole evaluation."""
    verdict = TASKS[name].verify(EASY[name], answer)
    if name == "knapsack" and not verdict.reason:  # nothing is an answer there
        assert verdict.value == 0
    else:
        assert not verdict.valid and len(verdict.reason) < 200


@every_task
def test_a_list_that_holds_itself_is_not_valid(name):
    answer: list = [0, 1]
    answer.append(answer)
    assert not TASKS[name].verify(EASY[name], answer).valid


# --- cheats and wrong rejections that another implementation has -----------------------------------------------------


@pytest.mark.parametrize("name", (*ROUTES, *CHOICES, *CUTS))
def test_cheat_repeated_numbers_do_not_count_twice(name):
    task, instance, reference = solved(name, "bench" if name == "maximum_clique" else "easy")
    for times in (2, 50):
        verdict = task.verify(instance, reference.solution * times)
        assert not verdict.valid and "is named more than once" in verdict.reason


@every_task
def test_cheat_near_equal_floats_are_no_numbers(name):
    task, instance, reference = solved(name)
    number = size(name, instance)
    for answer in (
        [index * 1e-9 for index in range(number)],
        [1 + index * 1e-9 for index in range(number)],
        [float(index) for index in range(number)],
        [np.float64(index) for index in range(number)],
        [False, True, *range(2, number)],
        [[0, 0.0, 0.0]],
    ):
        assert not task.verify(instance, answer).valid
    assert isinstance(task.parse("Answer: [1.0, 1.0000001]"), Unparsed)


def test_cheat_one_position_again_and_again_is_no_subset():
    task = TASKS["subset_sum"]
    instance = {"numbers": [1, 4, 5, 7], "target": 9}
    assert task.verify(instance, [1, 2]).value == 2
    assert task.verify(instance, [0] * 9).reason == "position 0 is named more than once"
    assert task.verify(instance, [1, 1, 0]).reason == "position 1 is named more than once"
    # A position from the end would be the same one under another name.
    assert task.verify(instance, [-3, 1]).reason.startswith("there is no position -3")


def test_cheat_one_meeting_in_every_room_takes_place_once():
    task = TASKS["meeting_scheduling"]
    assert "more than once" in task.verify(MEETINGS, [[0, 0, 0], [0, 1, 0]]).reason
    assert "more than once" in task.verify(MEETINGS, [[0, 0, 0], [0, 0, 2]]).reason
    assert "more than once" in task.verify(MEETINGS, [[0, 0, 0], [0, 0, 0]]).reason


def test_cheat_double_booked_people_are_noticed():
    task = TASKS["meeting_scheduling"]
    for start in range(4):
        meets = start in (1, 2)
        verdict = task.verify(MEETINGS, [[0, 0, 1], [1, 1, start]])
        assert verdict.valid != meets and ("person 1" in verdict.reason) == meets


def test_cheat_a_cycle_through_a_vertex_that_there_is_not():
    task, instance, reference = solved("hamiltonian_cycle")
    number = instance["vertices"]
    cycle = list(range(number, number + 50))
    assert "there is no vertex" in task.verify(instance, cycle).reason
    assert f"there is no vertex {number}" in task.verify(instance, [*reference.solution, number]).reason
    assert "there is no vertex -1" in task.verify(instance, [*reference.solution, -1]).reason


@every_task
def test_cheat_code_in_an_answer_does_not_run(name, tmp_path):
    task = TASKS[name]
    trace = tmp_path / "trace"
    for code in (f"__import__('os').system('touch {trace}')", f"[open('{trace}', 'w') for _ in [0]]", "list(range(8))"):
        for text in (f"Answer: {code}", f"Answer: [{code}]", f"\\boxed{{{code}}}"):
            assert not task.verify(EASY[name], task.parse(text)).valid
    assert not trace.exists()


@pytest.mark.parametrize("name", ["maximum_clique", "maximum_independent_set", "meeting_scheduling"])
def test_wrong_reference_each_is_reached_by_a_valid_answer(name):
    for level in ("medium", "hard"):
        task, instance, reference = solved(name, level, 1)
        assert objective(name, instance, reference.solution) == reference.value


def test_wrong_reference_no_exchange_of_two_edges_shortens_a_tour():
    task, instance, reference = solved("tsp", "medium", 2)
    tour = reference.solution
    for i, j in itertools.combinations(range(1, len(tour) + 1), 2):
        other = tour[:i] + tour[i:j][::-1] + tour[j:]
        assert task.verify(instance, other).value >= reference.value


@pytest.mark.parametrize(
    "form",
    [
        *("Answer: LIST.", "answer: LIST", "Answer: **LIST**", "\\boxed{LIST}", "**Answer:** LIST", "Answer: `LIST`"),
        *("Answer:\n```\nLIST\n```", "Answer: LIST (I hope)", "Answer: SET", "Answer: TUPLE", "Answer: \\(LATEX\\)"),
    ],
)
@every_task
def test_wrong_rejection_full_stops_sets_boxes_and_lower_case_are_read(name, form):
    task, instance, reference = solved(name)
    text = str(reference.solution)
    if "SET" in form and not isinstance(reference.solution[0], list):
        text = text.replace("[", "{").replace("]", "}")
    if "TUPLE" in form:
        text = text.replace("[", "(").replace("]", ")")
    if "LATEX" in form:
        text = text.replace("[", "\\left[").replace("]", "\\right]")
    for word in ("LIST", "SET", "TUPLE", "LATEX"):
        form = form.replace(word, text)
    assert task.verify(instance, task.parse(f"I think so.\n{form}")).value == reference.value


@every_task
def test_wrong_reading_of_two_answers_every_task_takes_the_last(name):
    task, instance, reference = solved(name)
    right, wrong = f"Answer: {reference.solution}", "Answer: [[5, 5, 5]]"
    assert task.verify(instance, task.parse(f"{wrong}\nNo.\n{right}")).value == reference.value
    assert not task.verify(instance, task.parse(f"{right}\nNo.\n{wrong}")).valid
    assert not task.verify(instance, task.parse(f"{right}\nNo.\nAnswer: I do not know.")).valid


@every_task
def test_crash_on_replies_that_are_no_text_or_deeply_nested(name):
    task = TASKS[name]
    for reply in (
        None,
        7,
        b"Answer: [0]",
        ["Answer: [0]"],
        "Answer: " + "[" * 100_000,
        "Answer: [[[[[0]]]]]",
        "Answer: [[[]]]",
    ):
        verdict = task.verify(EASY[name], task.parse(reply))
        assert (not verdict.valid and verdict.reason) or (name == "knapsack" and verdict.value == 0)


# --- pictures --------------------------------------------------------------------------------------------------------


def drawn(task: Task, instance: Instance, answer: Any = None) -> tuple[np.ndarray, set[str]]:
    """Pixels and texts of a small picture."""
    figure = Figure(figsize=(7, 7), dpi=30)
    canvas = FigureCanvasAgg(figure)
    task.draw(instance, figure.add_subplot(), answer)
    canvas.draw()
    cells = [cell.get_text() for table in figure.findobj(Table) for cell in table.get_celld().values()]
    texts = {text.get_text() for text in (*figure.findobj(Text), *cells) if text.get_visible()}
    return np.asarray(canvas.buffer_rgba())[..., :3].astype(int), texts


@pytest.mark.parametrize("level", ["easy", "medium"])
@every_task
def test_instances_and_answers_are_drawn(name, level):
    task, instance, reference = solved(name, level)
    pixels, texts = drawn(task, instance)
    assert (pixels < 200).any(2).mean() > 0.002
    assert {str(item) for item in range(size(name, instance))} <= texts
    if name == "knapsack":
        assert {str(part) for item in instance["items"] for part in item} <= texts
        assert f"capacity {instance['capacity']}" in texts
    elif name == "subset_sum":
        assert set(map(str, instance["numbers"])) <= texts and f"target {instance['target']}" in texts
    elif name == "meeting_scheduling":
        for meeting in instance["meetings"]:
            row = str(meeting["hours"]), str(meeting["importance"]), " ".join(map(str, meeting["people"]))
            assert texts.issuperset(row)
        assert all(f"room {room}: {seats}" in " ".join(texts) for room, seats in enumerate(instance["seats"]))
    with_answer, _ = drawn(task, instance, reference.solution)
    assert (with_answer != pixels).any(2).mean() > 0.001


@pytest.mark.parametrize("name", (*CUTS, "graph_coloring", "hamiltonian_cycle", "meeting_scheduling", "tsp"))
def test_other_forms_of_an_answer_give_the_same_picture(name):
    task, instance, reference = solved(name)
    forms = list(same(name, instance, reference.solution))
    if name == "graph_coloring":  # with other colours the picture is another one
        forms = forms[-2:]
    expected, _ = drawn(task, instance, reference.solution)
    for answer in forms[:5]:
        # The ends of a line have another shade where it begins elsewhere.
        assert np.abs(drawn(task, instance, answer)[0] - expected).mean() < 1


@pytest.mark.parametrize("name", ["tsp", "graph_coloring", "maximum_independent_set", "knapsack", "set_cover"])
def test_bench_instances_are_drawn(name):
    instance = TASKS[name].make("bench", 0)
    pixels, texts = drawn(TASKS[name], instance)
    assert (pixels < 200).any(2).mean() > 0.01
    assert {str(item) for item in range(size(name, instance))} <= texts


# --- imports ---------------------------------------------------------------------------------------------------------

WITHOUT_SOLVERS = """
import json, sys
for name in ("ortools", "networkx", "numpy", "matplotlib", "PIL"):
    sys.modules[name] = None
from dmpo.tasks.np_bench import LEVELS, TASKS, content_hash
from dmpo.tasks.np_bench.pictures import png
hashes, errors = {}, {}
for name, task in TASKS.items():
    for level in LEVELS:
        instance = task.make(level, 0)
        hashes[f"{name}/{level}"] = content_hash(instance)
        example, answer = task.example()
        assert task.verify(example, task.parse(task.prompt(instance))).valid
        assert task.verify(instance, task.trivial(instance)).valid or name == "subset_sum"
    assert task.canonical(example, answer)
    for what, call in (("solve", lambda: task.solve(example)), ("draw", lambda: png(task, example))):
        try:
            call()
        except ImportError as error:
            errors[f"{name}/{what}"] = str(error)
print(json.dumps({"hashes": hashes, "errors": errors, "loaded": sorted(sys.modules)}))
"""


def run(code: str, **environment: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_only_solving_and_drawing_need_more_than_python():
    found = run(WITHOUT_SOLVERS, PYTHONHASHSEED="1")
    assert len(found["errors"]) == 2 * len(TASKS)
    assert all("pip install 'verl-dmpo[np]'" in error for error in found["errors"].values())
    # Another process with other hashes of strings makes the same instances.
    assert found["hashes"] == {
        f"{name}/{level}": content_hash(task.make(level, 0)) for name, task in TASKS.items() for level in LEVELS
    }
    assert not {"torch", "verl", "ray", "pandas"} & set(found["loaded"])


def test_importing_the_tasks_loads_no_trainer_and_no_solver():
    loaded = set(run("import sys, json, dmpo.tasks.np_bench; print(json.dumps(sorted(sys.modules)))"))
    assert not {"torch", "verl", "ray", "numpy", "pandas", "ortools", "networkx", "matplotlib"} & loaded
    assert all(re.fullmatch(r"dmpo(\.tasks(\.np_bench(\..+)?)?)?", name) for name in loaded if name.startswith("dmpo"))
