"""Candidate options, and imports of the fork server."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay.errors import UsageError
from assay.generate.spec import CandidateOptions
from assay.models.load import choose_threads, chosen_threads


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_nothing_given_leaves_the_choice_to_the_libraries() -> None:
    assert CandidateOptions.parse({}) == CandidateOptions()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"threads": "3"}, CandidateOptions(threads=3)),
        ({"attention": "sdpa"}, CandidateOptions(attention="sdpa")),
        ({"experts": "eager"}, CandidateOptions(experts="eager")),
        ({"batch-size": "1"}, CandidateOptions(batch_size=1)),
        ({"compile": "1"}, CandidateOptions(compile=True)),
        ({"compile": "0"}, CandidateOptions(compile=False)),
        ({"padding": "left"}, CandidateOptions()),
        ({"threads": "1", "compile": "1"}, CandidateOptions(threads=1, compile=True)),
    ],
)
def test_options_are_read(options: dict[str, str], expected: CandidateOptions) -> None:
    assert CandidateOptions.parse(options) == expected


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("threads", "0", "must be a whole number from 1 to 1,000,000"),
        ("threads", "two", "must be a whole number from 1 to 1,000,000"),
        ("batch-size", "2", "only 1 is possible"),
        ("compile", "yes", "must be 0 or 1"),
        ("padding", "right", "padded on the left"),
    ],
)
def test_wrong_value_is_reported_with_its_option(name: str, value: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"candidate option {name}={value}: .*{why}"):
        CandidateOptions.parse({name: value})


def test_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match="unknown candidate option 'batch_size'; there are: attent"
    ):
        CandidateOptions.parse({"batch_size": "1"})


def test_threads_are_set_for_the_process() -> None:
    CandidateOptions(threads=2).apply_to_process()
    assert torch.get_num_threads() == 2
    CandidateOptions().apply_to_process()
    assert torch.get_num_threads() == 2


def test_small_models_run_on_one_thread() -> None:
    torch.set_num_threads(2)
    choose_threads(30_000_000)
    assert torch.get_num_threads() == 2
    choose_threads(500_000)
    assert torch.get_num_threads() == 1


def test_choice_of_threads_ends_with_its_context() -> None:
    torch.set_num_threads(2)

    with chosen_threads(500_000):
        assert torch.get_num_threads() == 1

    assert torch.get_num_threads() == 2


def test_model_is_compiled_for_its_device_only_where_asked() -> None:
    @dataclasses.dataclass(frozen=True)
    class Loaded:
        model: torch.nn.Module

    device: Any = SimpleNamespace(vendor=SimpleNamespace(compile_backend="eager"))
    plain: Any = Loaded(torch.nn.ReLU())
    forward = plain.model.forward

    assert CandidateOptions().compiled(plain, device) is plain
    assert plain.model.forward == forward
    compiled = CandidateOptions(compile=True).compiled(plain, device)
    assert compiled.model.forward != forward
    assert compiled.model(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


# The child of a process that has run threads of OpenMP waits for them for ever.
CODE = """
import os, signal
import importlib
from assay.generate.spec import PRELOAD
for module in PRELOAD:
    importlib.import_module(module)
import torch
child = os.fork()
if child == 0:
    signal.alarm(30)
    torch.set_num_threads(2)
    torch.ones(2_000_000).cos().sum()
    torch.ones(500, 500) @ torch.ones(500, 500)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_process_forked_after_the_imports_can_compute_on_two_threads() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        timeout=110,
    )

    assert (result.returncode, result.stderr) == (0, "")
