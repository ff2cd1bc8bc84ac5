import concurrent.futures
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dmpo.tasks.math import reward
from dmpo.tasks.math.reward import compute_score, final_answer

from .math_cases import DISAGREES, KINDS, response

CASES = [
    pytest.param(kind, gold, text, expected, id=f"{kind}-{number}")
    for kind, cases in KINDS.items()
    for number, (gold, text, *expected) in enumerate(cases)
]


def score(gold, text, **kwargs):
    return compute_score("math", text, gold, timeout=2.0, **kwargs)


def test_there_are_150_cases_and_few_disagreements():
    assert len(CASES) >= 150
    # docs/math.md states both numbers
    assert (len(CASES), sum(DISAGREES in case.values[3] for case in CASES)) == (225, 3)


@pytest.mark.parametrize(("kind", "gold", "text", "expected"), CASES)
def test_grades_as_a_person_would(kind, gold, text, expected):
    result = score(gold, response(kind, text))
    disagrees = expected[0] is DISAGREES
    assert bool(result["acc"]) == (expected[-1] is not disagrees)


def test_score_is_accuracy_plus_format():
    right = score("5", r"2+3=5, so \boxed{5}")
    assert right == {"score": 1.1, "acc": 1.0, "format": 1.0, "answer": "5", "timeout": 0.0}
    assert score("5", r"2+3=5, so \boxed{5}", format_reward=0.0)["score"] == 1.0
    assert score("5", r"2+3=6, so \boxed{6}")["score"] == pytest.approx(0.1)
    assert score("5", "no answer")["score"] == 0.0


@pytest.mark.parametrize(
    "text", [r"\boxed{5}", "Answer: 5", r"Answer: \boxed{5}", r"**Answer:** $\boxed{5}$", r" $\boxed{5}"]
)
def test_an_answer_without_reasoning_lacks_the_format(text):
    result = score("5", text)
    assert (result["acc"], result["format"]) == (1.0, 0.0)


def test_an_answer_has_one_name_however_it_is_written():
    right = [r"\frac{1}{2}", "0.5", "1/2", r"\dfrac12", r"\frac{2}{4}"]
    assert {score(r"\frac12", rf"so \boxed{{{text}}}")["answer"] for text in right} == {r"\frac12"}
    wrong = [r"\frac{1}{3}", "1/3", r"\tfrac{1}{3}", r"\frac{2}{6}"]
    assert len({score("5", rf"so \boxed{{{text}}}")["answer"] for text in wrong}) == 1


@pytest.mark.parametrize(
    "text", [None, 5, b"x", "\x00" * 100, "{" * 1_000_000, "\\boxed{" * 300_000, "answer:" * 300_000]
)
def test_never_raises_and_takes_linear_time(text):
    began = time.monotonic()
    assert score("5", text)["acc"] == 0.0
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("gold", [None, 5, 5.0, "", "{", "\\frac{"])
def test_a_strange_ground_truth_does_not_raise(gold):
    assert score(gold, r"so \boxed{5}")["acc"] == float(str(gold) in ("5", "5.0"))


def test_what_takes_too_long_is_wrong_in_bounded_time_and_the_next_answer_is_graded():
    began = time.monotonic()
    late = score("7", r"so \boxed{9^{9^{9^{9}}}}")
    assert (late["acc"], late["timeout"]) == (0.0, 1.0)
    assert time.monotonic() - began < 30
    assert score("7", r"so \boxed{14/2}")["acc"] == 1.0


def test_works_in_threads_other_than_the_main_one():
    """verl's reward loop calls it through an executor; math-verify's own time limit would raise there."""
    texts = [rf"so \boxed{{{number}+1}}" for number in range(40)]
    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        results = list(executor.map(lambda text: score("8", text), texts))
    assert [result["acc"] for result in results] == [float(number == 7) for number in range(40)]


def test_the_process_that_compares_ends_with_its_parent():
    code = (
        "import os, signal, sys\n"
        "from dmpo.tasks.math import reward\n"
        "if __name__ == '__main__':\n"
        "    assert reward.compute_score('', r'so \\boxed{14/2}', '7')['acc'] == 1\n"
        "    import psutil\n"
        "    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script = Path(os.environ.get("TMPDIR", "/tmp")) / f"reward-parent-{os.getpid()}.py"
    script.write_text(code)
    try:
        root = Path(__file__).parent.parent
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root)}
        )
    finally:
        script.unlink()
    children = [int(pid) for pid in done.stdout.split()]
    assert children, done.stderr
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(_runs(pid) for pid in children)


def _runs(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def test_verl_loads_it_as_a_package_and_refuses_the_file():
    from omegaconf import OmegaConf
    from verl.trainer.ppo.reward import get_custom_reward_fn

    def load(path):
        function = {"path": path, "name": "compute_score", "reward_kwargs": {"format_reward": 0.0}}
        return get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": function}}))

    loaded = load("pkg://dmpo.tasks.math.reward")
    result = loaded(
        data_source="", solution_str=r"so \boxed{5}", ground_truth="5", extra_info={}, reward_router_address=None
    )
    assert result["score"] == 1.0
    with pytest.raises(RuntimeError) as error:
        load(reward.__file__)
    assert "pkg://dmpo.tasks.math.reward" in str(error.value.__cause__)


def test_the_last_answer_counts():
    assert final_answer(r"\boxed{1} then Answer: 2 then \boxed{3}")[0] == "3"
    assert final_answer("\\boxed{1} then\nAnswer: 2")[0] == "2"
    assert final_answer(r"\boxed{1} and \boxed{2")[0] == "1"
    assert final_answer(r"Answer: \boxed{\frac{1}{2}} or so")[0] == r"\frac{1}{2}"


def test_a_reward_that_cannot_compare_says_so_instead_of_calling_every_answer_wrong():
    code = (
        "import multiprocessing\n"
        "from dmpo.tasks.math.reward import RewardUnavailable, compute_score\n"
        "def work():\n"
        "    assert compute_score('', 'so \\\\boxed{3}', '3')['acc'] == 1\n"  # equal text needs no comparison
        "    try:\n"
        "        compute_score('', 'so \\\\boxed{1+1}', '2')\n"
        "    except RewardUnavailable as error:\n"
        "        print(error)\n"
        "process = multiprocessing.get_context('fork').Process(target=work, daemon=True)\n"
        "process.start()\n"
        "process.join()\n"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=root)
    assert "does not start" in done.stdout and "daemon" in done.stdout, done.stdout + done.stderr
