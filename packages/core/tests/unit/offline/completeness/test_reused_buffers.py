"""Dumps that hold one decode step under several names."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.dumps.protocol import Dump, DumpError
from assay.offline.contents import find_reused_buffers
from assay.verdicts import Outcome
from packages.core.tests.unit.offline.memory_dump import make_dump
from packages.core.tests.unit.offline.small_dumps import halve, judge, write

MODULES = ("embed", "layers.0.attn", "layers.0.mlp", "lm_head")
PROMPT = (3, 5, 6)


def make_run(
    tokens: tuple[int, ...] = (7, 8, 9),
    repeated: Mapping[str, tuple[int, ...]] | None = None,
    *,
    with_inputs: bool = True,
    with_ids: bool = True,
) -> Dump:
    """Make a run of a prefill and decode steps.

    repeated: by port, the decode steps that hold the values of the first of them.
    """
    values: dict[tuple[str, str, int], Tensor] = {}
    for step, ids in enumerate((PROMPT, *((token,) for token in tokens))):
        hidden = torch.tensor([ids])
        for module in MODULES:
            own = torch.Generator().manual_seed(step * 10 + MODULES.index(module))
            result = torch.randn(1, len(ids), 8, generator=own)
            is_shown = with_ids if module == "embed" else with_inputs
            if is_shown:
                values[module, "input.0", step] = hidden
            values[module, "output", step] = hidden = result
    for name, steps in (repeated or {}).items():
        module, _, port = name.partition(":")
        for step in steps[1:]:
            values[module, port, step] = values[module, port, steps[0]]
    return make_dump(values)


def ports(*names: str) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(names, (1, 2, 3))


OUTPUTS = ports(*(f"{module}:output" for module in MODULES))
INPUTS = ports(*(f"{module}:input.0" for module in MODULES[1:]))


def find(dump: Dump) -> set[tuple[str, int]]:
    return {(one.site.at.module, one.site.at.step) for one in find_reused_buffers(dump)}


def everywhere(*steps: int) -> set[tuple[str, int]]:
    return {(module, step) for module in MODULES for step in steps}


@pytest.mark.parametrize("with_inputs", [True, False])
def test_results_that_repeat_while_tokens_differ_are_found(with_inputs: bool) -> None:
    run = make_run(repeated=OUTPUTS, with_inputs=with_inputs)
    assert find(run) == everywhere(1, 2, 3)


def test_repeated_inputs_do_not_hide_a_reused_buffer() -> None:
    assert find(make_run(repeated=OUTPUTS | INPUTS)) == everywhere(1, 2, 3)


def test_repeated_token_ids_do_not_hide_a_reused_buffer() -> None:
    """The buffer of the ids is reused too, so the generated ids are unknown."""
    assert find(make_run((7, 7, 7), OUTPUTS | INPUTS)) == everywhere(1, 2, 3)


def test_without_ids_different_inputs_are_evidence() -> None:
    run = make_run(repeated=OUTPUTS, with_ids=False)
    assert find(run) == everywhere(1, 2, 3)


def test_a_buffer_that_is_reused_from_a_later_step_on_is_found() -> None:
    late = dict.fromkeys(OUTPUTS, (2, 3))
    assert find(make_run(repeated=late)) == everywhere(2, 3)


def test_a_run_without_repeats_has_none() -> None:
    assert find(make_run()) == set()


def test_one_decode_step_has_nothing_to_repeat() -> None:
    assert find(make_run((7,))) == set()


def test_the_same_token_twice_repeats_only_what_comes_before_attention() -> None:
    assert find(make_run((7, 7, 7), ports("embed:output", "layers.0.attn:input.0"))) == set()


def test_modules_with_repeated_inputs_may_repeat_their_outputs() -> None:
    """Repeat inputs, as an encoder that gets the same image in every step."""
    tower = ports("layers.0.attn:input.0", "layers.0.attn:output", "layers.0.mlp:input.0",
                  "layers.0.mlp:output")  # fmt: skip
    assert find(make_run(repeated=tower)) == set()


def test_a_constant_result_is_not_a_reused_buffer() -> None:
    run = make_run()
    one_hot = torch.eye(1, 8)[None]
    values = {
        (one.site.at.module, one.site.port, one.site.at.step): run.read(one)
        if one.site.port == "input.0"
        else one_hot
        for one in run.tensors
    }
    assert find(make_dump(values)) == set()


def test_two_modules_are_not_enough_evidence() -> None:
    assert find(make_run(repeated=ports("embed:output", "layers.0.mlp:output"))) == set()


def reuse(folder: Path) -> Path:
    """Repeat the results of the first decode step in the second one."""
    for file in folder.rglob("*.forward.1.output.*.pt"):
        shutil.copy(file, file.with_name(file.name.replace("forward.1", "forward.2")))
    return folder


def test_reused_buffers_on_both_sides_do_not_pass(tmp_path: Path) -> None:
    golden, mine = reuse(write(tmp_path / "golden")), reuse(write(tmp_path / "mine"))
    verdict = judge(golden, mine, tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    reason = str(verdict.levels["completeness"].reason)
    text = "the same values in steps 1, 2, though their tokens differ: a buffer was reused"
    assert reason.count(text) == 2
    assert "(11 modules: embed, layers.0.up, layers.0.down and 8 more)" in reason


def test_reused_buffers_of_expected_do_not_fail(tmp_path: Path) -> None:
    golden, mine = reuse(write(tmp_path / "golden")), write(tmp_path / "mine")
    verdict = judge(golden, mine, tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.levels["modules"].verdict is Outcome.PASS


def test_reused_buffers_of_actual_fail_and_are_named(tmp_path: Path) -> None:
    golden, mine = write(tmp_path / "golden"), reuse(write(tmp_path / "mine"))
    verdict = judge(golden, mine, tmp_path / "out")
    assert verdict.verdict is Outcome.FAIL
    assert verdict.headline == (
        "embed (forward, step 2) is the first that differs. ACTUAL holds the same values there for"
        " different tokens: a reused buffer, of the dump or of the model."
    )


def test_a_noise_dump_with_reused_buffers_is_refused(tmp_path: Path) -> None:
    golden, mine = write(tmp_path / "golden"), write(tmp_path / "mine", halve)
    noise = reuse(write(tmp_path / "noise", halve))
    with pytest.raises(DumpError, match=r"--noise .*noise: the same values in steps 1, 2"):
        judge(golden, mine, tmp_path / "out", noise=str(noise))
