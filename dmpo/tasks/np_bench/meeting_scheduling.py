"""Meeting scheduling: the most important meetings in one day, without anyone or any room being double-booked."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from .base import Instance, Reference, Rng, Task
from .pictures import PALETTE, draw_table, points
from .solvers import CpSat


class MeetingScheduling(Task):
    name = "meeting_scheduling"
    title = "Meeting scheduling"
    category = "schedule"
    maximise = True
    sizes = {  # meetings, people, rooms, hours of the day
        "easy": ((4, 5), (3, 4), (2, 2), 4),
        "medium": ((6, 7), (5, 6), (3, 4), 5),
        "hard": ((7, 9), (6, 8), (4, 5), 6),
        "bench": ((8, 10), (7, 9), (6, 7), 6),
    }
    answer_format = (
        "a list with [meeting, room, hour at which it begins] for each meeting that takes place, as in [[2, 0, 1]]"
    )

    def generate(self, rng: Rng, level: str) -> Instance:
        *ranges, hours = self.sizes[level]
        number, people, rooms = (rng.randint(*size) for size in ranges)
        while True:
            meetings = [
                {
                    "hours": rng.randint(1, 3),
                    "importance": rng.randint(1, 9),
                    "people": sorted(rng.sample(range(people), rng.randint(2, min(5, people)))),
                }
                for _ in range(number)
            ]
            seats = [rng.randint(2, 5) for _ in range(rooms)]
            load = [sum(m["hours"] for m in meetings if person in m["people"]) for person in range(people)]
            # Each meeting has a room, and somebody has not the time for all of them.
            if max(len(m["people"]) for m in meetings) <= max(seats) and max(load) > hours:
                return {"hours": hours, "seats": seats, "meetings": meetings}

    def question(self, instance: Instance) -> str:
        hours = instance["hours"]
        return (
            f"Plan a day with the hours 0 to {hours - 1}. Of the meetings 0 to {len(instance['meetings']) - 1}, choose "
            "those that take place, each once, and for each a room and the hour at which it begins. A meeting must end "
            f"within the day: one of 2 hours begins at {hours - 2} at the latest. It needs a seat for each of its "
            "people. No room and no person has two meetings at the same time. The importance of the meetings that take "
            "place must add up to as much as possible."
        )

    def data(self, instance: Instance) -> str:
        rooms = "\n".join(f"{room}: {seats}" for room, seats in enumerate(instance["seats"]))
        meetings = "\n".join(
            f"{number}: {m['hours']}, {m['importance']}, {' '.join(map(str, m['people']))}"
            for number, m in enumerate(instance["meetings"])
        )
        return (
            f"The line of a room has its number of seats:\n{rooms}\n"
            f"The line of a meeting has its length in hours, its importance and its people:\n{meetings}"
        )

    def example(self) -> tuple[Instance, Any]:
        meetings = [
            {"hours": 2, "importance": 5, "people": [0, 1]},
            {"hours": 1, "importance": 4, "people": [1, 2]},
            {"hours": 2, "importance": 3, "people": [0, 2]},
            {"hours": 2, "importance": 2, "people": [2, 3]},
        ]
        # Meetings 0 and 2 need four hours of person 0.
        return {"hours": 3, "seats": [2, 3], "meetings": meetings}, [[0, 0, 0], [1, 1, 2], [3, 1, 0]]

    def check(self, instance: Instance, answer: Any) -> int | str:
        if answer and isinstance(answer[0], int):
            answer = [answer]  # one meeting
        plan = [_flat(entry) for entry in answer]
        if not plan or any(entry is None for entry in plan):
            return "a list with [meeting, room, hour] for each meeting is wanted"
        meetings, seats, hours = instance["meetings"], instance["seats"], instance["hours"]
        for number, room, start in plan:
            if not 0 <= number < len(meetings):
                return f"there is no meeting {number}; they are numbered from 0 to {len(meetings) - 1}"
            if not 0 <= room < len(seats):
                return f"there is no room {room}; they are numbered from 0 to {len(seats) - 1}"
            meeting = meetings[number]
            if not 0 <= start <= hours - meeting["hours"]:
                return f"meeting {number} does not lie between the hours 0 and {hours}"
            if len(meeting["people"]) > seats[room]:
                return f"room {room} has {seats[room]} seats and meeting {number} has {len(meeting['people'])} people"
        for (one, room, start), (two, other_room, other_start) in combinations(plan, 2):
            if one == two:
                return f"meeting {one} takes place more than once"
            if start + meetings[one]["hours"] <= other_start or other_start + meetings[two]["hours"] <= start:
                continue
            if room == other_room:
                return f"the meetings {one} and {two} are in room {room} at the same time"
            if both := set(meetings[one]["people"]) & set(meetings[two]["people"]):
                return f"person {min(both)} is in the meetings {one} and {two} at the same time"
        return sum(meetings[number]["importance"] for number, _, _ in plan)

    def solve(self, instance: Instance, time_limit: float = 60.0) -> Reference:
        solver, hours, meetings = CpSat(), instance["hours"], instance["meetings"]
        model = solver.model
        begins, rooms, value = [], {}, 0
        of_person: dict[int, list[Any]] = {}
        of_room: list[list[Any]] = [[] for _ in instance["seats"]]
        for number, meeting in enumerate(meetings):
            length = meeting["hours"]
            begins.append(start := model.new_int_var(0, hours - length, f"start {number}"))
            takes_place = model.new_bool_var(f"takes place {number}")
            interval = model.new_optional_fixed_size_interval_var(start, length, takes_place, f"meeting {number}")
            for person in meeting["people"]:
                of_person.setdefault(person, []).append(interval)
            for room, seats in enumerate(instance["seats"]):
                if seats >= len(meeting["people"]):
                    rooms[number, room] = here = model.new_bool_var(f"{number} in {room}")
                    name = f"meeting {number} in {room}"
                    of_room[room].append(model.new_optional_fixed_size_interval_var(start, length, here, name))
            model.add(sum(here for (other, _), here in rooms.items() if other == number) == takes_place)
            value += meeting["importance"] * takes_place
        for intervals in (*of_person.values(), *of_room):
            model.add_no_overlap(intervals)
        model.maximize(value)
        solver.run(time_limit)
        plan = [
            [number, room, solver.value(begins[number])] for (number, room), here in rooms.items() if solver.value(here)
        ]
        return solver.reference(self, instance, plan)

    def canonical(self, instance: Instance, answer: Any) -> str:
        return str(sorted(_entries(answer)))

    def trivial(self, instance: Instance) -> Any:
        """The first meeting alone."""
        people = len(instance["meetings"][0]["people"])
        room = next(room for room, seats in enumerate(instance["seats"]) if seats >= people)
        return [[0, room, 0]]

    def draw(self, instance: Instance, axes: Any, answer: Any = None) -> None:
        meetings = instance["meetings"]
        if answer is None:
            rows = [
                [number, m["hours"], m["importance"], " ".join(map(str, m["people"]))]
                for number, m in enumerate(meetings)
            ]
            draw_table(axes, ("meeting", "hours", "importance", "people"), rows, ())
            seats = ", ".join(f"room {room}: {number}" for room, number in enumerate(instance["seats"]))
            axes.set_title(f"hours 0 to {instance['hours'] - 1}\nseats of {seats}", fontsize=10)
            return
        hour = points(axes)[0] / instance["hours"]
        for number, room, start in _entries(answer):
            meeting = meetings[number]
            axes.barh(room, meeting["hours"], 0.8, start, color=PALETTE[number % len(PALETTE)], edgecolor="black")
            text = f"meeting {number}\n({' '.join(map(str, meeting['people']))})"
            size = min(9, 1.8 * hour * meeting["hours"] / max(map(len, text.split("\n"))))
            axes.text(start + meeting["hours"] / 2, room, text, ha="center", va="center", fontsize=size)
        axes.set_yticks(
            range(len(instance["seats"])),
            [f"room {room}\n({seats} seats)" for room, seats in enumerate(instance["seats"])],
        )
        axes.set_xticks(range(instance["hours"] + 1))
        axes.set_xlim(0, instance["hours"])
        axes.set_ylim(len(instance["seats"]) - 0.5, -0.5)
        axes.set_xlabel("hour")
        axes.grid(axis="x", color="0.85")
        axes.set_axisbelow(True)


def _flat(entry: Any) -> list[int] | None:
    """[meeting, room, hour] of an entry; also of a pair of a meeting and [room, hour]."""
    if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list):
        entry = [entry[0], *entry[1]]
    if isinstance(entry, list) and len(entry) == 3 and all(isinstance(item, int) for item in entry):
        return entry
    return None


def _entries(answer: Any) -> Iterator[list[int]]:
    """Of a valid answer."""
    return map(_flat, [answer] if isinstance(answer[0], int) else answer)
