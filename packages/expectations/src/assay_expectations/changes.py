"""Changes between two captures: kind, size in units of noise, tokens, modules, environment; and as Markdown.

All text from records is escaped in Markdown.
Shapes: R tokens of all prompts, K kept ids and the rest.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from assay.errors import assay_command
from assay.foreign_text import escape_markdown, markdown_block
from assay.judge.levels import Cause, find_worst, not_compared
from assay.judge.wording import describe_rounding, format_against, format_count, format_number
from assay.models.config_files import can_move_outputs, list_changes, list_setting_changes
from assay.statistics import MOST_ROUNDING
from assay.verdicts import Diagnosis, Location, Measurement, NextStep, Outcome, Verdict
from assay_expectations.differences import (
    content_differences,
    describe_built_in,
    has_same_inputs,
    machine_differences,
)
from assay_expectations.explaining import (
    CONFIG_OR_CODE,
    EXACT_ROUNDING,
    OWN_FORWARD,
    GrownLayer,
    check_command,
    describe_first,
    describe_versions,
    exact_change,
    find_grown,
    first_changed,
    in_float32,
    step_from_capture,
)
from assay_expectations.judging import (
    LARGEST_CLEAN_RATIOS,
    Judged,
    describe_worst,
    is_within_limits,
    judge_numbers,
    token_spreads,
    tokens_of,
)
from assay_expectations.records import Distributions, Expectation, Provenance, Signature
from assay_expectations.verdict import combine, level_of_signature

# noise: no further from the yardstick than clean runs. drift: further, but within the limits. break: over a
# limit, or the yardstick moved. not compared: of different content or dtype, with the size of the change where both
# ran the same tokens.
Kind = Literal["noise", "drift", "break", "not compared"]

_MAX_TOKENS_SHOWN = 5

_LAYERS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class MovedToken:
    """A generated token, with the kept id whose log-probability moved most."""

    batch: int
    row: int
    position: int
    id: int | None
    """None for all other ids together."""
    expected: float
    actual: float
    units: float
    """Movement of all kept ids, in units of the older capture's noise."""


@dataclass(frozen=True, slots=True)
class Change:
    """The change between two captures of a model."""

    kind: Kind
    judged: Judged | None
    """The newer capture, judged by the older one's limits; None if the two share no inputs."""
    moved: list[MovedToken]
    """The tokens that moved most, in descending order."""
    grown: list[GrownLayer]
    """Modules with a larger error, in the order in which they end. The first one causes the change.

    None if the exact outputs moved: other values round differently.
    """
    content: list[str]
    """Differences in content."""
    environment: list[str]
    """Differences in machine, software and settings, and in the stored dtype."""
    config: list[str]
    """Changes of config.json and generation_config.json that can move outputs."""
    answer: str = ""
    """Sentence that names the change in the model's files, its code or a library's rounding; "" without one."""
    module: str | None = None
    """The first module with other results, or with a larger error; None if unknown."""
    coverage: str = ""
    """The part of the tokens that both captures share, unless all. Modules also read the others: none is named."""
    moves_exact: bool = False
    """True if the exact outputs moved."""

    @property
    def headline(self) -> str:
        """Name the kind, with its reason unless that is the level's."""
        if self.kind == "not compared":
            return "Not judged, because the captures differ in content."
        if self.kind != "break":
            return self.summary if self.kind == "noise" else f"drift: {self.summary}"
        place = "" if self.module is None else f", first in {self.module or OWN_FORWARD}"
        what = "over the limits of OLD" if self.is_over_limit else "other exact outputs than OLD"
        return f"break: {what}{place}"

    @property
    def is_over_limit(self) -> bool:
        """True if the newer run exceeds a limit of the older capture."""
        return self.judged is not None and not is_within_limits(self.judged)

    @property
    def summary(self) -> str:
        """Describe the change."""
        parts = [self.answer] if self.answer else []
        if self.judged is not None:
            size = describe_worst(self.judged, "the error of the older capture")
            words = {
                "noise": "noise", "drift": "within the limits, but further than clean runs",
                "break": "over a limit" if self.is_over_limit else "the run is within the limits",
                "not compared": "the outputs move",
            }[self.kind]  # fmt: skip
            parts.append(f"{words}: {size}{self.coverage}")
        if self.kind == "not compared":
            parts.insert(0, "; ".join(self.content))
        return "; ".join(parts)


