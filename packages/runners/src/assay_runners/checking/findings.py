"""What a rule finds."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """A place that breaks a rule.

    file: relative to the root of the repository.
    line: the first is 1.
    rule: its name in the table of all rules.
    message: what stands there, and what to write instead.
    """

    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"
