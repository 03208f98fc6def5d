"""The command that a call of a function stands for, and calls that are refused."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from assay.api.generation import check_generate
from assay.api.options import command_line
from assay.api.training import check_train
from assay.errors import UsageError


def test_a_command_holds_what_differs_from_the_defaults() -> None:
    arguments = {
        "model": "micro:llama",
        "candidate": "sim/bfloat16",
        "reference": "cpu/float32",
        "candidate_option": {"threads": "1", "batch-size": "1"},
        "max_new_tokens": 4,
        "chat": True,
        "trust_remote_code": False,
        "level": "auto",
        "output": "mine",
    }
    assert command_line(check_generate, arguments) == (
        "assay", "check", "generate", "micro:llama", "--candidate", "sim/bfloat16",
        "--reference", "cpu/float32", "--candidate-option", "threads=1",
        "--candidate-option", "batch-size=1", "--max-new-tokens", "4", "--chat",
    )  # fmt: skip


RUNS = {"reference": "cpu/float32", "candidate": "cpu/bfloat16"}


@pytest.mark.parametrize(
    ("check", "options", "message"),
    [
        (check_generate, {"candidate": "cpu/bfloat16"}, "give either --reference RUN or --golden"),
        (
            check_generate,
            {"candidate": "cpu/bfloat16", "golden": "kept", "disk": "1G"},
            "--disk limits the golden of --reference",
        ),
        (
            check_generate,
            {"candidate": "cpu/bfloat16", "golden": "kept", "budget": "5m"},
            "--budget limits the golden of --reference",
        ),
        (check_generate, RUNS | {"budget": "5m", "level": "logits"}, "--budget is for --level"),
        (check_generate, RUNS | {"budget": "soon"}, "'soon' is not a time such as 90s"),
        (check_generate, RUNS | {"disk": "much"}, "'much' is not a size such as 500M"),
        (check_generate, RUNS | {"batch_size": 0}, "--batch-size 0: Input should be greater than"),
        (check_generate, RUNS | {"max_new_tokens": "no"}, "--max-new-tokens no: Input should be a"),
        (check_generate, RUNS | {"temperature": -1.0}, "--temperature -1.0: must be a number of"),
        (check_generate, RUNS | {"top_p": 1.5}, "--top-p 1.5: must be .* at least 0 and at most 1"),
        (check_generate, RUNS | {"top_k": 0}, "--top-k 0: must be a number of at least 1"),
        (check_generate, RUNS | {"candidate_setup": print, "candidate_model": print}, "either"),
        (check_train, RUNS | {"track": "wandb"}, "--track without --overfit"),
        (check_train, RUNS | {"mesh": "dp=2", "world": 4}, "--world 4: the mesh dp=2 has 2 ranks"),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_is_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[..., object],
    options: Mapping[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        check("micro:llama", **options)
    assert list(tmp_path.iterdir()) == []