def find_change(expected: Expectation, actual: Expectation) -> Change:
    """Compare the capture `actual` with the older capture `expected`."""
    contents = expected.key.content, actual.key.content
    changes = list_setting_changes(expected.config, actual.config)
    built_in = describe_built_in(expected.inputs, actual.inputs, changes)
    content = content_differences(*contents, (expected.prompts, actual.prompts), built_in)
    dtypes = expected.key.machine.dtype, actual.key.machine.dtype
    if dtypes[0] != dtypes[1]:
        content.append(f"dtype {dtypes[0]} → {dtypes[1]}")
    outputs = [", ".join(one.signature.outputs) or "logits" for one in (expected, actual)]
    if outputs[0] != outputs[1]:
        content.append(f"outputs {outputs[0]} → {outputs[1]}")
    config = [one for one in changes if can_move_outputs(one)]
    environment = [*model_change(expected, actual), *(one for one in changes if one not in config)]
    environment += _environment(expected, actual)
    part = None
    if outputs[0] == outputs[1] and has_same_inputs(*contents):
        part = common_part(expected.signature, actual.signature)
    if part is None:
        content = content or ["no likely id in common"]
        return Change("not compared", None, [], [], content, environment, config)
    old, new, coverage = part
    judged = judge_numbers(old, new.captured, dtypes[0], expected.limits)
    size = exact_change(old, new.yardstick)
    moves_exact = not size <= _exact_rounding(expected, actual)
    kind = "not compared" if content else "break" if moves_exact else _kind_of(judged, expected)
    layers = ({}, {}) if coverage else (expected.exact_layers, actual.exact_layers)
    module, size_there = first_changed(*layers, _exact_rounding(expected, actual))
    answer = _explain_same(expected, actual, config, judged if kind == "break" else {})
    if moves_exact:
        first = describe_first(module, size_there)
        exact = f"the exact outputs move by {format_number(size)}{first}"
        cause = _cause_of_move(expected, actual, config, content)
        answer = f"{cause}: {exact}" if cause else exact
        if config or content:
            answer += "; whether the model's code changed too is not known"
    grown = [] if coverage or moves_exact else list(find_grown(expected.layers, actual.layers))
    return Change(
        kind=kind,
        judged=judged,
        moved=_moved(old, new, judged),
        grown=grown,
        content=content,
        environment=environment,
        config=config,
        answer=answer,
        module=module if moves_exact else next((one.place for one in grown), None),
        coverage=coverage,
        moves_exact=moves_exact,
    )


def model_change(expected: Expectation, actual: Expectation) -> list[str]:
    """Return the change of the model's name; [] without one."""
    return list_changes({"model": expected.model}, {"model": actual.model})


def _exact_rounding(expected: Expectation, actual: Expectation) -> float:
    return max(EXACT_ROUNDING[one.provenance.yardstick_dtype] for one in (expected, actual))


def _cause_of_move(
    expected: Expectation, actual: Expectation, config: Sequence[str], content: Sequence[str]
) -> str:
    """Return what moved the exact outputs; "" if only the content that the summary lists differs."""
    if not content:
        packages = describe_versions(expected.provenance, actual.provenance)
        code = "the model's code changed" if expected.config and actual.config else CONFIG_OR_CODE
        return "; ".join(config) or f"{code}{packages and f' ({packages})'}"
    if not config:
        return ""
    has_other_weights = expected.key.content.weights != actual.key.content.weights
    return f"{'; '.join(config)}, and the other {'weights' if has_other_weights else 'dtype'}"


def _explain_same(
    expected: Expectation, actual: Expectation, config: Sequence[str], broken: Judged
) -> str:
    """Return what changed although the exact outputs are the same; "" for nothing.

    broken: the ratios of a break; of another change none.
    """
    packages = describe_versions(expected.provenance, actual.provenance)
    cause = "; ".join(config)
    if not cause and broken:
        is_small = find_worst(broken.values()).severity <= MOST_ROUNDING
        cause = "the run is less accurate"
        if packages:
            why = (
                describe_rounding(packages)
                if is_small
                else f"by more than another rounding explains ({packages})"
            )
            return f"{cause}: the exact outputs are the same; {why}"
    return f"{cause}: the exact outputs are the same" if cause else ""


class Part(NamedTuple):
    """The tokens that two captures share, with the kept ids of both."""

    expected: Signature
    actual: Signature
    coverage: str


