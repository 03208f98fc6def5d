import pytest
from transformers import activations

from assay.errors import AssayError, MachineError, UsageError, raised_in_words


@pytest.mark.parametrize("kind", [UsageError, MachineError])
def test_every_error_ends_a_command_with_2(kind: type[AssayError]) -> None:
    assert issubclass(kind, AssayError)
    assert kind("x").exit_code == 2


def test_usage_errors_and_machine_errors_are_distinct() -> None:
    assert not issubclass(UsageError, MachineError)
    assert not issubclass(MachineError, UsageError)


def test_error_of_transformers_names_its_innermost_line_there() -> None:
    with pytest.raises(KeyError) as found:
        activations.get_activation("nope")
    words = raised_in_words(found.value)
    assert f"{activations.__file__}:" in words
    assert words.splitlines()[-1].lstrip().partition(": ")[0].endswith(", in get_activation")
