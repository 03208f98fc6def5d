"""Values that a file may hold where its reader expects others."""

import json
import random
from typing import Any

# A message that quotes more than one line of a file would print a command to a CI log.
FORGED_LINE = "::error::forged"

_DEEP = 100_000
_LONG = 1_000_000

TEXTS = (
    "",
    " ",
    "a\x00b",
    f"first\n{FORGED_LINE}\nlast",
    f"first\r{FORGED_LINE}",
    f"first\u2028{FORGED_LINE}\u0085{FORGED_LINE}",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202eright to left\u2066",
    "\ud800",
    "../../../etc/passwd",
    "/etc/passwd",
    "a/b",
    ".",
    "..",
    "{__class__}",
    "${HOME} %s {} {0}",
    "<script>alert(1)</script>",
    "(a+)+$",
    "nan",
    "1e999",
    "9" * 5_000,
    "x" * _LONG,
)

NUMBERS = (
    0,
    -0.0,
    1,
    -1,
    2,
    0.5,
    5e-324,
    1e-300,
    1e308,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**30,
    10**400,
    -(10**4000),
    float("nan"),
    float("inf"),
    float("-inf"),
)

CONTAINERS: tuple[Any, ...] = (
    [],
    {},
    [None],
    [[]],
    [[[]]],
    {"": None},
    {"a": {"a": {}}},
    [0] * 5_000,
)

# JSON that no Python value is written as.
RAW_JSON = (
    "[" * _DEEP,
    "[" * _DEEP + "]" * _DEEP,
    '{"a":' * _DEEP + "1" + "}" * _DEEP,
    "[" * 500 + "]" * 500,
    "[" * 150 + "]" * 150,
    "9" * 5_000,
    "1e999",
    "-Infinity",
    '"\\ud800"',
    '{"a":1,"a":2}',
    "tru",
    "'single'",
    "01",
    '"unterminated',
)


def hostile_value(rng: random.Random) -> Any:
    """Choose a text, a number, a container, a truth or null."""
    kind = rng.choice(("text", "number", "container", "other"))
    if kind == "text":
        return rng.choice(TEXTS)
    if kind == "number":
        return rng.choice(NUMBERS)
    return rng.choice(CONTAINERS if kind == "container" else (None, True, False))


def hostile_toml(rng: random.Random) -> str:
    """Choose a value as TOML, valid or not."""
    text = json.dumps(rng.choice([one for one in TEXTS if "\ud800" not in one]))
    return rng.choice(
        (
            text,
            text,
            str(rng.choice(NUMBERS)),
            str(rng.choice(NUMBERS)),
            "true",
            "1979-05-27T07:32:00Z",
            "07:32:00",
            f'"""first\n{FORGED_LINE}\n"""',
            "[]",
            "{}",
            "[[], {}, 1, 'a']",
            "[" * _DEEP,
            "[" * 150 + "]" * 150,
            "{a=" * 150 + "1" + "}" * 150,
            "{" + "a." * 5_000 + "a = 1}",
            "nan",
            "-inf",
            '"\\ud800"',
            "'unterminated",
        )
    )


def hostile_yaml(rng: random.Random) -> str:
    """Choose a value as YAML, valid or not."""
    return rng.choice(
        (
            hostile_toml(rng),
            "!!python/object/apply:os.system ['touch executed']",
            "!!python/name:os.system",
            "&loop [*loop]",
            "&loop {a: *loop}",
            "{<<: &merged {a: 1}, <<: *merged}",
            "!!binary AAAA",
            "!!set {a, b}",
            "2001-12-14t21:59:43.10-05:00",
            "? [a, b] : c",
            "{[1, 2]: a}",
            "*unknown",
            "|\n  first\n  " + FORGED_LINE,
            "0o7777777777777777777777",
            "1:2:3:4:5",
        )
    )


def alias_bomb() -> str:
    """Make YAML of ten lists, each of which names the last one ten times."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    return "\n".join(lines) + "\n"