def common_part(expected: Signature, actual: Signature) -> Part | None:
    """Return the tokens up to the first that differs in each row, with as many common ids; None without one.

    The distribution of a token depends on the tokens before it alone.
    """
    if (expected.tokens, expected.top_ids) == (actual.tokens, actual.top_ids):
        return Part(expected, actual, "")
    ids: list[list[list[list[int]]]] = []
    for batch, rows in enumerate(expected.top_ids):
        ids.append([])
        for row, of_tokens in enumerate(rows):
            pairs = zip(expected.tokens[batch][row], actual.tokens[batch][row], strict=True)
            first = next(
                (place for place, (old, new) in enumerate(pairs) if old != new), len(of_tokens)
            )
            others = actual.top_ids[batch][row]
            both = zip(of_tokens[: first + 1], others, strict=False)
            ids[-1].append([[one for one in kept if one in theirs] for kept, theirs in both])
    fewest = min(len(kept) for rows in ids for tokens in rows for kept in tokens)
    if not fewest:
        return None
    kept_ids = [[[kept[:fewest] for kept in tokens] for tokens in rows] for rows in ids]
    num_shared = sum(len(tokens) for rows in kept_ids for tokens in rows)
    num_tokens = sum(len(tokens) for rows in expected.top_ids for tokens in rows)
    coverage = (
        ""
        if num_shared == num_tokens
        else f", over {num_shared} of {num_tokens} tokens: later ones follow other texts"
    )
    return Part(_restrict(expected, kept_ids), _restrict(actual, kept_ids), coverage)


def _restrict(signature: Signature, kept_ids: list[list[list[list[int]]]]) -> Signature:
    """Keep the first tokens of each row, and of each token the given ids."""

    def first(values: Sequence[Sequence[Sequence[Any]]]) -> list[list[list[Any]]]:
        return [
            [list(tokens)[: len(kept)] for tokens, kept in zip(*rows, strict=True)]
            for rows in zip(values, kept_ids, strict=True)
        ]

    def of(run: Distributions) -> Distributions:
        found = first(run.log_probabilities)
        for batch, rows in enumerate(kept_ids):
            for row, tokens in enumerate(rows):
                for place, kept in enumerate(tokens):
                    *values, rest = found[batch][row][place]
                    by_id = dict(zip(signature.top_ids[batch][row][place], values, strict=True))
                    chosen = [by_id.pop(one) for one in kept]
                    others = float(np.logaddexp.reduce([rest, *by_id.values()]))
                    found[batch][row][place] = [*chosen, others]
        return Distributions(log_probabilities=found, projections=first(run.projections))

    return Signature(
        tokens=[
            [tokens[: len(kept)] for tokens, kept in zip(*rows, strict=True)]
            for rows in zip(signature.tokens, kept_ids, strict=True)
        ],
        top_ids=kept_ids,
        spreads=first(signature.spreads),
        yardstick=of(signature.yardstick),
        captured=of(signature.captured),
        outputs=signature.outputs,
    )


def judge_pair(
    expected: Expectation, actual: Expectation, old: str = "OLD", new: str = "NEW"
) -> tuple[Verdict, list[Measurement], Change]:
    """Judge the capture `actual` by the limits of `expected`, and describe the change. old, new: their files."""
    change, level = find_change(expected, actual), "outputs"
    if change.judged is None or change.kind == "not compared":
        result = not_compared(change.summary)
    else:
        facts = {"limits_origin": expected.limits_origin, "change": change.kind}
        result = level_of_signature(level, expected, change.judged, change.summary, facts)
        if change.kind == "break":
            result.level = result.level.model_copy(update={"verdict": Outcome.FAIL})
    cause = None
    if change.kind == "break" and change.module is not None:
        is_of_code = not (change.config and change.moves_exact)
        diagnosis: Diagnosis | None = "module-error" if is_of_code else "stale"
        cause = Cause(diagnosis, Location(phase="forward", module=change.module))
    verdict, rows = combine(
        {level: result},
        change.environment,
        model={"name": ", ".join(sorted({expected.model, actual.model}))},
        reference={"run": expected.name},
        candidate={"run": actual.name},
        cause=cause,
        headline=change.headline,
        next_steps=_next_steps(expected, actual, change, old, new),
    )
    return verdict, rows, change


