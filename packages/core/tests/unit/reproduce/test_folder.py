"""Reproductions of hand-made programs: what is written fails where it must, as small as it can."""

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.recording.programs import Group, Program, ProgramRecorder, RecordedValue, Step, Value
from assay.reproduce.folder import build, find_tokens
from assay.reproduce.script import STATISTICS, Reproduction, severity
from assay.sites import CallSite, Site
from assay.verdicts import Outcome, Verdict

LIMITS = dict.fromkeys(STATISTICS, 3.0)
SITE = Site(CallSite(0, "fc"), "output")

Compute = Callable[[Tensor, Tensor], Tensor]


def healthy(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x.view(4, 8, 6) @ weight.t()).view(32, 10)


def other_gelu(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x.view(4, 8, 6) @ weight.t(), approximate="tanh").view(32, 10)


def doubled_row(x: Tensor, weight: Tensor) -> Tensor:
    value = healthy(x, weight)
    value[5] *= 2
    return value


def last_half_twice(x: Tensor, weight: Tensor) -> Tensor:
    value = healthy(x, weight)
    return torch.cat([value[:, 5:], value[:, 5:]], 1)


def first_rows(x: Tensor, weight: Tensor) -> Tensor:
    return 2 * healthy(x, weight)[:8]


def record(compute: Compute, x: Tensor, weight: Tensor) -> Program:
    recorder = ProgramRecorder(nn.Identity())
    recorder.name(x, "fc.input")
    recorder.name(weight, "fc.weight")
    with recorder:
        value = compute(x, weight)
    return recorder.program_of(value)


def inputs_of(dtype: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 48).to(getattr(torch, dtype)), torch.randn(10, 6).to(
        getattr(torch, dtype)
    )


def pair(compute: Compute, dtype: str = "bfloat16") -> RecordedValue:
    x, weight = inputs_of(dtype)
    answer = healthy(x.double(), weight.double())
    kept = torch.ones(32, dtype=torch.bool)
    programs = record(compute, x, weight), record(healthy, x, weight)
    return RecordedValue(SITE, *programs, {"right": answer, "compared": kept})


def build_for(compute: Compute, dtype: str = "bfloat16") -> Reproduction:
    found = build([pair(compute, dtype)], dtype, LIMITS, "cpu")
    assert isinstance(found, Reproduction)
    return found


@pytest.mark.parametrize("compute", [other_gelu, doubled_row])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_candidates_program_fails_and_the_references_passes(
    compute: Compute, dtype: str
) -> None:
    one = build_for(compute, dtype)
    assert severity(one.measure(one.dtype, "cpu")) > 1
    assert severity(one.measure(one.dtype, "cpu", "reference")) <= 1


def test_an_error_below_the_noise_of_bfloat16_is_shown_in_float32() -> None:
    assert build_for(other_gelu).dtype == "float32"


def find_wrong(one: Reproduction, dtype: str, *, reference: bool = False, fixed: str = "") -> str:
    """What the script prints after FAIL. fixed: code that someone removes from it."""
    scope: dict[str, Any] = {"__name__": "reproduce"}
    exec(one.text.replace(fixed, "") if fixed else one.text, scope)  # noqa: S102 - the script
    given = Namespace(device="cpu", dtype=dtype, reference=reference)
    found: str = scope["find_wrong"](one.tensors, given)
    return found


def test_a_dtype_whose_noise_hides_the_error_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    one = build_for(other_gelu)
    assert find_wrong(one, "float32")
    with pytest.raises(SystemExit, match="2"):
        find_wrong(one, "bfloat16")
    assert "The error cannot show in bfloat16" in capsys.readouterr().out
    assert find_wrong(one, "bfloat16", fixed=", approximate='tanh'") == ""
    assert find_wrong(one, "bfloat16", reference=True) == ""


