"""Numbers of a page survive packing with every digit that is printed."""

import base64
import gzip
import json
import math
from typing import Any

import pytest

from assay.comparing.wording import format_number
from assay.report.page.packing import pack_data, pack_labels, pack_numbers


def unpacked(packed: dict[str, Any]) -> list[Any]:
    return [packed["labels"][code] for code in packed["codes"]]


def test_numbers_are_packed_as_they_are_printed() -> None:
    values = [0.0, 1e-31, 9.995, 9.985, 99.95, 0.9995, 0.09999, 1e42, 5e-324, -0.25, -3e-5]
    values += [10.0**exponent for exponent in range(-32, 44)]
    values += [(number + 0.5) / 100 for number in range(100, 1000)]  # where rounding is close
    values += [math.inf, -math.inf, math.nan]
    assert unpacked(pack_numbers(values)) == [format_number(value) for value in values]


def test_each_number_is_stored_once_by_its_printed_digits() -> None:
    packed = pack_numbers([14.62, 14.6, 14.649, 14.65])
    assert packed["labels"] == ["14.6", "14.7"]
    assert packed["codes"] == [0, 0, 0, 1]


def test_labels_of_numbers_are_sorted() -> None:
    values = [math.nan, 1e300, 0.1, 9.99, None, -1.0, math.inf, 10.0, 0.0, 1e-40]
    packed = pack_numbers(values)
    assert packed["labels"] == [
        None, "-1.0", "0", "1e-40", "0.1", "9.99", "10.0", "1e300", "inf", "nan",
    ]  # fmt: skip
    assert packed["isNumeric"]


def test_labels_are_stored_once_and_sorted() -> None:
    packed = pack_labels(["b", "a", "b\n"])
    assert packed == {"labels": ["a", "b", "b\\n"], "codes": [1, 0, 2], "isNumeric": False}
    assert pack_labels([3, None, 3]) == {"labels": [None, 3], "codes": [1, 0, 1], "isNumeric": True}


def test_data_is_compressed_json() -> None:
    data = {"names": ["</script>", "\u2713"], "top": 10.0}
    assert json.loads(gzip.decompress(base64.b64decode(pack_data(data)))) == data


def test_data_with_a_number_that_json_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        pack_data({"top": math.nan})
