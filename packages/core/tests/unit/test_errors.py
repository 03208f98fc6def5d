import pytest

from assay.errors import AssayError, MachineError, UsageError


@pytest.mark.parametrize("kind", [UsageError, MachineError])
def test_every_error_ends_a_command_with_2(kind: type[AssayError]) -> None:
    assert issubclass(kind, AssayError)
    assert kind("x").exit_code == 2


def test_usage_errors_and_machine_errors_are_distinct() -> None:
    assert not issubclass(UsageError, MachineError)
    assert not issubclass(MachineError, UsageError)
