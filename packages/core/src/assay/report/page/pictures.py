"""Pictures of a report, and their data for the script of the page.

Charts along the depth, the tokens and the steps are SVG geometry that stretches with the page.
Coordinates are thousandths of the width and height of the plot. Texts are not part of the SVG, so that
they keep their size. The heat map of tokens by modules is drawn by the script.
"""

import base64
import gzip
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from assay.errors import name_some
from assay.foreign_text import one_line
from assay.judge.explain import (
    Key,
    find_worst_rows,
    rank_by_ratio,
    severity,
)
from assay.judge.wording import (
    DIGITS,
    describe_judged,
    describe_pooling,
    describe_tokens,
    format_number,
)
from assay.report.run_report import Report, StageKey
from assay.sites import Phase
from assay.statistics import CURVE_SIDES, TOKEN_STATISTIC
from assay.verdicts import Measurement

MAX_POINTS = 1000  # about one for each pixel
_SPAN = 1000
_MAX_X_TICKS = 12
_MANY_DECADES = 100.0
_FEW = 5.0
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis, at `at` thousandths of it."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """One series as SVG paths: a line or bars, and a dot for every value."""

    name: str
    kind: str
    """The style class."""
    path: str
    dots: str
    outside: str
    """Marks of NaN and infinity, where the line has a gap."""


@dataclass(frozen=True)
class Chart:
    """Series over one logarithmic axis, and the text that each place shows under the pointer."""

    series: list[ChartSeries]
    x_unit: str
    """Name of what the ticks count, such as layers."""
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    points: list[tuple[float, list[str]]]
    statements: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Place:
    """One place of the x axis: its title, and the value of every series there."""

    title: str
    values: tuple[float | None, ...]
    group: int = 0  # lines connect places of one group


def draw_depth(report: Report) -> Chart | None:
    """Draw accumulated, added and replayed error of candidate and noise run along the forward pass."""
    accumulated = _worst_of_outputs(report, "accumulated")
    replayed = _worst_of_outputs(report, "replay-tensor")  # the same, of one stage
    stages = sorted({*accumulated, *replayed})
    if not stages:
        return None
    severities = dict.fromkeys(stages, -1.0)
    severities |= {stage: rank_by_ratio(row) for stage, row in (replayed or accumulated).items()}
    statements: list[str] = []
    stages = sorted(keep_worst(severities, MAX_POINTS, "stages", statements))
    added = added_errors(report)
    places = [
        _Place(
            stage.label,
            (
                *_both(accumulated.get(stage)),
                added.get((stage.module, stage.phase)),
                *_both(replayed.get(stage)),
            ),
        )
        for stage in stages
    ]
    return _chart(
        places,
        [
            (f"accumulated, {report.judged_side}", "accumulated"),
            ("accumulated, noise", "accumulated noise"),
            ("added beyond the inputs", "added"),
            (f"replayed, {report.judged_side}", "replayed"),
            ("replayed, noise", "replayed noise"),
        ],
        "layer",
        _ticks_at_first([layer_of(stage.module) for stage in stages]),
        statements,
    )


def layer_of(module: str) -> int | None:
    """Return the number of the layer that `module` belongs to."""
    found = _LAYER.search(module)
    return int(found[1]) if found else None


def added_errors(report: Report) -> dict[tuple[str, Phase], float]:
    """Return the error of outputs beyond that of inputs, where both are known, by module and phase."""
    inputs: dict[tuple[str, Phase], float] = {}
    for row in report.measurements:
        if row.level == "modules" and row.statistic == "accumulated" and _is_input(row):
            key = row.module, row.phase
            inputs[key] = max(severity(row.actual), inputs.get(key, 0.0))
    added = {}
    for stage, row in _worst_of_outputs(report, "accumulated").items():
        before = inputs.get((stage.module, stage.phase), math.inf)
        if math.isfinite(before):
            grown = row.actual**2 - before**2
            added[stage.module, stage.phase] = math.sqrt(grown) if not grown <= 0 else 0.0
    return added


def _worst_of_outputs(report: Report, statistic: str) -> dict[StageKey, Measurement]:
    rows = (
        (report.stages[row.module, row.phase], row)
        for row in report.measurements
        if row.level == "modules" and row.statistic == statistic and not _is_input(row)
    )
    return find_worst_rows(rows, rank_by_ratio)


def _is_input(row: Measurement) -> bool:
    return row.phase == "forward" and row.port.startswith("input.")


def draw_kl(report: Report) -> Chart | None:
    """Draw the KL divergence of every token, for candidate and noise run."""
    rows = [
        row
        for row in report.measurements
        if row.level == "logits" and row.statistic == "kl" and row.position is not None
    ]
    if not rows:
        return None
    rows.sort(key=lambda row: (row.prompt or 0, row.position or 0))
    width = -(-len(rows) // MAX_POINTS)
    kept: list[tuple[str, Measurement]] = []
    for group in _grouped(rows, width):
        first, last = group[0], group[-1]
        title = describe_tokens(
            first.prompt or 0, first.position or 0, last.position or 0, first.step
        )
        kept.append((title, max(group, key=lambda row: severity(row.actual))))
    places = [_Place(title, _both(row), row.prompt or 0) for title, row in kept]
    return _chart(
        places,
        [(report.judged_side, "replayed"), ("noise run", "replayed noise")],
        "prompt",
        _ticks_at_first([row.prompt or 0 for _, row in kept]),
        [describe_pooling(width)] if width > 1 else [],
    )


# Style classes of the sides of a curve.
_SIDE_STYLES = {
    "candidate": "replayed",
    "split": "replayed",
    "yardstick": "accumulated",
    "uninterrupted": "accumulated",
    "noise": "accumulated noise",
    "repeated": "accumulated noise",
    "resumed": "replayed noise",
}
_CURVE_DIGITS = 5
# What the judge compares of a curve: the statistic, and the levels with the port.
_JUDGED_OF_CURVE = {
    "loss": ("loss-error", {("loss", "free-run"), ("loss", ":free-run"), ("overfit", "loss")}),
    "grad-norm": ("replay-tensor", {("gradients", "norm")}),
}


@dataclass(frozen=True)
class Curve:
    """One of `CURVES` by step, as a chart and as a table."""

    chart: Chart
    lines: list[dict[str, str]]
    """Cells by column: a line for each drawn step, and the last for `judged`."""
    judged: Measurement | None
    """The comparison by the judge, over all steps."""


def draw_curve(report: Report, name: str) -> Curve | None:
    """Draw one value of each training step, of each run that has it."""
    found: dict[str, dict[int, float]] = {}
    for row in report.measurements:
        side, _, value = row.statistic.partition("-")
        if value == name and side in CURVE_SIDES:
            found.setdefault(side, {})[row.step] = row.actual
            if "uninterrupted" not in found:
                found.setdefault("yardstick", {})[row.step] = row.expected
    curves = {side: found[side] for side in CURVE_SIDES if side in found}
    steps = sorted({step for curve in curves.values() for step in curve})
    if not steps:
        return None
    width = -(-len(steps) // MAX_POINTS)
    shown = steps[::width]
    targets = (r.expected for r in report.measurements if r.statistic == "overfit-loss")
    target = next(targets, None) if name == "loss" else None
    places = [
        _Place(f"step {step}", (*(curve.get(step) for curve in curves.values()), target))
        for step in shown
    ]
    ticks = [Tick(_x(number, len(shown)), str(step)) for number, step in enumerate(shown)]
    statements = [f"One step in {width} is shown."] if width > 1 else []
    statements += _describe_gaps(curves)
    sides = [(CURVE_SIDES[side], _SIDE_STYLES[side]) for side in curves]
    chart = _chart(places, [*sides, ("target", "target")], "step", _thinned(ticks), statements)
    judged = _find_judged(report, name)
    return Curve(chart, _tabulate(curves, shown, judged), judged)


def _describe_gaps(curves: Mapping[str, Mapping[int, float]]) -> list[str]:
    gaps = []
    for side, curve in curves.items():
        steps = [str(step) for step, value in sorted(curve.items()) if not math.isfinite(value)]
        if steps:
            word = "step" if len(steps) == 1 else "steps"
            gaps.append(f"{CURVE_SIDES[side]} in {word} {name_some(steps)}")
    where = f"Values that are not finite leave a gap and a mark at the top: {'; '.join(gaps)}."
    absent = "yardstick" in curves and "candidate" not in curves
    return ["The candidate reports no values."] * absent + ([where] if gaps else [])


def _tabulate(
    curves: Mapping[str, Mapping[int, float]], steps: Iterable[int], judged: Measurement | None
) -> list[dict[str, str]]:
    def error(side: str, step: int) -> str:
        if step not in curves.get(side, {}):
            return ""
        size = curves["yardstick"][step]
        difference = curves[side][step] - size
        return format_number(abs(difference / size) if size else math.inf if difference else 0.0)

    def show(step: int) -> dict[str, str]:
        return {
            CURVE_SIDES[side]: format_number(curve[step], _CURVE_DIGITS) if step in curve else ""
            for side, curve in curves.items()
        }

    lines = [
        {
            "step": str(step),
            **show(step),
            "error": error("candidate", step),
            "noise": error("noise", step),
            "ratio / limit": "",
        }
        for step in steps
    ]
    if judged is not None:
        lines.append(
            dict.fromkeys(lines[0], "")
            | {
                "step": "judged",
                "error": format_number(judged.actual),
                "noise": format_number(judged.expected),
                "ratio / limit": describe_judged(judged.ratio, judged.limit or 0.0),
            }
        )
    columns = [column for column in lines[0] if any(line[column] for line in lines)]
    return [{column: line[column] for column in columns} for line in lines]


def _find_judged(report: Report, name: str) -> Measurement | None:
    statistic, places = _JUDGED_OF_CURVE.get(name, ("", set()))
    rows = (
        (name, row)
        for row in report.measurements
        if row.statistic == statistic and (row.level, row.port) in places and row.module == ""
    )
    return find_worst_rows(rows).get(name)  # of all ranks


def _both(row: Measurement | None) -> tuple[float | None, float | None]:
    return (row.actual, row.expected) if row else (None, None)


def keep_worst(
    severities: Mapping[Key, float], limit: int, things: str, statements: list[str]
) -> list[Key]:
    """Return the `limit` worst keys, worst first, and add a statement about the others."""
    ranked = sorted(severities, key=lambda key: -severities[key])
    if len(ranked) > limit:
        worst = format_number(severities[ranked[limit]])
        statements.append(
            f"{limit:,} of {len(ranked):,} {things} are shown, those with the highest ratios; the highest"
            f" ratio left out is {worst}x."
        )
    return ranked[:limit]


def _grouped(rows: list[Measurement], width: int) -> Iterable[list[Measurement]]:
    """Yield groups of up to `width` adjacent tokens of one prompt."""
    group: list[Measurement] = []
    for row in rows:
        if group and (len(group) == width or group[0].prompt != row.prompt):
            yield group
            group = []
        group.append(row)
    yield group


def _chart(
    places: list[_Place],
    series: list[tuple[str, str]],
    x_unit: str,
    x_ticks: list[Tick],
    statements: list[str],
) -> Chart:
    axis = LogAxis.over(value for place in places for value in place.values if value is not None)
    points = []
    for number, place in enumerate(places):
        lines = [place.title]
        for (name, _), value in zip(series, place.values, strict=True):
            if value is not None:
                lines.append(f"{name}: {format_number(value)}")
        points.append((_x(number, len(places)), lines))
    drawn = [
        _draw_series(name, kind, [(p.values[index], p.group) for p in places], axis)
        for index, (name, kind) in enumerate(series)
    ]
    drawn = [one for one in drawn if one.path or one.outside]
    return Chart(drawn, x_unit, x_ticks, axis.ticks(), points, statements)


def _x(number: int, count: int) -> float:
    return round((number + 0.5) * _SPAN / count, 1)


def _draw_series(
    name: str, kind: str, values: list[tuple[float | None, int]], axis: "LogAxis"
) -> ChartSeries:
    path: list[str] = []
    dots: list[str] = []
    outside: list[str] = []
    last_group: int | None = None
    for number, (value, group) in enumerate(values):
        if value is None:
            continue
        x, y = _x(number, len(values)), axis.y(value)
        if not math.isfinite(value):
            outside.append(f"M{x:g} {y:g}h0")
            last_group = None
            continue
        path.append(
            f"M{x:g} {_SPAN}V{y:g}" if kind == "added"
            else f"{'L' if group == last_group else 'M'}{x:g} {y:g}"
        )  # fmt: skip
        dots.append(f"M{x:g} {y:g}h0")
        last_group = group
    return ChartSeries(name, kind, "".join(path), "".join(dots), "".join(outside))


@dataclass(frozen=True, slots=True)
class LogAxis:
    """A logarithmic axis from `low` to `high`. Zero is at the bottom, NaN and infinity are at the top."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float]) -> "LogAxis":
        """Make the axis that includes all positive finite `values`, with a margin."""
        positive = [value for value in values if 0 < value < math.inf]
        if not positive:
            return cls(0.1, 10.0)
        return cls(min(positive) / 1.5, max(positive) * 1.5)

    def y(self, value: float) -> float:
        """Return the distance from the top, in thousandths."""
        if not math.isfinite(value):
            return 0.0
        if value <= 0:
            return float(_SPAN)
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(_SPAN * (1 - share), 1)

    def ticks(self) -> list[Tick]:
        """Return ticks at decades if there are several, otherwise at 1, 2 and 5 of each, or at all digits."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        step = max(1, (last - first) // 6)
        extent = self.high / self.low
        mantissas = (1,) if extent > _MANY_DECADES else (1, 2, 5) if extent > _FEW else range(1, 10)
        marks = [
            mantissa * 10.0**exponent
            for exponent in range(first, last + 1, step)
            for mantissa in mantissas
        ]
        return [
            Tick(self.y(mark), format_number(mark))
            for mark in marks
            if self.low <= mark <= self.high
        ]


def _ticks_at_first(numbers: list[int | None]) -> list[Tick]:
    """Return a tick at the first place of each number, such as that of a layer."""
    firsts: dict[int, int] = {}
    for place, number in enumerate(numbers):
        if number is not None:
            firsts.setdefault(number, place)
    return _thinned([
        Tick(_x(place, len(numbers)), str(number)) for number, place in sorted(firsts.items())
    ])  # fmt: skip


def _thinned(ticks: list[Tick]) -> list[Tick]:
    return ticks[:: max(1, -(-len(ticks) // _MAX_X_TICKS))]


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
    """The stage that the verdict names."""
    affected: int | None = None
    """The column of the first affected token."""
    judged_side: str = "candidate"
    statements: list[str] = field(default_factory=list)

    @property
    def has_decode_steps(self) -> bool:
        """Return True if some tokens were computed in the prefill, and others in decode steps."""
        return len({column.step > 0 for column in self.columns}) > 1

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
            "steps": [column.step for column in self.columns],
            "judgedSide": self.judged_side,
            "ratio": pack_numbers([cell.ratio if cell else None for cell in self.cells]),
            "actual": pack_numbers([cell.actual if cell else None for cell in self.cells]),
            "expected": pack_numbers([cell.expected if cell else None for cell in self.cells]),
            "port": pack_labels([cell.port if cell else "" for cell in self.cells]),
            "located": self.located,
            "affected": self.affected,
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
    bad = report.verdict.first_bad_token
    affected = column_of.get((bad.prompt, bad.position)) if bad else None
    return HeatMap(stages, columns, cells, located, affected, report.judged_side, statements)


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
