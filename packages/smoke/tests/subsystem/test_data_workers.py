"""Random numbers in data loader workers, and iterable datasets in them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.plugins import load_object
from assay_smoke.data import sampling
from assay_smoke.data.protocols import LoaderPlan
from assay_smoke.data.verdict import RaisedError, Subject

PLANTS = Path(__file__).parents[1] / "data_plants"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plant(file: str, name: str) -> Any:
    return load_object(f"{PLANTS / file}:{name}")


@pytest.mark.parametrize(("name", "seeds"), [("right", "equal"), ("fixed_generator", "all")])
def test_torch_seeds_its_workers_apart(name: str, seeds: str) -> None:
    """A generator with a fixed seed, as PyTorch's notes on reproducibility show it, is right on one rank."""
    report = sampling.check_loader(Subject(name), plant("loaders.py", name))
    assert report.findings == []
    assert report.cases == dict.fromkeys(sampling.LOADER_PROPERTIES, 1)
    assert report.notes == [f"ranks with {seeds} seeds draw the same numbers in their workers"]


def test_numbers_of_items_may_be_tensors() -> None:
    loader = plant("loaders.py", "right_as_tensors")
    report = sampling.check_loader(Subject("right"), loader)
    assert report.findings == []
    assert report.untried == []


@pytest.mark.parametrize(
    ("name", "breaks", "words"),
    [
        # https://github.com/pytorch/pytorch/pull/56488
        (
            "numpy_forked",
            [sampling.NEW_IN_WORKERS["numpy"], sampling.NEW_IN_EPOCHS["numpy"]],
            "workers 0 and 1 draw the same from numpy",
        ),
        (
            "seeded_by_number",
            [sampling.NEW_IN_EPOCHS["numpy"], sampling.NEW_IN_EPOCHS["random"]],
            "epoch 1 draws from numpy what epoch 0 drew",
        ),
        (
            "torch_forked",
            [sampling.NEW_IN_WORKERS["torch"], sampling.NEW_IN_EPOCHS["torch"]],
            "workers 0 and 1 draw the same from torch",
        ),
        (
            "never_repeated",
            [sampling.REPEATABLE_NUMBERS],
            "two runs with equal seeds draw different numbers from random",
        ),
    ],
)
def test_workers_seeded_wrongly_are_found(name: str, breaks: list[str], words: str) -> None:
    report = sampling.check_loader(Subject(name), plant("loaders.py", name))
    assert [finding.name for finding in report.findings] == breaks
    assert report.findings[0].reason == words
    assert len(report.findings[0].example) == 2


def test_a_loader_without_workers_is_refused() -> None:
    message = r"^one_process returned a loader whose items came from 1 process; it must return "
    with pytest.raises(RaisedError, match=message):
        sampling.check_loader(Subject("one_process"), plant("loaders.py", "one_process"))


@pytest.mark.parametrize(
    ("name", "breaks"),
    [
        ("right_items", []),
        (
            "held_generator",
            [sampling.NEW_IN_WORKERS["item"], sampling.NEW_IN_EPOCHS["item"]],
        ),
        ("generator_by_worker", [sampling.NEW_IN_EPOCHS["item"]]),
        ("unseeded_generator", [sampling.REPEATABLE_NUMBERS]),
    ],
)
def test_generators_that_a_data_set_holds_are_followed(name: str, breaks: list[str]) -> None:
    loader = plant("loaders.py", "right")
    report = sampling.check_dataset(Subject(name), plant("loaders.py", name), loader)
    assert [finding.name for finding in report.findings] == breaks
    assert report.cases == dict.fromkeys(sampling.DATASET_PROPERTIES, 1)


def test_a_data_set_without_random_numbers_is_refused() -> None:
    loader = plant("loaders.py", "right")
    with pytest.raises(RaisedError, match="it draws no random numbers; it must return"):
        sampling.check_dataset(Subject("x"), plant("loaders.py", "fixed_items"), loader)


def test_an_iterable_data_set_that_every_worker_reads_whole_is_found() -> None:
    plan = LoaderPlan(num_samples=8, batch_size=2, num_ranks=2, num_workers=2, num_epochs=2)
    run = plant("samplers.py", "every_worker_all")
    report = sampling.check_sampling(Subject("wrong"), run, [plan])
    found = {finding.name: finding.reason for finding in report.findings}
    assert found[sampling.ONCE].startswith(
        "samples 0, 1, 2, 3, 4, 5, 6, 7 are seen more than once (sample 0 by rank "
    )