def _next_steps(
    expected: Expectation, actual: Expectation, change: Change, old: str, new: str
) -> list[NextStep]:
    """Return what goes on after a change that is not noise. old, new: their files."""
    if change.kind == "break":
        if steps := _steps_to_operation(actual, change, new):
            return steps
        model = None if actual.model == expected.model else actual.model
        verify = assay_command("expect", "verify", old, run=actual.provenance.run, model=model)
        return [
            NextStep("to see whether the model's code changed too, where NEW was captured", verify),
            NextStep("keep NEW only if the change is intended"),
        ]
    if change.kind != "not compared":
        return []
    then, now = expected.provenance.run, actual.provenance.run
    if expected.key.machine.dtype != actual.key.machine.dtype:
        inputs = actual.options_of_capture(new)
        capture = assay_command(
            "expect", "capture", actual.model, run=then, output="NEW.json", **inputs
        )
        check = check_command(actual.model, now, **actual.options_of_check(new))
        return [
            NextStep(f"to judge {now} by a reference", check),
            NextStep(f"to see a change, capture NEW on {then} like OLD, then diff again", capture),
        ]
    # Otherwise the model's files made other token ids of the same texts, or have other shapes.
    texts = [(one.key.content.settings, one.chats or one.prompts) for one in (expected, actual)]
    if change.judged is None and texts[0] != texts[1]:
        return [NextStep("capture both with the same prompts and settings, then diff them again")]
    return [
        NextStep("keep NEW if the change is intended; otherwise restore the files of the model")
    ]


def _steps_to_operation(actual: Expectation, change: Change, new: str) -> list[NextStep]:
    """Return the steps that find the operation; none if both sides of a check would read today's files."""
    if change.content or (change.config and change.moves_exact):
        return []
    find, model, now = "to find the operation", actual.model, actual.provenance.run
    is_hidden = change.moves_exact and not change.is_over_limit
    # A reference of NEW's environment shares its libraries: a check there can agree whatever the cause.
    inputs = actual.options_of_check(new)
    run = in_float32(now) if is_hidden else now
    by_old = step_from_capture(model, run, "NEW_PYTHON", **inputs)
    if change.moves_exact or now == "cpu/float32":
        return [by_old]
    return [NextStep(find, check_command(model, now, **inputs)), by_old]


def _kind_of(judged: Judged, expected: Expectation) -> Kind:
    if not is_within_limits(judged):
        return "break"
    is_noise = all(
        ratio.value <= max(clean, *(one[name] for one in expected.captures))
        for (name, ratio), clean in zip(judged.items(), LARGEST_CLEAN_RATIOS.values(), strict=True)
    )
    return "noise" if is_noise else "drift"


def _environment(expected: Expectation, actual: Expectation) -> Iterator[str]:
    yield from machine_differences(expected.key.machine, actual.key.machine)
    before, now = expected.provenance, actual.provenance
    yield from list_changes(before.versions, now.versions)
    yield from list_changes(before.torch_settings, now.torch_settings)
    yield from list_changes(_surroundings(before), _surroundings(now))
    if before.approved_by and not now.approved_by:
        yield f"approved by {before.approved_by} → not approved"


def _surroundings(provenance: Provenance) -> dict[str, object]:
    """Return the known facts, except versions and settings, that can change numbers."""
    variables = provenance.process.get("variables") or {}
    found = {
        "product": provenance.product,
        "container": provenance.container,
        "cpu": provenance.process.get("cpu"),
    } | {f"variable {name}": value for name, value in variables.items()}
    return {name: value for name, value in found.items() if value is not None}


def _moved(expected: Signature, actual: Signature, judged: Judged) -> list[MovedToken]:
    before_RK = tokens_of(expected.captured.log_probabilities)
    now_RK = tokens_of(actual.captured.log_probabilities)
    with np.errstate(invalid="ignore"):
        moved_RK = np.abs(np.where(now_RK == before_RK, 0.0, now_RK - before_RK))
    spreads_R = token_spreads(tokens_of(expected.yardstick.log_probabilities))
    noise = next(iter(judged.values())).expected
    units_R = np.sqrt(np.mean(moved_RK**2, axis=1)) / spreads_R / noise
    units_R = np.where(np.isnan(units_R), math.inf, units_R)
    places = [
        (batch, row, position)
        for batch, rows in enumerate(expected.spreads)
        for row, spreads in enumerate(rows)
        for position in range(len(spreads))
    ]
    found = []
    for number in np.argsort(-units_R, kind="stable")[:_MAX_TOKENS_SHOWN]:
        if units_R[number] > 0:
            batch, row, position = places[number]
            kept = int(np.nanargmax(np.nan_to_num(moved_RK[number], nan=math.inf)))
            ids = expected.top_ids[batch][row][position]
            token = ids[kept] if kept < len(ids) else None
            values = before_RK[number, kept], now_RK[number, kept], units_R[number]
            found.append(MovedToken(batch, row, position, token, *map(float, values)))
    return found


