import pytest

from assay.errors import AssayError, MachineError, UsageError


@pytest.mark.parametrize("kind", [UsageError, MachineError])
def test_every_error_ends_a_command_with_2(kind: type[AssayError]) -> None:
    assert issubclass(kind, AssayError)
    assert kind("x").exit_code == 2


def test_the_caller_s_and_the_machine_s_errors_are_told_apart() -> None:
    assert not issubclass(UsageError, MachineError)
    assert not issubclass(MachineError, UsageError)
