"""Range checks of whole numbers from users."""

from assay.errors import UsageError

# More than any check has steps, prompts, ranks or threads. Lists of this length fit into memory.
MOST = 1_000_000
# torch generators take signed 64-bit seeds.
LARGEST_SEED = 2**63 - 1

# A message shows only the beginning of longer values.
_SHOWN = 40


def parse_count(name: str, text: str, least: int = 1, most: int = MOST) -> int:
    """Parse `text`, the value of the option `name`, as a whole number. Raises: UsageError."""
    digits = text.removeprefix("-")
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= len(str(most))
    return require_count(name, int(text) if is_number else text, least, most)


def require_count(name: str, value: int | str, least: int = 1, most: int = MOST) -> int:
    """Return `value` of the option `name`. Raises: UsageError if it is out of bounds."""
    if isinstance(value, str) or not least <= value <= most:
        raise UsageError(
            f"{name}={str(value)[:_SHOWN]}: must be a whole number from {least:,} to {most:,}"
        )
    return value