@pytest.mark.parametrize("reference", [False, True])
def test_a_dtype_in_which_the_right_operations_fail_is_no_fail(
    capsys: pytest.CaptureFixture[str], *, reference: bool
) -> None:
    x = torch.full((2, 8), 300.0)

    def squares(x: Tensor, _: Tensor, factor: float = 1.0) -> Tensor:
        return (x * x).mean(-1, True).sqrt() * factor

    programs = record(partial(squares, factor=2.0), x, x), record(squares, x, x)
    answer = {"right": squares(x, x).double(), "compared": torch.ones(2, dtype=torch.bool)}
    one = build([RecordedValue(SITE, *programs, answer)], "float32", LIMITS, "cpu")
    assert isinstance(one, Reproduction)
    with pytest.raises(SystemExit, match="2"):
        find_wrong(one, "float16", reference=reference)
    assert "what is right fails in it" in capsys.readouterr().out


def test_a_reproduction_is_small() -> None:
    one = build_for(other_gelu)
    assert one.tensors["fc.weight"].shape == (1, 6)
    assert one.tensors["right"].numel() < 32 * 10


def attention_gradient(query: Tensor, key: Tensor, factor: float = 1.0) -> Tensor:
    query = query.detach().requires_grad_()
    attend = torch.nn.functional.scaled_dot_product_attention
    attend(query * factor, key, key, enable_gqa=True).square().sum().backward()
    assert query.grad is not None
    return query.grad


def test_fused_attention_is_made_smaller_in_backward_without_reading_foreign_memory() -> None:
    # Fewer query heads than key heads, or other rows, end the process (torch 2.13).
    torch.manual_seed(0)
    query, key = torch.randn(4, 4, 16, 8), torch.randn(4, 2, 16, 8)
    wrong = record(partial(attention_gradient, factor=1.1), query, key)
    programs = wrong, record(attention_gradient, query, key)
    assert any("attention_for_cpu_backward" in step.operation for step in wrong.steps)
    right = attention_gradient(query.double(), key.double())
    answer = {"right": right, "compared": torch.ones(4, 4, 16, dtype=torch.bool)}
    one = build([RecordedValue(SITE, *programs, answer)], "float32", LIMITS, "cpu")
    assert isinstance(one, Reproduction)
    assert one.tensors["fc.input"].numel() < query.numel() // 8
    assert one.severity >= 2


def test_fused_attention_in_backward_shrinks_if_ranks_exchange_the_result() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(4, 4, 16, 8), torch.randn(4, 2, 16, 8)
    alone = record(partial(attention_gradient, factor=1.1), query, key)
    exchange = [[Value(alone.target)], Group([0, 1]), None, None, True]
    total = Step("c10d.allreduce_.default", exchange, {}, [0, 0], has_several=True)
    rank = replace(alone, steps=[*alone.steps, total])
    reference = record(lambda *of: 2 * attention_gradient(*of), query, key)
    right, wrong = (
        2 * attention_gradient(query.double(), key.double(), factor) for factor in (1.0, 1.1)
    )
    answer = {"right": right, "compared": torch.ones(4, 4, 16, dtype=torch.bool)}
    error = float((wrong - right).norm() / right.norm())
    pair = RecordedValue(SITE, rank, reference, answer, error, ranks=[rank, rank])
    one = build([pair], "float32", LIMITS, "cpu")
    assert isinstance(one, Reproduction)
    assert one.tensors["fc.input"].numel() < query.numel() // 8
    assert one.severity >= 2


@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_attention_is_written_as_the_function_of_every_device(
    *,
    is_causal: bool,
) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)

    def attend(query: Tensor, key: Tensor, factor: float = 1.0) -> Tensor:
        function = torch.nn.functional.scaled_dot_product_attention
        return function(query * factor, key, key, enable_gqa=True, is_causal=is_causal)

    programs = record(partial(attend, factor=1.1), query, key), record(attend, query, key)
    right = attend(query.double(), key.double())
    answer = {"right": right, "compared": torch.ones(2, 4, 16, dtype=torch.bool)}
    one = build([RecordedValue(SITE, *programs, answer)], "float32", LIMITS, "cpu")
    assert isinstance(one, Reproduction)
    assert one.text.count("F.scaled_dot_product_attention(") == 1
    assert one.text.count("is_causal=True") == is_causal


