"""Pictures of the NP-hard tasks: what they show, and their way into verl's data."""

import itertools
import json
import warnings
from io import BytesIO

import datasets
import numpy as np
import pandas
import pytest
from omegaconf import OmegaConf
from PIL import Image
from verl.utils.dataset.rl_dataset import RLHFDataset

from dmpo.tasks.np_bench import LEVELS, TASKS, make
from dmpo.tasks.np_bench.graphs import RADIUS, GraphTask, layout
from dmpo.tasks.np_bench.pictures import DPI, SIDE, png
from dmpo.tasks.np_bench.reward import compute_score
from dmpo.tasks.np_bench.tsp import _labels

PIXELS = round(SIDE * DPI)
GRAPHS = [name for name, task in TASKS.items() if isinstance(task, GraphTask)]


def opened(picture: bytes) -> Image.Image:
    with Image.open(BytesIO(picture)) as image:
        image.load()
        return image


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TASKS)
def test_a_picture_of_every_level_renders_without_warnings(name, level):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = opened(png(TASKS[name], TASKS[name].make(level, 0)))
    assert image.size == (PIXELS, PIXELS) and image.mode == "RGB"
    ink = np.asarray(image.convert("L")) < 250
    assert ink.mean() > 0.01
    # Nothing is cut off: the border is white.
    assert not (ink[0].any() or ink[-1].any() or ink[:, 0].any() or ink[:, -1].any())


@pytest.mark.parametrize("name", TASKS)
def test_an_answer_changes_the_picture_and_nothing_else_does(name):
    task = TASKS[name]
    instance, answer = task.example()
    alone = png(task, instance)
    assert png(task, json.loads(json.dumps(instance))) == alone != png(task, instance, answer)


def test_a_picture_does_not_depend_on_the_users_style():
    import matplotlib

    task = TASKS["tsp"]
    plain = png(task, task.example()[0])
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "savefig.dpi": 20}):
        assert png(task, task.example()[0]) == plain


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", GRAPHS)
def test_no_edge_passes_behind_a_vertex_and_no_vertices_overlap(name, level):
    for seed in range(3):
        instance = TASKS[name].make(level, seed)
        places = layout(instance)
        if places is None:  # a table, where nothing can hide
            assert level in ("hard", "bench")
            continue
        assert np.min(places) >= 0 and np.max(places) <= 1
        for one, two in itertools.combinations(places, 2):
            assert np.hypot(*np.subtract(one, two)) > 2 * RADIUS
        for a, b in instance["edges"]:
            start, along = np.array(places[a]), np.subtract(places[b], places[a])
            for vertex, place in enumerate(places):
                if vertex not in (a, b):
                    share = np.clip((place - start) @ along / (along @ along), 0, 1)
                    assert np.hypot(*(start + share * along - place)) > RADIUS, (seed, a, b, vertex)


def test_a_graph_that_is_too_dense_to_follow_is_a_table_that_the_prompt_explains():
    task = TASKS["minimum_cut"]
    instance = task.make("bench", 0)
    assert layout(instance) is None
    assert "table" in task.prompt(instance, picture="<image>")


def test_numbers_of_cities_do_not_cover_each_other():
    """Also where cities are in the same place or next to each other."""
    places = [[50, 50], [50, 50], [52, 51], [0, 0], [99, 99], [1, 0]]
    digit = 1.5
    labels = _labels(places, digit, 1.0)
    for (x, y), (u, v) in itertools.combinations(labels, 2):
        assert abs(x - u) >= digit or abs(y - v) >= 1.5 * digit


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    tasks = ["tsp", "knapsack", "vertex_cover"]
    make.main(
        ["--out", str(folder), "--images", "--tasks", *tasks, "--train", "4", "--validation", "2", "--workers", "2"]
    )
    return folder


def test_rows_have_the_picture_of_their_own_instance(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["images"] is True and set(manifest["files"]) == {"train.parquet", "validation.parquet"}
    rows = pandas.read_parquet(folder / "train.parquet").to_dict("records")
    assert len(rows) == 12
    for row in rows:
        info = row["extra_info"]
        task = TASKS[info["task"]]
        instance = task.make(info["level"], info["seed"])
        (picture,) = row["images"]
        assert set(picture) == {"bytes"} and picture["bytes"] == png(task, instance)
        content = row["prompt"][0]["content"]
        assert content == task.prompt(instance, picture="<image>") and content.count("<image>") == 1
        assert task.data(instance) not in content and task.how_to_read in content


def test_verls_dataset_puts_the_picture_into_the_messages(folder, tmp_path, monkeypatch):
    """Any processor will do: verl asks for one, and uses it only to count the tokens of prompts."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    config = OmegaConf.create({"filter_overlong_prompts": False, "cache_dir": str(tmp_path)})
    dataset = RLHFDataset([str(folder / "validation.parquet")], None, config, processor=object())
    assert len(dataset) == 6
    for row in (dataset[index] for index in range(6)):
        (message,) = row["raw_prompt"]
        (picture,) = [part for part in message["content"] if part["type"] == "image"]
        assert isinstance(picture["image"], Image.Image) and picture["image"].size == (PIXELS, PIXELS)
        words = "".join(part["text"] for part in message["content"] if part["type"] == "text")
        assert "<image>" not in words and TASKS[row["extra_info"]["task"]].how_to_read in words
        assert compute_score("", "Answer: [0]", row["reward_model"]["ground_truth"])["format"] == 1


def test_a_file_that_is_not_finished_is_not_there(tmp_path):
    def rows():
        yield {"number": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make.write_parquet(tmp_path / "data.parquet", rows())
    assert not list(tmp_path.iterdir())


def test_a_file_larger_than_a_row_group_has_all_rows_in_order(tmp_path):
    make.write_parquet(tmp_path / "data.parquet", ({"number": n} for n in range(3 * make.ROW_GROUP + 1)))
    assert pandas.read_parquet(tmp_path / "data.parquet").number.tolist() == list(range(3 * make.ROW_GROUP + 1))