def change_as_markdown(
    expected: Expectation, actual: Expectation, change: Change, new: str = "NEW"
) -> str:
    """Format the kind of change, ratios, tokens, modules, and other differences. new: file of `actual`."""
    return "\n".join(_lines(expected, actual, change, new)) + "\n"


def _lines(expected: Expectation, actual: Expectation, change: Change, new: str) -> Iterator[str]:
    yield f"### {escape_markdown(f'{actual.model} on {actual.provenance.run}: {change.kind}')}"
    yield ""
    first, *_ = change.summary.split()
    is_file_name = first.endswith(".json:")
    summary = change.summary if is_file_name else change.summary[:1].upper() + change.summary[1:]
    yield f"{escape_markdown(summary)}."
    if change.judged is not None:
        yield from ("", "| statistic | error | ratio to the older error | limit |")
        yield "|---|---|---|---|"
        for one in change.judged.values():
            mark = " **over**" if one.failed else ""
            statistic = escape_markdown(one.statistic)
            ratio, limit = format_against(one.value, one.limit)
            yield f"| {statistic} | {format_number(one.actual)} | {ratio}x{mark} | {limit}x |"
    if change.moved:
        yield from ("", "Tokens that moved most (in units of the older error):", "")
        yield "| batch, row, token | units | id | log-probability before | now |"
        yield "|---|---|---|---|---|"
        for token in change.moved:
            name = "all others" if token.id is None else escape_markdown(str(token.id))
            before, now = format_against(token.expected, token.actual)
            place = f"{token.batch}, {token.row}, {token.position}"
            yield f"| {place} | {format_number(token.units)} | {name} | {before} | {now} |"
        if change.kind != "noise":
            yield from _layers(expected, actual, change, new)
    yield from _listed(
        "Other changes since the older capture", [*change.config, *change.environment]
    )
    yield from _listed("Provenance", _provenance(expected, actual))


def _layers(expected: Expectation, actual: Expectation, change: Change, new: str) -> Iterator[str]:
    """List modules with larger errors, and the command that finds the operation."""
    if change.grown:
        yield from ("", "Modules with a larger error than before. The first one causes the change:")
        yield from ("", "| module | relative error before | now |", "|---|---|---|")
        for layer in change.grown[:_LAYERS_SHOWN]:
            yield f"| {escape_markdown(layer.module or OWN_FORWARD)} | {format_number(layer.before)} | {format_number(layer.now)} |"
        if (more := len(change.grown) - _LAYERS_SHOWN) > 0:
            yield f"| and {more} more | | |"
    elif change.coverage:
        yield from ("", "The modules are not compared, because they also read the later tokens.")
    elif change.moves_exact:
        yield from ("", "Modules are not compared, because their exact values moved.")
    elif expected.layers and actual.layers:
        yield from ("", "No module has a clearly larger error than before.")
    else:
        yield from ("", "One of the captures has no errors of modules.")
    for step in _steps_to_operation(actual, change, new):
        purpose = f"{step.purpose[:1].upper()}{step.purpose[1:]}:"
        yield from ("", purpose, "", markdown_block(step.command))


def _listed(title: str, items: Iterable[str]) -> Iterator[str]:
    found = list(items)
    if found:
        yield from ("", f"{title}:", "", *(f"- {escape_markdown(item)}" for item in found))


def _provenance(expected: Expectation, actual: Expectation) -> Iterator[str]:
    for word, one in (("before", expected), ("now", actual)):
        date = one.provenance.process.get("date", "unknown date")
        approved = one.provenance.approved_by
        approval = f"approved by {approved}" if approved else "not approved"
        reason = f": {one.provenance.reason}" if one.provenance.reason else ""
        captures = format_count(len(one.captures), "capture")
        yield f"{word}: {date}, {captures}, {approval}{reason}"
