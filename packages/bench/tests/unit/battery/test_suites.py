from pathlib import Path

import pytest

from assay.errors import UsageError
from assay_bench.battery.documents import TASKS, documents_of
from assay_bench.battery.suites import load_task, read_suite


@pytest.mark.parametrize("name", ["core", "leaderboard", "offline", "retrained"])
def test_every_shipped_suite_is_read(name: str) -> None:
    suite = read_suite(name)
    assert suite.tasks
    assert set(suite.clusters) <= set(suite.tasks)


def test_the_offline_suite_needs_no_network(tmp_path: Path) -> None:
    assert read_suite("offline").tasks == list(TASKS)
    for task in TASKS:
        config = load_task(task, tmp_path)
        assert isinstance(config, dict)
        assert config["dataset_path"] == "json"


@pytest.mark.parametrize("task", TASKS)
def test_documents_are_many_distinct_and_reproducible(task: str) -> None:
    documents = documents_of(task)
    assert len(documents) >= 250
    assert len({str(document) for document in documents}) == len(documents)
    assert documents_of(task) == documents


def test_right_choices_are_evenly_distributed() -> None:
    labels = [document["label"] for document in documents_of("next-text")]
    assert all(90 < labels.count(label) < 160 for label in range(4))
    assert all(len(set(one["choices"])) == 4 for one in documents_of("next-text"))


def test_sums_are_right() -> None:
    for document in documents_of("addition"):
        first, second = document["question"].removesuffix("=").split("+")
        assert int(first) + int(second) == int(document["sum"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tasks = []", "tasks: List should have at least 1 item"),
        ("tasks = ['a']\nterms = {accuracy = 0}", "terms.accuracy: Input should be greater than 0"),
        ("tasks = ['a']\nmargin = 1", "margin: Extra inputs are not permitted"),
        ("tasks = [", "Invalid value"),
    ],
)
def test_invalid_suite_names_the_key(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        read_suite(str(path))
    with pytest.raises(UsageError, match="suite x does not exist; shipped suites: core, leader"):
        read_suite("x")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1]", "the key task must hold a name"),
        ("task: a\ndataset_path: json", "expected dataset_kwargs"),
        (
            "task: a\ndataset_path: json\ndataset_kwargs: {data_files: {test: d}}",
            "cannot be read: No such file",
        ),
        (
            "task: a\ndataset_path: json\ndataset_kwargs: {data_files: {test: e}}",
            "e has no documents",
        ),
        ("task: !function a.b", "not plain YAML"),
        ("task: a/b", "becomes a file name"),
        ("task: a\ndataset_path: json\ndataset_kwargs: [1]", "expected dataset_kwargs"),
        ("task: " + "[" * 5000, "not plain YAML"),
    ],
)
def test_invalid_task_is_an_error(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "e").write_text("[]\n")
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        load_task(str(path), tmp_path)