def test_parts_of_a_flat_buffer_become_inputs_that_shrink() -> None:
    torch.manual_seed(0)
    flat, whole = torch.randn(2 * 32 * 20), torch.randn(32, 40)

    def norm_of_part(flat: Tensor, _: Tensor) -> Tensor:
        buffer = torch.empty(32 * 20)
        buffer.copy_(flat.split(32 * 20)[0])
        parts = [buffer.as_strided((8, 20), (20, 1), k * 8 * 20) for k in range(4)]
        return torch.stack([part.square().sum() for part in parts]).sum().sqrt().view(1, 1)

    def norm(whole: Tensor, _: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(whole)
        return length.view(1, 1)

    programs = record(norm_of_part, flat, flat), record(norm, whole, whole)
    right = norm(whole.double(), whole)
    answer = {"right": right, "compared": torch.ones(1, dtype=torch.bool)}
    one = build([RecordedValue(SITE, *programs, answer)], "float32", LIMITS, "cpu")
    assert isinstance(one, Reproduction)
    assert sum(tensor.nbytes for tensor in one.tensors.values()) <= 1000
    assert "as_strided" not in one.text
    assert 'aten.pow(t["buffer_part"]' in one.text
    assert one.severity > 2


def test_a_root_in_too_low_a_precision_is_seen_in_the_scale_of_rows() -> None:
    def normalized(x: Tensor, _: Tensor, *, narrow: bool = False) -> Tensor:
        mean = x.float().square().mean(-1, True)
        root = mean.bfloat16().rsqrt().float() if narrow else mean.rsqrt()
        return (x.float() * root).bfloat16()

    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    answer = x.double() * x.double().square().mean(-1, True).rsqrt()
    kept = torch.ones(64, dtype=torch.bool)
    programs = record(partial(normalized, narrow=True), x, x), record(normalized, x, x)
    pairs = [RecordedValue(SITE, *programs, {"right": answer, "compared": kept})]
    limits = dict.fromkeys(STATISTICS, 5.0) | {"error of the scale of rows": 2.3}
    one = build(pairs, "bfloat16", limits, "cpu")
    assert isinstance(one, Reproduction)
    over = [name for name, *row in one.measure("bfloat16", "cpu") if row[0] > row[1] * row[2]]
    assert over == ["error of the scale of rows"]


def test_the_wrong_row_stays_in_a_smaller_reproduction() -> None:
    one = build_for(doubled_row)
    assert severity(one.measure(one.dtype, "cpu")) > 1
    assert one.tensors["right"].shape[0] > 5


def test_a_smaller_reproduction_keeps_clear_of_its_limit() -> None:
    def mean(x: Tensor, _: Tensor) -> Tensor:
        return x.mean(-1, True)

    def mean_and_more(x: Tensor, _: Tensor) -> Tensor:
        return (
            x.mean(-1, True) + x.sum(-1, True) * 1e-4
        )  # the error, relative to the mean, falls with the size

    x, kept = torch.rand(4, 512), torch.ones(4, dtype=torch.bool)
    programs = record(mean_and_more, x.bfloat16(), x), record(mean, x.bfloat16(), x)
    answer = {"right": x.bfloat16().double().mean(-1, True), "compared": kept}
    one = build([RecordedValue(SITE, *programs, answer)], "bfloat16", LIMITS, "cpu")
    assert isinstance(one, Reproduction)
    assert one.tensors["right"].numel() < 4
    assert severity(one.measure(one.dtype, "cpu")) >= 2


def test_a_smaller_size_leaves_both_programs_one_shape() -> None:
    # Of one column, the last half is empty.
    one = build_for(last_half_twice)
    assert one.run("candidate").shape == one.run().shape == one.tensors["right"].shape


def branches_of(one: Reproduction) -> tuple[list[str], list[str]]:
    """The lines of `compute` that run only if it is wrong, and only if it is right."""
    sides: dict[str, list[str]] = {"if wrong:": [], "else:": [], "if not wrong:": []}
    head = ""
    for line in one.text.partition("def compute")[2].partition("def run")[0].splitlines():
        head = line.strip() if line.strip() in sides else head * line.startswith(" " * 8)
        if head and head != line.strip():
            sides[head].append(line.strip())
    return sides["if wrong:"], sides["else:"] + sides["if not wrong:"]


def test_only_lines_that_differ_are_in_branches() -> None:
    (wrong,), (right,) = branches_of(build_for(other_gelu))
    assert "approximate='tanh'" in wrong
    assert "aten.gelu(" in right


def test_the_readme_names_the_line_and_the_class_of_the_module(tmp_path: Path) -> None:
    wrong = pair(other_gelu)._replace(module_class="MyLinear")
    one = build([wrong], "bfloat16", LIMITS, "cpu")
    assert isinstance(one, Reproduction)
    one.write("a head", Verdict(verdict=Outcome.FAIL), tmp_path)
    readme = (tmp_path / "README.md").read_text()
    line = other_gelu.__code__.co_firstlineno + 1
    assert "names a head. The module is of class `MyLinear`." in readme
    assert f"is called at `{__file__}:{line}`" in readme


def test_the_readme_names_the_error_of_the_recorded_tensors(tmp_path: Path) -> None:
    one = build_for(doubled_row, "float32")
    one.write("a head", Verdict(verdict=Outcome.FAIL), tmp_path)
    rows = [line.split(" | ") for line in (tmp_path / "README.md").read_text().splitlines()]
    (errors,) = [row for row in rows if row[0] == "| relative error"]
    value, whole = (compute(*inputs_of("float32")).double() for compute in (doubled_row, healthy))
    expected = float((value - whole).norm() / whole.norm())
    assert float(errors[-1].strip(" |")) == pytest.approx(expected, rel=0.01)
    assert float(errors[1]) != pytest.approx(expected, rel=0.01)  # of fewer values


EMPTY = torch.empty(0)


def with_empty_cache(x: Tensor, _: Tensor, factor: float = 1.0) -> Tensor:
    return torch.cat([EMPTY, x * factor], -2)


def build_in_float32(wrong: Compute, right: Compute) -> Reproduction:
    x, _ = inputs_of("float32")
    value = right(x, x)
    answer = {"right": value.double(), "compared": torch.ones(len(value), dtype=torch.bool)}
    programs = record(wrong, x, x), record(right, x, x)
    one = build([RecordedValue(SITE, *programs, answer)], "float32", LIMITS, "cpu")
    assert isinstance(one, Reproduction)
    return one


def normalized(x: Tensor, _: Tensor, *, end: int | None = None) -> Tensor:
    return x * x[:, :end].square().mean(-1, True).rsqrt()


def test_a_smaller_reproduction_does_not_fail_by_nan_instead() -> None:
    # Of one column, the mean without the last is NaN.
    one = build_in_float32(partial(normalized, end=-1), normalized)
    assert one.tensors["fc.weight"].shape == (1, 2)
    assert [name for name, *_ in one.measure("float32", "cpu")] == list(STATISTICS)


def test_an_empty_cache_is_not_written() -> None:
    one = build_in_float32(partial(with_empty_cache, factor=2.0), with_empty_cache)
    assert "constant" not in one.text


def test_a_number_is_written_into_the_script(tmp_path: Path) -> None:
    x, number = torch.randn(4, 48), torch.tensor(0.25)

    def scaled(x: Tensor, _: Tensor, factor: float = 1.0) -> Tensor:
        return x * number * factor

    programs = record(partial(scaled, factor=3.0), x, x), record(scaled, x, x)
    answer = {"right": scaled(x, x).double(), "compared": torch.ones(4, dtype=torch.bool)}
    one = build([RecordedValue(SITE, *programs, answer)], "float32", LIMITS, "cpu")
    assert isinstance(one, Reproduction)
    one.write("a head", Verdict(verdict=Outcome.FAIL), tmp_path)
    assert "constant = torch.tensor(0.25, " in (tmp_path / "reproduce.py").read_text()
    assert "constant" not in torch.load(tmp_path / "tensors.pt", weights_only=True)


def noisy(x: Tensor, weight: Tensor) -> Tensor:
    value = healthy(x, weight)
    factor = torch.empty_like(value).fill_(2)
    doubled = value * 1
    value.mul_(factor)
    return value + doubled


def test_a_value_is_computed_before_its_memory_changes() -> None:
    one = build_for(noisy, "float32")
    assert torch.equal(one.run("candidate"), 3 * one.run())


def added_in_place(x: Tensor, weight: Tensor) -> Tensor:
    value = healthy(x, weight).detach()  # what accumulates a gradient holds the first one like this
    value.add_(x.reshape(-1)[:1])
    return value


def test_a_value_that_is_changed_under_another_name_is_written_once() -> None:
    x, weight = torch.randn(4, 48), torch.randn(10, 6)
    program = record(added_in_place, x, weight)
    one = pair(doubled_row, "float32")._replace(program=program)
    found = build([one], "float32", LIMITS, "cpu")
    assert isinstance(found, Reproduction)
    assert found.text.count("aten.gelu(") == 1


def long_sum(x: Tensor, weight: Tensor, last: float = 1.0) -> Tensor:
    value = healthy(x, weight)
    for number in range(12):
        value = value + value / (number + 2)
    return value * last


def test_many_operations_share_a_line() -> None:
    x, weight = torch.randn(4, 48), torch.randn(10, 6)
    wrong, right = (record(partial(long_sum, last=last), x, weight) for last in (1.5, 1.0))
    answer = long_sum(x.double(), weight.double())
    kept = torch.ones(32, dtype=torch.bool)
    one = RecordedValue(SITE, wrong, right, {"right": answer, "compared": kept})
    found = build([one], "float32", LIMITS, "cpu")
    assert isinstance(found, Reproduction)
    assert found.text.count("\n") < 140
    assert severity(found.measure("float32", "cpu")) > 1


def test_sides_that_differ_in_every_other_operation_share_no_lines() -> None:
    def sums(x: Tensor, weight: Tensor, *, narrow: bool = False) -> Tensor:
        total = torch.zeros(32, 10, dtype=x.dtype)
        for number in range(1, 25):
            total = total + healthy(x * number, weight)
            total = total.bfloat16().to(x.dtype) if narrow else total
        return total

    x, weight = inputs_of("float32")
    answer = {
        "right": sums(x.double(), weight.double()),
        "compared": torch.ones(32, dtype=torch.bool),
    }
    programs = record(partial(sums, narrow=True), x, weight), record(sums, x, weight)
    one = build([RecordedValue(SITE, *programs, answer)], "float32", LIMITS, "cpu")
    assert isinstance(one, Reproduction)
    assert one.text.count("\n") < 120
    assert severity(one.measure("float32", "cpu")) > 1


@pytest.mark.parametrize(
    ("compute", "said"),
    [(other_gelu, "approximate='tanh'"), (healthy, "no operation of torch")],
)
def test_the_readme_names_the_operations_that_the_reference_does_not_run(
    compute: Compute, said: str, tmp_path: Path
) -> None:
    one = build_for(other_gelu)
    if compute is healthy:
        one = replace(one, ranks=[replace(one.candidate, steps=[], target=1)])
    verdict = Verdict(verdict=Outcome.FAIL, command=["assay"], candidate={"device": "a chip"})
    one.write("a head", verdict, tmp_path)
    readme = (tmp_path / "README.md").read_text()
    assert said in readme
    assert "It failed on a chip." in readme
    assert "fc.weight: [1, 6] of [10, 6]\n" in readme
    assert " of [32, 10], the right result\n" in readme
    named = "gelu" if compute is other_gelu else "an operation"
    assert readme.startswith(f"# The result of {named} is wrong: {SITE}\n")
    assert "The failed check names a head" in readme
    assert "FAIL, exit code 1" in readme


def summed(own: Tensor, factor: float) -> Program:
    """A rank that scales its own part, and sums the parts of all ranks in place."""
    scale = Step("aten.mul.Tensor", [Value(1), factor], {}, [2], has_several=False)
    exchange = [[Value(2)], Group([0, 1]), None, None, True]
    total = Step("c10d.allreduce_.default", exchange, {}, [0, 0], has_several=True)
    return Program([scale, total], {1: own}, {1: "gradient"}, 2)


def pair_of_ranks(error: float) -> RecordedValue:
    parts = [torch.ones(2, 3), torch.full((2, 3), 2.0)]
    ranks = [summed(part, factor) for part, factor in zip(parts, (1.0, 0.5), strict=True)]
    answer = {
        "right": torch.full((2, 3), 3.0).double(),
        "compared": torch.ones(2, dtype=torch.bool),
    }
    reference = Program([], {1: torch.full((2, 3), 3.0)}, {}, 1)
    return RecordedValue(SITE, ranks[1], reference, answer, error, rank=1, ranks=ranks)


def test_ranks_exchange_their_parts_when_they_run_again() -> None:
    found = build([pair_of_ranks(error=1 / 3)], "float32", LIMITS, "cpu")  # 2 in place of 3
    assert isinstance(found, Reproduction)
    assert "allreduce([v1])" in found.text
    assert found.measure("float32", "cpu")[0][1] == pytest.approx(1 / 3)
    assert found.run("candidate").unique().tolist() == [2.0]
    assert severity(found.measure("float32", "cpu", "reference")) <= 1


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (pair_of_ranks(error=0.2), "its exchanges give another value"),
        (pair_of_ranks(error=1 / 3)._replace(ranks=()), "ranks make other exchanges"),
    ],
)
def test_exchanges_that_do_not_give_the_recorded_value_are_refused(
    changed: RecordedValue, why: str
) -> None:
    assert why in str(build([changed], "float32", LIMITS, "cpu"))


