"""Options of the suites. Imports no torch."""

import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assay_expectations.decoders import DecoderOptions

MODEL_OPTION = "--expectation-model"
PLACE_OPTION = "--expectation-load"
MODELS_VARIABLE = "ASSAY_EXPECTATION_MODELS"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suites. Options override environment variables."""
    _add_options_of_models(parser)
    _add_options_of_decoders(parser)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Under torchrun, let every process finish its report before the launcher ends them."""
    if "assay.launch" in sys.modules:
        from assay.launch import leave_together

        sys.stdout.flush()
        leave_together()


def _add_options_of_models(parser: pytest.Parser) -> None:
    group = parser.getgroup(
        "assay expectations", "test_model_expectations of assay_expectations.suites"
    )
    group.addoption(
        MODEL_OPTION,
        metavar="MODEL",
        action="append",
        help=f"Repeatable. Default: comma-separated models in {MODELS_VARIABLE}, or every micro:RECIPE.",
    )
    group.addoption(
        "--expectation-folder", metavar="DIR", help="Default: the shipped expectations."
    )
    group.addoption(
        PLACE_OPTION,
        metavar="MODEL",
        help=f"Verify this folder or name, not the one that {MODEL_OPTION} selects.",
    )


def _add_options_of_decoders(parser: pytest.Parser) -> None:
    group = parser.getgroup("assay decoders", "test_decoders of assay_expectations.suites")
    for name, metavar, words in (
        ("model", "MODEL", "Repeatable."),
        ("shape", "BxTxN", "Rows, prompt length and new tokens, such as 4x64x16; repeatable."),
        ("attention", "NAME", "Attention of the candidate: eager, sdpa; repeatable."),
        ("prompts", "FILE.jsonl", "Texts, as --prompts of `assay check generate`."),
        ("thresholds", "FILE.toml", "Output of `assay calibrate`."),
        ("references", "DIR", "Cache of references."),
        ("setup", "FILE.py:FUNC", "Call FUNC with the candidate's model."),
    ):
        action = "append" if words.lower().endswith("repeatable.") else "store"
        group.addoption(f"--decoder-{name}", metavar=metavar, action=action, help=words)
    group.addoption(
        "--decoder-ranks",
        metavar="N",
        type=int,
        help="Shard the candidate's model over N devices. Default: the processes of torchrun, or 1.",
    )


def expectation_folder(config: pytest.Config) -> Path:
    """Return the folder of expectations.

    Raises: pytest.UsageError for a capture into the package.
    """
    from assay_expectations.verdict import SHIPPED

    folder: str | None = config.getoption("expectation_folder")
    if folder is None and config.getoption("capture_expectation"):
        raise pytest.UsageError("--capture-expectation needs --expectation-folder DIR")
    return SHIPPED if folder is None else Path(folder)


def expected_models(config: pytest.Config) -> list[str]:
    """Return the models under test."""
    from assay.models import RECIPES

    return named_models(config) or [f"micro:{name}" for name in RECIPES]


def named_models(config: pytest.Config) -> list[str]:
    """Return the models that the option or the variable selects; none by default."""
    named: list[str] = config.getoption("expectation_model") or [
        word.strip() for word in os.environ.get(MODELS_VARIABLE, "").split(",") if word.strip()
    ]
    return list(dict.fromkeys(named))


def place_of_model(config: pytest.Config) -> str | None:
    """Return the folder or name to load instead of the selected model. Raises: pytest.UsageError."""
    place: str | None = config.getoption("expectation_load")
    if place and (len(named_models(config)) != 1 or config.getoption("capture_expectation")):
        raise pytest.UsageError(
            f"{PLACE_OPTION} needs one {MODEL_OPTION}, and excludes --capture-expectation"
        )
    return place


def decoder_options(config: pytest.Config) -> "DecoderOptions":
    """Return the options of this session. Raises: pytest.UsageError."""
    from assay.errors import UsageError
    from assay.files import read_toml_record
    from assay.launch import outer_world_size
    from assay_expectations.decoders import Shape, Thresholds, options_from

    fields: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "models": ("decoder_model", tuple),
        "shapes": ("decoder_shape", lambda shapes: tuple(map(Shape.parse, shapes))),
        "attentions": ("decoder_attention", tuple),
        "prompts": ("decoder_prompts", Path),
        "references": ("decoder_references", Path),
    }
    changes: dict[str, Any] = {
        "ranks": config.getoption("decoder_ranks") or outer_world_size(os.environ) or 1
    }
    try:
        for field, (option, convert) in fields.items():
            if value := config.getoption(option):
                changes[field] = convert(value)
        if thresholds := config.getoption("decoder_thresholds"):
            changes["thresholds"] = read_toml_record(Thresholds, Path(thresholds))
        return replace(options_from(), **changes)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


@contextmanager
def one_line_failures() -> "Iterator[None]":
    """Fail the test with only the message of an error of assay in the context."""
    from assay.errors import AssayError

    try:
        yield
    except AssayError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def assert_none(problems: "Sequence[str]") -> None:
    """Fail the test with one line for each problem."""
    if problems:
        raise pytest.fail.Exception("\n".join(problems), pytrace=False)
