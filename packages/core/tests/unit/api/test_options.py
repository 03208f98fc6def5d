import pytest

from assay.api.options import seconds_of_timeout
from assay.errors import UsageError


@pytest.mark.parametrize("variable", ["CI", "GITHUB_ACTIONS"])
def test_checks_have_two_hours_under_ci_unless_a_time_is_given(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert seconds_of_timeout(None) is None

    monkeypatch.setenv(variable, "true")
    assert seconds_of_timeout(None) == 2 * 3600
    assert seconds_of_timeout("30m") == 1800


def test_a_text_that_states_no_time_is_refused() -> None:
    with pytest.raises(UsageError, match="soon"):
        seconds_of_timeout("soon")
