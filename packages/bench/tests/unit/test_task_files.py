from pathlib import Path
from typing import Any

import pytest
import yaml

from assay_bench.task_files import TaskError, has_documents, load_task

CONFIG: dict[str, Any] = {
    "task": "mine",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "dataset_kwargs": {"data_files": {"test": "mine.jsonl"}},
    "test_split": "test",
    "metric_list": [{"metric": "acc"}],
}
METRICS = "acc | acc_norm | acc_bytes | exact_match"


def write(folder: Path, config: object) -> str:
    (folder / "mine.jsonl").write_text('{"context": "a"}\n')
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_the_shipped_task_makes_its_own_documents(tmp_path: Path) -> None:
    config, _ = load_task("next-text", tmp_path)
    assert config["task"] == "next-text"
    assert config["dataset_kwargs"]["data_files"]["test"] == str(tmp_path / "documents.jsonl")
    assert (tmp_path / "documents.jsonl").read_text().count("\n") > 300


def test_files_of_a_task_are_found_beside_it(tmp_path: Path) -> None:
    config, _ = load_task(write(tmp_path, CONFIG), tmp_path)
    assert config["dataset_kwargs"]["data_files"] == {"test": str(tmp_path / "mine.jsonl")}


def test_the_hash_is_that_of_the_task_and_its_documents(tmp_path: Path) -> None:
    path = write(tmp_path, CONFIG)
    _, before = load_task(path, tmp_path)
    assert load_task(path, tmp_path)[1] == before
    (tmp_path / "mine.jsonl").write_text('{"context": "b"}\n')
    _, other_documents = load_task(path, tmp_path)
    _, other_task = load_task(write(tmp_path, CONFIG | {"doc_to_text": "context"}), tmp_path)
    assert len({before, other_documents, other_task}) == 3


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (["a list"], "needs a name under the key task"),
        ({"task": "mine"}, "dataset_path is None; only 'json' is possible"),
        (
            CONFIG | {"dataset_path": "hellaswag"},
            "dataset_path is 'hellaswag'; only 'json' is possible",
        ),
        (
            CONFIG | {"output_type": "generate_until"},
            "output_type is 'generate_until'; only 'multiple_choice' is possible",
        ),
        (
            CONFIG | {"dataset_kwargs": None},
            "needs dataset_kwargs: data_files: {test: FILE.jsonl}",
        ),
        (
            {key: value for key, value in CONFIG.items() if key != "metric_list"},
            f"needs metric_list: [{{metric: {METRICS}}}]",
        ),
        (CONFIG | {"metric_list": []}, f"needs metric_list: [{{metric: {METRICS}}}]"),
        (
            CONFIG | {"metric_list": [{"metric": "f1"}]},
            f"needs metric_list: [{{metric: {METRICS}}}]",
        ),
        (CONFIG | {"test_split": "dev"}, "needs test_split: one of test"),
    ],
)
def test_a_task_that_cannot_be_run_is_refused(tmp_path: Path, config: object, problem: str) -> None:
    path = write(tmp_path, config)
    with pytest.raises(TaskError) as raised:
        load_task(path, tmp_path)
    assert str(raised.value) == f"task {path}: {problem}"


@pytest.mark.parametrize(("text", "any_there"), [("", False), ("\n\n", False), ("{}", True)])
def test_a_task_may_have_no_documents(tmp_path: Path, text: str, any_there: bool) -> None:
    path = write(tmp_path, CONFIG)
    (tmp_path / "mine.jsonl").write_text(text)
    config, _ = load_task(path, tmp_path)
    assert has_documents(config) is any_there


def test_a_task_with_tags_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("process_docs: !function code.run\n")
    with pytest.raises(TaskError, match="not YAML without tags"):
        load_task(str(path), tmp_path)


def test_a_task_without_its_documents_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, CONFIG)
    (tmp_path / "mine.jsonl").unlink()
    with pytest.raises(TaskError, match=r"there is no file .*mine\.jsonl$"):
        load_task(path, tmp_path)


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as raised:
        load_task("hellaswag", tmp_path)
    assert str(raised.value) == (
        "task hellaswag: there is no such file, and no task of that name but next-text"
    )