def test_equal_programs_are_written_once() -> None:
    one = build_for(other_gelu)
    same = replace(one, ranks=[one.reference])
    assert "if wrong:" in one.text
    assert "if wrong:" not in same.text
    assert "a kernel of them is wrong" in same.text


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_error_that_is_no_number_is_wrong(wrong: float) -> None:
    assert severity([("a", 0.5, 1.0, 1.0), ("b", wrong, 1.0, 1.0)]) == math.inf


@pytest.mark.parametrize(
    ("port", "name", "dtype", "found"),
    [
        ("output", "embed_tokens.input", torch.int64, ["embed_tokens.input"]),
        ("output", "position_ids", torch.int64, []),
        ("output", "weight", torch.float32, []),
        ("input.input_ids", "constant", torch.int32, ["constant", "right"]),
        ("input.position_ids", "constant", torch.int64, []),
    ],
)
def test_integers_but_for_positions_may_be_tokens(
    port: str, name: str, dtype: torch.dtype, found: list[str]
) -> None:
    answer = torch.zeros(2, dtype=torch.int64 if port.startswith("input") else torch.float64)
    one = replace(
        build_for(other_gelu),
        site=Site(CallSite(0, ""), port),
        tensors={name: torch.zeros(2, dtype=dtype), "right": answer},
    )
    assert find_tokens(one) == found


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([pair(healthy)], "the operations give the right value when they run again"),
        ([pair(other_gelu)._replace(reference=None)], "the reference does not make this value"),
        ([pair(first_rows)], "its shape is not the reference's"),
        ([], "no value there is over its limit"),
    ],
)
def test_what_cannot_fail_by_itself_is_refused_with_its_reason(
    pairs: list[RecordedValue], why: str
) -> None:
    assert why in str(build(pairs, "bfloat16", LIMITS, "cpu"))


