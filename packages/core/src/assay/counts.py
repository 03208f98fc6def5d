"""Whole numbers that users give, as text or as numbers: their range, and one sentence on others."""

from assay.errors import UsageError

# More steps, prompts, ranks or threads than any check has; lists of so many fit into memory.
MOST = 1_000_000
# Generators of torch take 64 bits, one of them the sign.
LARGEST_SEED = 2**63 - 1

# A message shows the beginning of longer ones.
_SHOWN = 40


def parse_count(name: str, text: str, least: int = 1, most: int = MOST) -> int:
    """Read the whole number `text` that the option `name` was given. Raises: UsageError."""
    digits = text.removeprefix("-")
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= len(str(most))
    return require_count(name, int(text) if is_number else text, least, most)


def require_count(name: str, value: int | str, least: int = 1, most: int = MOST) -> int:
    """Return `value`, the option `name`. Raises: UsageError unless it is within the bounds."""
    if isinstance(value, str) or not least <= value <= most:
        raise UsageError(
            f"{name}={str(value)[:_SHOWN]}: must be a whole number from {least:,} to {most:,}"
        )
    return value
