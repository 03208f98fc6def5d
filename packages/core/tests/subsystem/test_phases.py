"""Every phase of a real check is numbered, and what it counts comes to its end."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from assay.devices.run_string import Run
from assay.generate.check import check_generate
from assay.generate.spec import GenerateCheck, InputOptions
from assay.runs import Progress
from assay.sites import JudgedLevel
from assay.training.check import check_train
from assay.training.reports import TrainCheck, TrainOptions


class Counted:
    def __init__(self, description: str, total: float | None) -> None:
        self.description, self.total, self.done = description, total, 0.0

    def advance(self, amount: float = 1) -> None:
        self.done += amount


class Recorded(Progress):
    """Keeps all tasks, in the order of their begins."""

    def __init__(self) -> None:
        self.tasks: list[Counted] = []

    @contextmanager
    def open_task(self, description: str, total: float | None, unit: str) -> Iterator[Counted]:
        del unit
        self.tasks.append(Counted(description, total))
        yield self.tasks[-1]

    def note(self, text: str) -> None:
        del text

    def numbers(self) -> list[tuple[int, int]]:
        found = [re.match(r"(\d+) of (\d+) steps done: ", task.description) for task in self.tasks]
        return [(int(one[1]), int(one[2])) for one in found if one]

    def incomplete(self) -> list[tuple[str, float, float | None]]:
        return [
            (task.description, task.done, task.total)
            for task in self.tasks
            if task.total is not None and task.done != pytest.approx(task.total)
        ]


def all_of(*totals: int) -> list[tuple[int, int]]:
    return [(number, total) for total in totals for number in range(total)]


@pytest.mark.parametrize(
    ("level", "phases"), [("modules", (12, 9)), ("logits", (7, 7)), ("tokens", (7, 5))]
)
def test_phases_of_a_generation_check(
    level: JudgedLevel, phases: tuple[int, int], tmp_path: Path
) -> None:
    inputs = InputOptions(prompt_length="4", max_new_tokens=3)
    progress = Recorded()
    check = GenerateCheck(
        model="micro:llama",
        candidate=Run("cpu", "bfloat16"),
        reference=Run("cpu", "float32"),
        inputs=inputs,
        level=level,
    )

    check_generate(check, tmp_path, progress)

    assert progress.numbers() == all_of(*phases)
    assert progress.incomplete() == []


@pytest.mark.long
def test_phases_of_a_training_check(tmp_path: Path) -> None:
    progress = Recorded()
    check = TrainCheck(TrainOptions(model="micro:llama"), "cpu/float32", "cpu/bfloat16")

    check_train(check, tmp_path, progress)

    assert progress.numbers() == all_of(5, 3)
    assert progress.incomplete() == []


@pytest.mark.long
def test_the_first_of_several_ranks_shows_its_phases(tmp_path: Path) -> None:
    progress = Recorded()
    check = TrainCheck(
        TrainOptions(model="micro:llama", adapter_dropout=0.0),
        "cpu/float32",
        "cpu/float32",
        trainer="ddp",
        mesh={"dp": 2},
    )

    check_train(check, tmp_path, progress)

    assert progress.numbers() == all_of(5, 3)
    assert progress.incomplete() == []