def test_a_wrong_reference_is_not_trusted() -> None:
    wrong = pair(other_gelu)
    answer = {**wrong.answer, "right": wrong.answer["right"] * 1.001}
    found = build([wrong._replace(answer=answer)], "bfloat16", LIMITS, "cpu")
    assert "do not give the recorded value again" in str(found)


@pytest.mark.parametrize(("with_padding", "is_built"), [(True, True), (False, False)])
def test_tokens_of_packed_rows_are_looked_for_in_the_packed_row(
    *, with_padding: bool, is_built: bool
) -> None:
    tokens = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]])
    kept = tokens != 0

    def packed(rows: Tensor) -> Tensor:
        return rows.reshape(1, -1) if with_padding else rows[rows != 0][None]

    def recorded(compute: Callable[[Tensor], Tensor]) -> Program:
        recorder = ProgramRecorder(nn.Identity())
        with recorder:
            value = compute(tokens)
        return recorder.program_of(value)

    programs = recorded(packed), recorded(Tensor.clone)
    one = RecordedValue(SITE, *programs, {"right": tokens[..., None], "compared": kept})
    found = build([one], "float32", LIMITS, "cpu")
    assert isinstance(found, Reproduction) == is_built
    if isinstance(found, Reproduction):
        assert severity(found.measure("float32", "cpu")) > 1
        assert severity(found.measure("float32", "cpu", "reference")) == 0


