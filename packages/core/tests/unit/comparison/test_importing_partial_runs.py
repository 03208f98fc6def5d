"""Signs that a dump does not hold a whole run."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.comparison.check import CompareOptions, compare_dumps
from assay.comparison.importing import (
    find_cut_off,
    find_lost_ranks,
    find_reused_buffers,
    split_mixed_passes,
)
from assay.dumps.protocol import Dump, DumpError
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.comparison.memory_dump import Values, damaged, make_dump
from packages.core.tests.unit.comparison.small_dumps import halve, judge, write

BLOCK = ("layers.0.up", "layers.0.down", "layers.0", "layers.1.up", "layers.1.down", "layers.1")


def ending_with(modules: tuple[str, ...], num_whole: int) -> list[str]:
    """Return the problems of a dump of whole passes and a pass with some modules only."""
    values = {
        (module, "output", step): torch.ones(1, 4, 2)
        for step, held in enumerate([(*BLOCK, "lm_head")] * num_whole + [modules])
        for module in held
    }
    return find_cut_off(make_dump(values))


@pytest.mark.parametrize("num_whole", [0, 2])
def test_a_run_that_ends_within_a_block_was_cut_off(num_whole: int) -> None:
    assert ending_with(BLOCK[:4], num_whole) == [
        f"the run was cut off in step {num_whole}: its last results are those of layers.1.up"
    ]


def test_a_run_that_ends_with_its_pass_is_whole() -> None:
    assert ending_with((*BLOCK, "lm_head"), 0) == ending_with((*BLOCK, "lm_head"), 2) == []


def test_a_module_that_a_later_pass_skips_is_not_a_cut_off() -> None:
    """Skip a module, as an expert that no token chose."""
    assert ending_with((*BLOCK[:3], *BLOCK[4:], "lm_head"), 2) == []


def cut(folder: Path, num_kept: int) -> Path:
    """Leave the first calls in the index."""
    (file,) = folder.rglob("dump.json")
    index = json.loads(file.read_text())
    index["data"] = dict(list(index["data"].items())[:num_kept])
    file.write_text(json.dumps(index))
    return folder


def test_two_runs_that_were_cut_off_alike_do_not_pass(tmp_path: Path) -> None:
    golden, mine = (cut(write(tmp_path / name), 28) for name in ("golden", "mine"))
    verdict = judge(golden, mine, tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    reason = str(verdict.levels["completeness"].reason)
    assert (
        reason.count("the run was cut off in step 2: its last results are those of layers.1") == 2
    )


def test_a_run_that_was_cut_off_within_a_pass_is_not_compared(tmp_path: Path) -> None:
    verdict = judge(write(tmp_path / "g"), cut(write(tmp_path / "m"), 28), tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "layers.2.up:output at step 2" in verdict.unmatched.expected
    assert "the run was cut off in step 2" in str(verdict.levels["completeness"].reason)


def double(folder: Path, **changed: object) -> Path:
    """Record the second call of a module twice. changed: fields of the second record."""
    (file,) = folder.rglob("dump.json")
    index = json.loads(file.read_text())
    doubled, later = {}, 0
    for key, call in index["data"].items():
        head, _, number = key.rpartition(".")
        number = int(number)
        own = head == "Module.layers.1.up.Linear.forward"
        doubled[f"{head}.{number + (later if own else 0)}"] = call
        if own and number == 1:
            later = 1
            doubled[f"{head}.2"] = call | changed
    index["data"] = doubled
    file.write_text(json.dumps(index))
    return folder


REPEAT = "{} holds the same values twice in a pass: layers.1.up:output"


def test_a_call_that_both_sides_recorded_twice_is_a_note(tmp_path: Path) -> None:
    golden, mine = double(write(tmp_path / "golden")), double(write(tmp_path / "mine"))
    verdict = judge(golden, mine, tmp_path / "out")
    assert verdict.verdict is Outcome.PASS
    notes = [one for one in verdict.notes if "twice in a pass" in one]
    assert notes == [REPEAT.format("EXPECTED"), REPEAT.format("ACTUAL")]


@pytest.mark.parametrize("side", ["EXPECTED", "ACTUAL"])
def test_a_call_that_one_side_recorded_twice_forbids_a_pass(tmp_path: Path, side: str) -> None:
    golden, mine = write(tmp_path / "golden"), write(tmp_path / "mine")
    double(golden if side == "EXPECTED" else mine)
    verdict = judge(golden, mine, tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert str(verdict.levels["completeness"].reason) == REPEAT.format(side)


def test_an_argument_that_one_side_recorded_twice_is_not_a_repeated_call(tmp_path: Path) -> None:
    golden, mine = write(tmp_path / "golden"), double(write(tmp_path / "mine"), output=[])
    assert judge(golden, mine, tmp_path / "out").verdict is Outcome.PASS


def test_a_warm_up_alone_is_not_compared(tmp_path: Path) -> None:
    golden = write(tmp_path / "golden")
    mine = cut(write(tmp_path / "mine", ids=torch.zeros(1, 8, dtype=torch.long)), 11)
    verdict = judge(golden, mine, tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "ACTUAL holds only a warm-up: all of its tokens are equal" in verdict.notes


WHOLE = torch.linspace(-1, 1, 32).reshape(1, 2, 16)


def on_ranks(*parts: Tensor) -> Dump:
    """Return a dump in which three modules hold one part on each rank."""
    dump = make_dump(
        {
            (f"layers.{layer}.{rank}", "output", 0): part
            for layer in range(3)
            for rank, part in enumerate(parts)
        }
    )
    moved = []
    for one in dump.tensors:
        module, _, rank = one.site.at.module.rpartition(".")
        site = replace(one.site, at=replace(one.site.at, module=module, rank=int(rank)))
        moved.append(replace(one, site=site))
    return replace(dump, tensors=moved)


SHARDS = WHOLE.chunk(4, dim=-1)
SUMMANDS = (WHOLE * 0.75, WHOLE * 0.25)


def test_missing_shards_are_lost() -> None:
    assert find_lost_ranks(on_ranks(*SHARDS), on_ranks(*SHARDS[:2])) == {2, 3}
    assert find_lost_ranks(on_ranks(*SUMMANDS), on_ranks(SUMMANDS[0])) == {1}


def test_another_layout_has_lost_no_rank() -> None:
    assert find_lost_ranks(on_ranks(*SHARDS), on_ranks(*WHOLE.chunk(2, dim=-1))) == set()
    assert find_lost_ranks(on_ranks(*SHARDS), on_ranks(WHOLE)) == set()
    assert find_lost_ranks(on_ranks(*SUMMANDS), on_ranks(WHOLE)) == set()


def test_fewer_replicas_are_not_lost_ranks() -> None:
    assert find_lost_ranks(on_ranks(WHOLE, WHOLE), on_ranks(WHOLE)) == set()


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
        (one.site.at.module, one.site.port, one.site.at.step): one.read()
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


@pytest.mark.parametrize("side", ["expected", "actual"])
def test_damaged_file_forbids_a_pass(side: str, tmp_path: Path) -> None:
    sound = write(tmp_path / "sound")
    files = sorted(sound.rglob("*.pt"))[::4]
    assert len(files) > 12
    for number, file in enumerate(files):
        spoiled = tmp_path / f"damaged-{number}"
        shutil.copytree(sound, spoiled)
        (spoiled / file.relative_to(sound)).write_bytes(file.read_bytes()[:100])
        both = (spoiled, sound) if side == "expected" else (sound, spoiled)

        verdict = judge(*both, tmp_path / f"run-{number}")

        assert verdict.verdict is Outcome.NOT_COMPARED, file.name
        assert file.name in str(verdict.levels["completeness"].reason) + str(verdict.unmatched)


@pytest.mark.parametrize("side", ["golden", "mine"])
def test_damaged_logits_forbid_a_pass_by_norms(tmp_path: Path, side: str) -> None:
    golden, mine = write(tmp_path / "golden"), write(tmp_path / "mine")
    next((tmp_path / side).rglob("*lm_head*output.0.pt")).write_text("not a tensor")
    verdict = judge(golden, mine, tmp_path / "out", stats=True)
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "lm_head" in str(verdict.levels["completeness"].reason)


def test_one_damaged_side_of_a_near_tie_is_not_a_pass() -> None:
    """A near tie looks like a fault without the logits of both sides."""

    def generation(second: int) -> dict[tuple[str, str, int], torch.Tensor]:
        logits = torch.zeros(1, 2, 8)
        logits[0, :, second] = 1.0
        return {
            ("embed", "input.0", 0): torch.tensor([[1, 2]]),
            ("lm_head", "output", 0): logits,
            ("embed", "input.0", 1): torch.tensor([[second]]),
            ("lm_head", "output", 1): logits[:, :1],
        }

    actual = damaged(make_dump(generation(4)), "lm_head.output.0")
    found = compare_dumps(
        CompareOptions("", ""), make_dump(generation(3)), actual, SilentProgress()
    )
    assert found.verdict.levels["tokens"].verdict is Outcome.NOT_COMPARED
    assert not found.verdict.passed


def test_a_damaged_mask_that_actual_lacks_forbids_a_pass() -> None:
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool).tril()
    whole = {
        ("embed", "input.0", 0): torch.tensor([[1, 2]]),
        ("attn", "input.hidden_states", 0): torch.ones(1, 2, 8),
        ("attn", "input.attention_mask", 0): mask,
        ("attn", "output", 0): torch.ones(1, 2, 8),
    }
    expected = make_dump(whole)
    actual = make_dump({key: one for key, one in whole.items() if "mask" not in key[1]})
    tensors = [
        replace(one, load=None if "mask" in one.key else one.load) for one in expected.tensors
    ]
    without_values = replace(expected, tensors=tensors)
    for dump, outcome in (
        (expected, Outcome.PASS),
        (damaged(expected, "attn.input.attention_mask.0"), Outcome.NOT_COMPARED),
        (without_values, Outcome.PASS),
    ):
        found = compare_dumps(CompareOptions("", ""), dump, actual, SilentProgress())
        assert found.verdict.verdict is outcome


def test_a_dump_without_any_tensor_file_is_one_error(tmp_path: Path) -> None:
    golden, mine = write(tmp_path / "golden"), write(tmp_path / "mine")
    for file in mine.rglob("*.pt"):
        file.unlink()
    with pytest.raises(DumpError, match=r"mine holds no tensor: .* is missing, .* and \d+ more$"):
        judge(golden, mine, tmp_path / "out")


X = torch.arange(1.0, 17.0).reshape(1, 1, 16)
KEPT_MODULES: Values = {
    ("model.norm", "input.0", 0): X,
    ("model.norm", "output", 0): 2 * X,
    ("lm_head", "output", 0): 3 * X,
    ("", "output.logits", 0): 3 * X,
}
LOGITS: Values = {("", "output.logits", 0): 3 * X}


def compare(expected: Values, actual: Values, **options: object) -> Verdict:
    sides = make_dump(expected), make_dump(actual)
    comparison = CompareOptions("a", "b", **options)  # type: ignore[arg-type]
    return compare_dumps(comparison, *sides, SilentProgress()).verdict


def reason(verdict: Verdict) -> str:
    return str(verdict.levels["completeness"].reason)


@pytest.mark.parametrize("actual", [LOGITS, {("lm_head", "output", 0): 3 * X}])
def test_a_trace_of_logits_passes_at_the_level_of_logits(actual: Values) -> None:
    verdict = compare(KEPT_MODULES, actual)
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert reason(verdict).endswith(
        "ACTUAL holds nothing of single modules: --level logits compares what both hold"
    )
    assert compare(KEPT_MODULES, actual, level="logits").verdict is Outcome.PASS


def test_logits_that_no_compared_port_repeats_stay_missing() -> None:
    expected = {**KEPT_MODULES, ("lm_head", "output", 0): 4 * X}
    verdict = compare(expected, LOGITS, level="logits")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.unmatched.expected == ["lm_head:output"]
    wrong = {("", "output.logits", 0): 3.1 * X}
    assert compare(KEPT_MODULES, wrong, level="logits").verdict is Outcome.FAIL


@pytest.mark.parametrize(
    ("port", "words"),
    [
        ("parameter.weight", "parameters"),
        ("changed.past_key_values.0.keys", "values that calls change in place"),
    ],
)
def test_a_kind_that_actual_never_holds_is_named_with_its_option(port: str, words: str) -> None:
    expected = {**KEPT_MODULES, ("model.norm", port, 0): X}
    kind = port.partition(".")[0]
    verdict = compare(expected, KEPT_MODULES)
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert reason(verdict).endswith(
        f"ACTUAL holds no {words}: --allow-unmatched '*:{kind}*' excuses them"
    )
    excused = compare(expected, KEPT_MODULES, allow_unmatched=(f"*:{kind}*",))
    assert excused.verdict is Outcome.PASS
    assert "expected items that --allow-unmatched excuses: 1" in excused.notes


def test_a_kind_that_actual_holds_elsewhere_has_no_excuse() -> None:
    verdict = compare(
        KEPT_MODULES,
        {key: value for key, value in KEPT_MODULES.items() if key[1] != "input.0"}
        | {("lm_head", "input.0", 0): X},
    )
    assert "--allow-unmatched" not in reason(verdict)


@pytest.mark.parametrize(
    ("folders", "passes"),
    [
        ([["0_A", "1_B", "2_A", "3_B"]], [("0_A", 0), ("1_B", 0), ("0_A", 1), ("1_B", 1)]),
        (
            [["0_A", "1_B", "2_A", "3_B"], ["2_A", "3_B"]],
            [("0_A", 0), ("1_B", 0), ("0_A", 1), ("1_B", 1), ("0_A", 2), ("1_B", 2)],
        ),
        ([["0_A", "1_B", "2_C", "3_B"]], None),
        ([["0_A", "1_B", "2_C", "3_B"], ["2_C", "3_B"]], None),
        ([["0_A", "1_B", "2_A"]], None),
        ([["0_A", "1_B"], ["0_A", "1_B"]], None),
    ],
)
def test_two_graphs_of_one_folder_are_passes_of_their_own_if_their_operations_are_alike(
    folders: list[list[str]], passes: list[tuple[str, int]] | None
) -> None:
    names = [(name, step) for step, graph in enumerate(folders) for name in graph]
    dump = make_dump({(name, "output", step): torch.ones(1) for name, step in names})
    split = split_mixed_passes(dump)
    assert [(one.site.at.module, one.site.at.step) for one in split.tensors] == (passes or names)
    note = "folder 0 of memory holds the prefill and the first decode step"
    assert [*split.notes] == ([note] if passes else [])
