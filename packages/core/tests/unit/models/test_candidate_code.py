"""What was given from Python, as the candidate's process gets it."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn

from assay.errors import UsageError
from assay.models.candidate_code import candidate_code, set_up
from assay.plugins import load_object

MODULE = """
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("kept", nn.Parameter(self.a.weight.detach().clone()).data)

def double(model, factor=2):
    model.a.weight.data *= factor

def make():
    return Tied()

class Setup:
    def __call__(self, model): return model
    @classmethod
    def same(cls, model): return model
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "module_of_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import module_of_user  # type: ignore[import-not-found]

    yield module_of_user
    del sys.modules["module_of_user"]


def arrived(folder: Path, run: str = "cpu/bfloat16", **given: Any) -> Callable[..., Any]:
    """The setup function that the candidate's process calls."""
    setup = candidate_code(given.get("setup"), given.get("model"), run).write(folder)
    assert setup is not None
    return load_object(setup)


def test_a_setup_by_name_is_left_alone(tmp_path: Path) -> None:
    assert candidate_code("file.py:f", None, "cpu/float32").write(tmp_path) == "file.py:f"
    assert candidate_code(None, None, "cpu/float32").write(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_function_is_called_with_the_model(tmp_path: Path, module: Any) -> None:
    model = module.Tied()
    expected = 2 * model.a.weight.detach()
    assert arrived(tmp_path, setup=module.double)(model) is None
    assert torch.equal(model.a.weight, expected)
    assert (tmp_path / "candidate_setup.py").is_file()


def test_whatever_can_be_called_and_imported_is_a_setup(tmp_path: Path, module: Any) -> None:
    model = module.Tied()
    expected = 3 * model.a.weight.detach()
    for number, setup in enumerate((module.Setup(), module.Setup.same)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert arrived(folder, setup=setup)(model) is model
    arrived(tmp_path, setup=partial(module.double, factor=3))(model)
    assert torch.equal(model.a.weight, expected)


@pytest.mark.parametrize("is_made", [False, True], ids=["a model", "a function that makes it"])
def test_a_model_takes_the_place_of_the_loaded_one(
    tmp_path: Path, module: Any, is_made: bool
) -> None:
    torch.manual_seed(0)
    given = module.Tied()
    loaded = module.Tied().to(torch.bfloat16).eval()
    loaded.kept = loaded.kept.float()
    torch.manual_seed(0)
    model = arrived(tmp_path, model=module.make if is_made else given)(loaded)

    assert model is not loaded
    assert torch.equal(model.a.weight, given.a.weight.bfloat16())
    assert model.b.weight is model.a.weight
    assert model.kept.dtype is torch.float32  # as the loaded model keeps it
    assert not model.training


def test_in_float64_a_model_holds_what_it_holds_in_the_candidates_dtype(
    tmp_path: Path, module: Any
) -> None:
    given = module.Tied()
    model = arrived(tmp_path, model=given)(module.Tied().double())
    assert torch.equal(model.a.weight, given.a.weight.bfloat16().double())


class OfThisTest:
    __module__ = "__main__"

    def __call__(self, model: nn.Module) -> nn.Module:
        return model


def function_of_main(model: nn.Module) -> nn.Module:
    return model


function_of_main.__module__ = "__main__"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (function_of_main, "function_of_main is defined in this script or notebook"),
        (OfThisTest(), "OfThisTest is defined in this script or notebook"),
        (lambda model: model, "lambda"),
        (partial(print, Lock()), "cannot pickle .*lock"),
    ],
)
def test_what_another_process_cannot_import_is_refused(given: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why) as raised:
        candidate_code(given, None, "cpu/float32")
    assert "put the code into a file, and import it from there or give FILE.py:FUNC" in str(
        raised.value
    )


def test_a_model_with_a_hook_of_this_notebook_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_forward_hook(function_of_main)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="candidate_model: function_of_main is defined"):
        candidate_code(None, model, "cpu/float32")


def test_what_is_neither_model_nor_function_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"candidate_model: dict is neither a model nor a function"
    ):
        candidate_code(None, {}, "cpu/float32")  # type: ignore[arg-type]


SETUPS = """\
import json


def install(model):
    parse('{')


def parse(text):
    return json.loads(text)  # raises in the standard library
"""


def test_exception_of_a_setup_function_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "setups.py"
    file.write_text(SETUPS)
    with pytest.raises(UsageError) as caught:
        set_up(nn.Identity(), f"{file}:install")
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{file}:install raised JSONDecodeError: Expecting property name")
    assert second == (
        f"  {file}:9, in parse: return json.loads(text)  # raises in the standard library"
    )


def test_exception_of_a_file_s_import_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import json\n1 / 0\n")
    with pytest.raises(UsageError) as caught:
        load_object(f"{file}:install")
    assert str(caught.value).splitlines()[1] == f"  {file}:2, in <module>: 1 / 0"
