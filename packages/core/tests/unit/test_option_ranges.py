import pytest

from assay.errors import UsageError
from assay.option_ranges import LARGEST_SEED, MOST, parse_count, require_count


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("0012", 12), (str(MOST), MOST)])
def test_whole_numbers_are_read(text: str, value: int) -> None:
    assert parse_count("threads", text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "--1",
        "two",
        "1.5",
        "1e3",
        "nan",
        "inf",
        "\u00b2",
        "\u0663",
        " 3",
        "1_0",
        "1000001",
        "9" * 5000,
    ],
)
def test_anything_else_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_count("threads", text)
    shown = text[:40]
    assert str(raised.value) == f"threads={shown}: must be a whole number from 1 to 1,000,000"


def test_negative_numbers_are_read_where_they_are_allowed() -> None:
    assert parse_count("seed", "-3", -LARGEST_SEED, LARGEST_SEED) == -3
    assert require_count("seed", -LARGEST_SEED, -LARGEST_SEED, LARGEST_SEED) == -LARGEST_SEED
    with pytest.raises(UsageError, match=r"^seed=9223372036854775808: must be"):
        require_count("seed", LARGEST_SEED + 1, -LARGEST_SEED, LARGEST_SEED)