@pytest.mark.parametrize(("module", "is_built"), [("", True), ("mlp.gate", False)])
def test_labels_that_no_operation_made_are_compared_as_recorded(
    *, module: str, is_built: bool
) -> None:
    right, wrong = torch.tensor([[5, -100, 7]]), torch.tensor([[5, 6, 7]])
    candidate, reference = (Program([], {1: side}, {}, 1) for side in (wrong, right))
    kept = torch.ones(1, 3, dtype=torch.bool)
    site = Site(CallSite(0, module), "labels")
    one = RecordedValue(site, candidate, reference, {"right": right[..., None], "compared": kept})
    found = build([one], "float32", LIMITS, "cpu")
    assert isinstance(found, Reproduction) == is_built
    if isinstance(found, Reproduction):
        ((name, error, *_),) = found.measure("float32", "cpu")
        assert (name, error > 0) == ("share of unequal values", True)
        assert found.measure("float32", "cpu", "reference")[0][1] == 0


def test_masks_are_compared_by_what_they_allow() -> None:
    scores = torch.zeros(1, 1, 2, 3)
    allowed = torch.tensor([[[[True, True, False], [True, True, True]]]])

    def mask(allowed_: Tensor, fill: float) -> Program:
        recorder = ProgramRecorder(nn.Identity())
        with recorder:
            value = scores.masked_fill(~allowed_, fill)
        return recorder.program_of(value)

    kept = torch.ones(1, 1, 2, dtype=torch.bool)
    lowest = float(torch.finfo(torch.float32).min)
    everything = torch.ones_like(allowed)
    one = RecordedValue(
        SITE, mask(everything, lowest), mask(allowed, lowest), {"right": allowed, "compared": kept}
    )
    found = build([one], "float32", LIMITS, "cpu")
    assert isinstance(found, Reproduction)
    ((name, error, _, limit),) = found.measure("float32", "cpu")
    assert (name, limit) == ("share of unequal values", 0.0)
    assert error > 0
    assert "LIMITS" not in found.text
    for dtype in ("float16", "float64"):
        assert find_wrong(found, dtype) == name
        assert find_wrong(found, dtype, reference=True) == ""


def test_a_mask_of_packed_rows_is_compared_with_the_recorded_one() -> None:
    def mask(num_rows: int, length: int) -> Program:
        recorder = ProgramRecorder(nn.Identity())
        with recorder:
            value = torch.ones(num_rows, 1, length, length, dtype=torch.bool).tril()
        return recorder.program_of(value)

    right = torch.block_diag(*torch.ones(2, 3, 3).tril()).bool()[None, None]
    answer = {"right": right, "compared": torch.ones(1, 1, 6, dtype=torch.bool)}
    found = build([RecordedValue(SITE, mask(1, 6), mask(2, 3), answer)], "float32", LIMITS, "cpu")
    assert isinstance(found, Reproduction)
    ((name, error, *_),) = found.measure("float32", "cpu")
    assert (name, error > 0) == ("share of unequal values", True)
    assert found.measure("float32", "cpu", "reference")[0][1] == 0
