"""The heat map of tokens by modules: the candidate's errors relative to the noise run's."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from assay.comparing.explain import (
    find_worst_rows,
    rank_by_ratio,
    severity,
)
from assay.comparing.wording import describe_pooling, describe_tokens
from assay.report.page.charts import keep_worst
from assay.report.page.packing import pack_labels, pack_numbers
from assay.report.run_report import Report, StageKey
from assay.sites import Phase
from assay.statistics import TOKEN_STATISTIC
from assay.verdicts import Measurement

# Three numbers and a port are about 8 bytes a cell, compressed: 1 MB of the 7 MB of a report.
MAX_CELLS = 120_000
# A larger map cannot be read: at 13 px the lines fill six screens, at 4 px the columns ten.
MAX_STAGES = 400
MAX_COLUMNS = 2_000
MAX_PROMPTS = 200

# Smallest ratio of the strongest color, so that a clean run does not look alarming.
SMALLEST_TOP = 10.0

Token = tuple[int, int]  # prompt and position
StageName = tuple[str, Phase]


@dataclass(frozen=True, slots=True)
class Column:
    """A token, or adjacent tokens, of one prompt, with the step of the first."""

    prompt: int
    first: int
    last: int
    step: int

    @property
    def label(self) -> str:
        """Return prompt, token and decode step in words."""
        return describe_tokens(self.prompt, self.first, self.last, self.step)


@dataclass(frozen=True)
class HeatMap:
    """The worst measurement of each stage and column; `cells` are ordered by stage, then column."""

    stages: list[StageKey]
    columns: list[Column]
    cells: list[Measurement | None]
    located: int | None
    judged_side: str = "candidate"
    statements: list[str] = field(default_factory=list)

    @property
    def worst(self) -> int:
        """Return the index of the worst cell."""
        return max(
            range(len(self.cells)),
            key=lambda index: severity(cell.ratio) if (cell := self.cells[index]) else -1.0,
        )

    @property
    def top(self) -> float:
        """Return the ratio of the strongest color."""
        finite = [cell.ratio for cell in self.cells if cell and math.isfinite(cell.ratio)]
        return max([SMALLEST_TOP, *finite])

    def packed(self) -> dict[str, object]:
        """Return the data for the page."""
        return {
            "stages": [stage.label for stage in self.stages],
            "columns": [column.label for column in self.columns],
            "prompts": [column.prompt for column in self.columns],
            "tokens": [[column.first, column.last] for column in self.columns],
            "judgedSide": self.judged_side,
            "ratio": pack_numbers([cell.ratio if cell else None for cell in self.cells]),
            "actual": pack_numbers([cell.actual if cell else None for cell in self.cells]),
            "expected": pack_numbers([cell.expected if cell else None for cell in self.cells]),
            "port": pack_labels([cell.port if cell else "" for cell in self.cells]),
            "located": self.located,
            "worst": self.worst,
            "top": self.top,
        }


def draw_heat_map(report: Report, max_cells: int = MAX_CELLS) -> HeatMap | None:
    """Draw the heat map of `report`; None without measurements of tokens.

    To fit `max_cells`, the map leaves out the modules and prompts with the lowest ratios, then shows
    the worst of adjacent tokens. Its statements report that.
    """
    of_stage: dict[StageName, float] = {}
    of_prompt: dict[int, float] = {}
    steps: dict[Token, int] = {}
    for name, token, row in _cells(report):
        worse = severity(row.ratio)
        of_stage[name] = max(of_stage.get(name, 0.0), worse)
        of_prompt[token[0]] = max(of_prompt.get(token[0], 0.0), worse)
        steps[token] = row.step
    if not steps:
        return None
    statements: list[str] = []
    names = keep_worst(of_stage, MAX_STAGES, "modules", statements)
    stages = sorted(report.stages[name] for name in names)
    prompts = set(keep_worst(of_prompt, MAX_PROMPTS, "prompts", statements))
    columns, column_of = _fit_columns(
        {token: step for token, step in sorted(steps.items()) if token[0] in prompts},
        min(MAX_COLUMNS, max_cells // len(stages)),
        statements,
    )
    first_of_line = {
        (stage.module, stage.phase): line * len(columns) for line, stage in enumerate(stages)
    }
    worst = find_worst_rows(
        (
            (first_of_line[name] + column_of[token], row)
            for name, token, row in _cells(report)
            if name in first_of_line and token in column_of
        ),
        rank_by_ratio,
    )
    cells = [worst.get(index) for index in range(len(stages) * len(columns))]
    location = report.verdict.location
    stage = location and report.stages.get((location.module or "", location.phase))
    located = stages.index(stage) if stage in stages else None
    return HeatMap(stages, columns, cells, located, report.judged_side, statements)


def _cells(report: Report) -> Iterator[tuple[StageName, Token, Measurement]]:
    for row in report.measurements:
        if (
            row.statistic == TOKEN_STATISTIC
            and row.level == "modules"
            and row.prompt is not None
            and row.position is not None
        ):
            yield (row.module, row.phase), (row.prompt, row.position), row


def _fit_columns(
    steps: dict[Token, int], limit: int, statements: list[str]
) -> tuple[list[Column], dict[Token, int]]:
    """Return at most `limit` columns, as narrow as possible, and the column of each token."""
    num_prompts = len({prompt for prompt, _ in steps})
    width = max(1, len(steps) // limit)
    columns, column_of = _columns(steps, width)
    while len(columns) > max(limit, num_prompts):
        width += 1
        columns, column_of = _columns(steps, width)
    pooled = width * _neighbors_of_row(steps)
    if pooled > 1:
        statements.append(describe_pooling(pooled))
    return columns, column_of


def _neighbors_of_row(steps: Collection[Token]) -> int:
    """Return the number of tokens of which measurements hold the worst one."""
    positions: dict[int, list[int]] = {}
    for prompt, position in steps:
        positions.setdefault(prompt, []).append(position)
    num_tokens = sum(max(some) - min(some) + 1 for some in positions.values())
    return round(num_tokens / max(1, len(steps)))


def _columns(steps: dict[Token, int], width: int) -> tuple[list[Column], dict[Token, int]]:
    columns: list[Column] = []
    column_of: dict[Token, int] = {}
    members = 0
    for (prompt, position), step in steps.items():
        last = columns[-1] if columns else None
        if last and last.prompt == prompt and members < width:
            columns[-1] = Column(prompt, last.first, position, last.step)
            members += 1
        else:
            columns.append(Column(prompt, position, position, step))
            members = 1
        column_of[prompt, position] = len(columns) - 1
    return columns, column_of
