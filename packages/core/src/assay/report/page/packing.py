"""Columns of values for the script of a page: sorted distinct labels, and an index for each value."""

import base64
import gzip
import json
import math
from collections.abc import Sequence

from assay.comparing.wording import DIGITS, format_number
from assay.foreign_text import one_line


def pack_data(data: dict[str, object]) -> str:
    """Return `data` as JSON, compressed by gzip, in base64. Raises: ValueError for NaN and infinity."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 1, mtime=0)).decode("ascii")


def pack_numbers(values: Sequence[float | None]) -> dict[str, object]:
    """Pack numbers with the digits that are printed. NaN is ranked above infinity, None lowest."""
    # Rounding first leaves few distinct numbers to format.
    texts = ["" if value is None else f"{value:.{DIGITS - 1}e}" for value in values]
    distinct = sorted(set(texts), key=lambda text: (text == "nan", float(text or -math.inf)))
    codes = {text: code for code, text in enumerate(distinct)}
    return {
        "labels": [format_number(float(text)) if text else None for text in distinct],
        "codes": [codes[text] for text in texts],
        "isNumeric": True,
    }


def pack_labels(values: Sequence[str] | Sequence[int | None]) -> dict[str, object]:
    """Pack texts, or whole numbers of which some are unknown."""
    distinct = sorted(set(values), key=lambda value: (value is not None, value))
    codes = {value: code for code, value in enumerate(distinct)}
    return {
        "labels": [one_line(value) if isinstance(value, str) else value for value in distinct],
        "codes": [codes[value] for value in values],
        "isNumeric": not any(isinstance(value, str) for value in distinct),
    }
