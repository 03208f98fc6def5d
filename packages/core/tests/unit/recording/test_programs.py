"""Programs of hand-made computations: which operations and inputs they hold."""

import pytest
import torch
from torch import Tensor, nn

from assay.hooks.suspension import suspended
from assay.recording.programs import Program, ProgramRecorder


@pytest.fixture
def recorder() -> ProgramRecorder:
    return ProgramRecorder(nn.Linear(2, 2))


def operations(program: Program) -> list[str]:
    return [step.operation.split(".")[1] for step in program.steps]


def test_only_operations_that_a_value_depends_on_are_in_its_program(
    recorder: ProgramRecorder,
) -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    with recorder:
        _ = y * 5
        value = (x + 1) * 2
    program = recorder.program_of(value)
    assert operations(program) == ["add", "mul"]
    assert [one.tolist() for one in program.inputs.values()] == [[1.0, 2.0]]


def test_inputs_have_their_values_before_operations_in_place(recorder: ProgramRecorder) -> None:
    x = torch.tensor([1.0, 2.0])
    with recorder:
        view = x[1:]
        view.mul_(10)
        value = x + 1
    program = recorder.program_of(value)
    assert operations(program) == ["slice", "mul_", "add"]
    assert [one.tolist() for one in program.inputs.values()] == [[1.0, 2.0]]


def test_what_is_overwritten_unread_is_not_in_a_program(recorder: ProgramRecorder) -> None:
    x = torch.tensor([1.0, 2.0])
    with recorder:
        kept = x.clone()
        x.mul_(torch.tensor([5.0, 5.0]))
        x.copy_(kept)
        part = x[1:]
        part.mul_(3)
    program = recorder.program_of(x)
    assert operations(program) == ["clone", "copy_", "slice", "mul_"]
    with recorder:
        part.copy_(kept[1:])
    assert operations(recorder.program_of(x))[-4:] == ["slice", "mul_", "slice", "copy_"]


def test_a_tensor_that_assay_writes_to_is_an_input_from_then_on(recorder: ProgramRecorder) -> None:
    x = torch.tensor([1.0])
    with recorder:
        made = x * 2
        recorder.overwrite(made)
        with suspended():
            made.copy_(torch.tensor([7.0]))
        value = made + 1
    program = recorder.program_of(value)
    assert operations(program) == ["add"]
    assert [one.tolist() for one in program.inputs.values()] == [[7.0]]


def test_parameters_and_injected_values_have_names(recorder: ProgramRecorder) -> None:
    injected = torch.ones(1, 2)
    recorder.name(injected, "fc.input")
    with recorder:
        value = recorder.model(injected)
    assert sorted(recorder.program_of(value).names.values()) == ["bias", "fc.input", "weight"]


def test_backward_is_a_program_too(recorder: ProgramRecorder) -> None:
    weight, arriving = torch.tensor([2.0], requires_grad=True), torch.tensor([5.0])
    with recorder:
        (weight * 3).backward(arriving)
    program = recorder.program_of(weight.grad)  # type: ignore[arg-type]
    assert operations(program) == ["mul"]
    assert [one.tolist() for one in program.inputs.values()] == [[5.0]]


def test_operations_on_lists_are_narrowed_to_the_wanted_tensor(recorder: ProgramRecorder) -> None:
    tensors = [torch.full((1,), float(n)) for n in range(3)]
    with recorder:
        torch._foreach_mul_(tensors, 2.0)
    (step,) = recorder.program_of(tensors[1]).steps
    assert step.operation == "aten._foreach_mul_.Scalar"
    assert len(step.args[0]) == 1
    assert step.args[1] == 2.0


def test_a_slice_of_a_buffer_is_made_of_the_buffer(recorder: ProgramRecorder) -> None:
    x = torch.arange(4.0)
    with recorder:
        buffer = x * 2
    with suspended():
        part = buffer[2:]
    program = recorder.program_of(part)
    assert operations(program) == ["mul", "as_strided"]
    assert program.steps[1].args[1:] == [[2], [1], 2]


def test_a_number_that_python_read_is_made_of_the_tensor_it_was_read_from(
    recorder: ProgramRecorder,
) -> None:
    x = torch.tensor([3.0, 4.0])
    with recorder:
        number = float(x.norm())
    program = recorder.program_of(torch.tensor([[number]], dtype=torch.float64))
    assert operations(program) == ["linalg_vector_norm", "view"]
    assert program.steps[1].args[1] == [1, 1]


@pytest.mark.parametrize("value", [torch.ones(1), nn.Parameter(torch.ones(1))])
def test_a_value_that_no_operation_made_has_no_steps(
    recorder: ProgramRecorder, value: Tensor
) -> None:
    program = recorder.program_of(value)
    assert list(program.steps) == []
    assert program.inputs[program.target].tolist() == [1.0]
