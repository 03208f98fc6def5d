"""What an evaluation gave, document by document: what a later one is compared with."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from assay.errors import UsageError
from assay.models.remote_code import RemoteCode
from assay.verdicts import SCHEMA, Number, Record

RESULT_FILE = "result.json"


class ResultError(UsageError):
    """A folder without a result."""

    @classmethod
    def of(cls, path: Path, problem: object) -> Self:
        """What is wrong with the file."""
        return cls(f"{path} is no result of `assay bench run`: {problem}")


class EvaluationRequest(Record):
    """What the process that runs the model is asked for."""

    model: str
    run: str
    task: str
    folder: str
    remote_code: RemoteCode = "refuse"


class BenchResult(Record):
    """One task on one model.

    task_hash: of the task's YAML and its documents. right: for each document whether its answer
    was right. standard_error: of `score`, as lm-eval has it; chance: the score of guessing. All
    three are nan without documents, standard_error with a single one.
    num_non_finite: log-likelihoods that were NaN; the score then means nothing.
    """

    schema_: int = Field(default=SCHEMA, alias="schema")
    task: str
    task_hash: str
    model: str
    weights_hash: str
    tokenizer_hash: str
    run: str
    metric: str
    score: Number
    standard_error: Number
    chance: Number
    right: list[bool]
    num_non_finite: int = 0
    versions: dict[str, str]
    provenance: dict[str, Any] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """The model and where it ran."""
        return f"{self.model} on {self.run}"


def read_result(folder: Path) -> BenchResult:
    """The result in the folder of a finished run. Raises: ResultError."""
    path = folder / RESULT_FILE
    try:
        return BenchResult.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ResultError.of(folder, error.strerror) from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ResultError.of(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
