"""The measurements of the replayed steps, judged in groups: one for each kind of value."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from assay.dtypes import float_format
from assay.judge.levels import describe_uncalled
from assay.judge.replays import Allowances, Judged, judge_replay
from assay.judge.results import PortResult, ReplayResults, read_results
from assay.kernel import POOLED
from assay.metrics import PairSums
from assay.noise import SLOPE_FLOOR, slope_ratio
from assay.sites import Phase
from assay.stages import Stage
from assay.training.judging.evidence import (
    PARAMETER_PREFIX,
    UPDATE_PREFIX,
    UPDATES,
    TrainEvidence,
    is_made_by_loss,
    parameter_name,
)
from assay.training.protocol import OtherSetting

# In the order of a step: of several equally bad measurements, the first names the place. `gradients`
# are at module boundaries, `stage-backward` at parameters; the level `gradients` has both.
GROUPS = (
    "stage-inputs", "modules", "stage-forward", "recomputed", "gradients", "stage-backward",
    "stage-reduce", "stage-clip", "stage-optimizer",
)  # fmt: skip

# Powers of ten of a setting that are tried until one shows.
_MOST_POWERS = 7

# The mantissa of every power of two, according to math.frexp.
_HALF = 0.5


@dataclass(slots=True)
class JudgedGroup:
    """The judged measurements of one kind, of all ranks."""

    name: str
    ports: list[PortResult] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Ports that cannot be judged because the noise run is not finite there."""
    unmatched_expected: list[str] = field(default_factory=list)
    unmatched_actual: list[str] = field(default_factory=list)

    @property
    def phase(self) -> str:
        """Phase of the values, or the group's name if they belong to several phases."""
        return self.name.removeprefix("stage-")

    @property
    def failed(self) -> list[Judged]:
        """Statistics over their limits."""
        return [item for item in self.judged if item.failed]


def judge_groups(evidence: TrainEvidence) -> dict[str, JudgedGroup]:
    """Judge every measurement of the replayed steps, and return the groups in the order of `GROUPS`."""
    noise, of_ranks = _read_noise(evidence), _read_ranks(evidence)
    groups = {name: _judge_group(name, evidence, noise, of_ranks) for name in GROUPS}
    _drop_router_gradients(groups)
    never_called = {one for results in of_ranks["modules"] for one in results.uncalled_modules}
    if never_called:
        groups["modules"].notes.append(describe_uncalled(sorted(never_called)))
    on_no_rank = set.intersection(*(set(report.model.absent) for report in evidence.reports))
    updates = groups["stage-optimizer"]
    updates.unmatched_expected += [f"{name}: on no rank" for name in sorted(on_no_rank)]
    return groups


def _judge_group(
    name: str,
    evidence: TrainEvidence,
    noise: Mapping[str, ReplayResults],
    of_ranks: Mapping[str, Sequence[ReplayResults]],
) -> JudgedGroup:
    """Judge the values of one group on every rank, but where the noise run is not finite."""
    group, ports = JudgedGroup(name), noise[name].ports
    not_finite = {key for key, one in ports.items() if one.sums.num_nan or one.sums.num_inf}
    if name != "recomputed":  # the group of the forward pass names them
        group.broken = [f"{module or '(model)'}:{port}" for module, port in sorted(not_finite)]
    for rank, results in enumerate(of_ranks[name]):
        of_rank = {one: of_ranks[one][rank] for one in GROUPS}
        own_noise = noise[name]
        if evidence.reports[rank].traits.partial_modules or _computes_loss_in_model(of_rank):
            own_noise = _noise_at_head(results, own_noise)
        allowances = _allowances(evidence, noise, name, of_rank)
        judged, bias = judge_replay(results, own_noise, evidence.limits, allowances)
        group.judged += [
            item for item in judged if (item.port.module, item.port.port) not in not_finite
        ]
        if name == "stage-optimizer":
            wrong = {id(item.port) for item in group.failed}
            passed = [key for key, port in results.ports.items() if id(port) not in wrong]
            group.judged += _judge_common_scale(passed, results, own_noise, evidence)
        group.ports += results.ports.values()
        group.unmatched_expected += results.unmatched_expected
        group.unmatched_actual += results.unmatched_actual
        group.notes += [bias.note] if bias is not None else []
    return group


def _read_noise(evidence: TrainEvidence) -> dict[str, ReplayResults]:
    """Read the noise run's results by group."""
    noise = {name: read_results(evidence.noise, name) for name in GROUPS}
    noise["stage-optimizer"] = noise_of_optimizer(evidence)
    # The noise run recomputes nothing. A recomputed value rounds like the first one.
    noise["recomputed"] = noise["modules"]
    return noise


def _allowances(
    evidence: TrainEvidence,
    noise: Mapping[str, ReplayResults],
    name: str,
    of_rank: Mapping[str, ReplayResults],
) -> Allowances:
    """Return what a rank's values in group `name` may differ by beyond the noise of their own places."""
    traits, results = evidence.report.traits, of_rank[name]
    uncalled_modules = of_rank["modules"].uncalled_modules
    rounded = _unit_of_rounded_logits(noise) if _computes_loss_in_model(of_rank) else 0.0
    unit_of_loss = max(_unit_of_loss(noise), rounded)
    units = dict.fromkeys(_stages_of_loss(noise, uncalled_modules), unit_of_loss)
    units |= _units_of_unscaling(evidence, name, results)
    if name == "stage-forward" and rounded:
        units[Stage("", "forward")] = rounded / _size_of_loss(evidence, noise)
    if name == "stage-clip":
        stages = (port.stage for port in results.ports.values())
        units |= dict.fromkeys(
            stages, _unit_of_norm(noise[name], len(evidence.reference.num_tokens))
        )
    if name == "stage-optimizer" and traits.update_rounding:
        units |= {port.stage: traits.update_rounding for port in results.ports.values()}
    if name == "stage-backward":
        other_work = _noise_at_results_of_replaced_modules(noise["gradients"], uncalled_modules)
    else:
        other_work = _noise_of_late_phases(noise, traits.invisible_phases).get(name, {})
    return Allowances(units, other_work)


def list_unseen_settings(evidence: TrainEvidence) -> Iterator[str]:
    """Describe each stated setting of AdamW that an optimizer can ignore and pass, and what shows it."""
    if (measure := evidence.measure_adamw) is None:
        return
    own = "float32" if evidence.report.free.kept is not None else evidence.dtype
    noise = noise_of_optimizer(evidence)

    def shows(arithmetic: str, noise: ReplayResults, other: OtherSetting) -> bool:
        results = measure(arithmetic, other)
        judged, _ = judge_replay(results, noise, evidence.limits)
        judged += _judge_common_scale([*results.ports], results, noise, evidence)
        return any(item.failed for item in judged)

    for parameters, settings in evidence.options.parameter_groups.items():
        for name, value in settings.items():
            other = OtherSetting.instead(parameters, name, value)
            if other is None or shows(own, noise, other):
                continue
            advice = "no larger value was found that shows"
            stated = replace(other, value=value)
            if own != "float32" and shows("float32", measure("float32", stated), other):
                advice = "float32 or --mixed-precision shows it"
            else:
                largest = max(value, other.value)
                tried = (largest * 10.0**power for power in range(1, _MOST_POWERS))
                found = (one for one in tried if shows(own, noise, replace(other, value=one)))
                if (seen := next(found, None)) is not None:
                    advice = f"a value of about {seen:g} would show"
            yield (
                f"{name} {value:g} of {parameters!r} was not checked: in {own}, an optimizer with {other.value:g}"
                f" passes too; {advice}"
            )


def _judge_common_scale(
    passed: Sequence[tuple[str, str]],
    results: ReplayResults,
    noise: ReplayResults,
    evidence: TrainEvidence,
) -> list[Judged]:
    """Judge the scale of the updates of all parameters together, without those that fail alone.

    In 16 bits, rounding changes an update by a fifth, so that the scale of one parameter's updates is
    known to a tenth. Over all of them it averages out to a thousandth.
    """
    pairs = [
        (results.ports[key], noise.ports[key].sums)
        for key in passed
        if key[1].startswith(UPDATE_PREFIX) and key in noise.ports
    ]
    if not pairs:
        return []
    actual, expected = (_total(sums) for sums in zip(*((p.sums, n) for p, n in pairs), strict=True))
    if not math.isfinite(actual.slope + expected.slope):
        return []
    unit = max(float_format(port.dtype).unit_roundoff for port, _ in pairs)
    unit = max(unit, evidence.report.traits.update_rounding / SLOPE_FLOOR)
    ratio = slope_ratio(actual, expected, unit)
    order = min(port.order for port, _ in pairs)
    everywhere = PortResult("", UPDATES, Stage("", "optimizer"), order, pairs[0][0].dtype, "")
    everywhere.sums, everywhere.rank = actual, pairs[0][0].rank
    return [Judged.of(ratio, evidence.limits.of(ratio.statistic), everywhere)]


def _total(parts: Sequence[PairSums]) -> PairSums:
    names = ("num_elements", *POOLED)
    total = PairSums(**{name: sum(getattr(one, name) for one in parts) for name in names})
    total.rows = [rows for one in parts for rows in one.rows]
    return total


def noise_of_optimizer(evidence: TrainEvidence) -> ReplayResults:
    """Return the noise for updates and moments: the noise run's, or that of an optimizer in float32.

    The noise run's also applies to the updates of parameters that are rounded from a wider copy.
    """
    in_dtype = read_results(evidence.noise, "stage-optimizer")
    kept = evidence.report.free.kept
    if kept is None:
        return in_dtype
    if evidence.measure_adamw is None:
        raise ValueError("mixed precision is judged by an optimizer in float32")
    in_float32 = evidence.measure_adamw("float32", None)
    copied = set(kept.copied)
    from_copies = {
        key: port
        for key, port in in_dtype.ports.items()
        if port.port.startswith(UPDATE_PREFIX) and parameter_name(*key) in copied
    }
    return replace(in_float32, ports=in_float32.ports | from_copies)


def _read_ranks(evidence: TrainEvidence) -> dict[str, list[ReplayResults]]:
    """Read the results of each rank by group, and number the ports over all groups."""
    of_groups: dict[str, list[ReplayResults]] = {}
    num_before = 0  # ports of earlier groups, each on the rank with most of them
    for name in GROUPS:
        of_ranks = of_groups[name] = [read_results(trace, name) for trace in evidence.candidates]
        for rank, results in enumerate(of_ranks):
            if name in ("recomputed", "gradients"):
                # A module that forward never calls is missing in recomputation and backward too.
                results.uncalled_modules = of_groups["modules"][rank].uncalled_modules
            for port in results.ports.values():
                port.order += num_before
                port.rank = rank
        num_before += max(len(results.ports) for results in of_ranks)
    return of_groups


def _noise_at_head(results: ReplayResults, noise: ReplayResults) -> ReplayResults:
    """Return the noise run's results for a rank on which the gradient of the loss arrives at the head.

    This holds for a pipeline stage, where the model itself is not measured, and for a model that
    computes its own loss.
    """
    loss = _port_of_loss(noise)
    if loss is None:
        return noise
    root = Stage("", "backward")
    arrived = {
        key: loss
        for key, port in results.ports.items()
        if port.stage == root and _width(port) == _width(loss)
    }
    return replace(noise, ports=noise.ports | arrived)


def _computes_loss_in_model(of_rank: Mapping[str, ReplayResults]) -> bool:
    """Return True if no gradient of a loss arrives at the model's results."""
    return _port_of_loss(of_rank["gradients"]) is None


def _unit_of_rounded_logits(noise: Mapping[str, ReplayResults]) -> float:
    """Return twice the error of a token's loss from logits that the model rounds after its head, as a soft cap does.

    The noise run computes its loss from injected logits, which a loss of the model does not read. An error s
    of each logit changes the loss, and relative to its length its gradient, by up to sqrt(2) s.
    """
    of_logits = [
        port.sums
        for module, port in _ports_of_logits(noise)
        if not module and not port.stage.module
    ]
    errors = (math.sqrt(one.dd / one.num_elements) for one in of_logits if one.num_elements)
    return 2 * math.sqrt(2) * max(errors, default=0.0)


def _size_of_loss(evidence: TrainEvidence, noise: Mapping[str, ReplayResults]) -> float:
    """Return a micro-batch's share of the loss over its error if that of each token is 1 and independent."""
    loss = noise["stage-forward"].ports.get(("", "loss"))
    if loss is None or not loss.sums.ee:
        return math.inf
    num_tokens = evidence.reference.num_tokens
    num_micro_batches = loss.sums.num_elements / len(num_tokens)
    share = math.sqrt(loss.sums.ee / loss.sums.num_elements)
    return share * math.sqrt(min(num_tokens) * num_micro_batches)


def _port_of_loss(noise: ReplayResults) -> PortResult | None:
    """Find the noise run's measurement of the gradient of its loss."""
    found = (port for key, port in noise.ports.items() if is_made_by_loss(*key))
    return next(found, None)


def _width(port: PortResult) -> int | None:
    return None if port.sums.channel is None else port.sums.channel.shape[1]


def _ports_of_logits(noise: Mapping[str, ReplayResults]) -> list[tuple[str, PortResult]]:
    """Return the results of modules, each with its path, that are as wide as the gradient of the loss."""
    loss = _port_of_loss(noise["gradients"])
    return [
        (module, port)
        for (module, name), port in noise["modules"].ports.items()
        if loss is not None and name.startswith("output") and _width(port) == _width(loss)
    ]


def _unit_of_loss(noise: Mapping[str, ReplayResults]) -> float:
    """Return the relative error of a loss gradient from rounding the largest logits to float32.

    A fused loss subtracts the logarithm of the sum from each logit in one operation, and its
    probabilities have this error. Subtracting the largest logit first is many times more accurate.
    """
    sizes = [
        math.sqrt(float(port.sums.channel[2].max()) / port.sums.channel_rows)
        for _, port in _ports_of_logits(noise)
        if port.sums.channel is not None
    ]
    return float_format("float32").unit_roundoff * max(sizes, default=1.0)


def _stages_of_loss(
    noise: Mapping[str, ReplayResults], uncalled_modules: Sequence[str]
) -> list[Stage]:
    """List the stages whose backward uses the gradient of the loss outside of any called module.

    These are the model's own code, and a head that is fused with the loss.
    """
    heads = {module for module, _ in _ports_of_logits(noise) if module in uncalled_modules}
    return [Stage(module, "backward") for module in ("", *sorted(heads))]


def _unit_of_norm(clipped: ReplayResults, num_steps: int) -> float:
    """Return the relative error of a norm that sums the squares of all gradients in float32, in any order.

    Source: Higham & Mary, SIAM J. Sci. Comput. 41 (2019) A2815: the errors of N sums grow with the root of N.
    """
    gradients = (one for one in clipped.ports.values() if one.port.startswith(PARAMETER_PREFIX))
    num_elements = sum(one.sums.num_elements for one in gradients) / num_steps
    return float_format("float32").unit_roundoff * math.sqrt(num_elements)


def _units_of_unscaling(
    evidence: TrainEvidence, name: str, results: ReplayResults
) -> dict[Stage, float]:
    """Return the rounding of removing the loss scale, for each stage of the phase that removes it.

    A power of two rounds nothing. Other factors round once when applied, and once when removed.
    """
    factors = [
        step.factor
        for step in evidence.report.replay.scaled_steps
        if name == f"stage-{step.taken_off or 'optimizer'}"
    ]
    if all(abs(math.frexp(factor)[0]) == _HALF for factor in factors):
        return {}
    return {port.stage: 2 * evidence.unit_roundoff for port in results.ports.values()}


def _noise_at_results_of_replaced_modules(
    gradients: ReplayResults, uncalled_modules: Sequence[str]
) -> dict[str, list[PairSums]]:
    """Return the noise run's measurements of gradients at the results of modules never called.

    No gradient is injected there, so the gradients of their parameters carry that error too.
    """
    found: dict[str, list[PairSums]] = {}
    for (module, name), port in gradients.ports.items():
        if module in uncalled_modules and name.startswith("output"):
            found.setdefault(module, []).append(port.sums)
    return found


def _noise_of_late_phases(
    noise: Mapping[str, ReplayResults], invisible: Mapping[Phase, str]
) -> dict[str, dict[str, list[PairSums]]]:
    """Return the noise run's measurements of invisible phases, by the next visible group and module."""
    found: dict[str, dict[str, list[PairSums]]] = {}
    waiting: dict[str, list[PairSums]] = {}
    phases: tuple[Phase, ...] = ("backward", "reduce", "clip", "optimizer")
    for phase in phases:
        if phase not in invisible:
            found[f"stage-{phase}"], waiting = waiting, {}
        elif phase != "reduce":
            for port in noise[f"stage-{phase}"].ports.values():
                if port.port.startswith(PARAMETER_PREFIX):
                    waiting.setdefault(port.stage.module, []).append(port.sums)
    return found


def _drop_router_gradients(groups: Mapping[str, JudgedGroup]) -> None:
    """Drop the gradients of routers that chose differently between nearly equal scores.

    Backward follows the choice of their own code, which no injected value corrects.
    """
    ports = [port for group in groups.values() for port in group.ports]
    near_tie_modules = {port.stage.module for port in ports if port.exact.num_near_ties}
    for group in (groups[name] for name in ("gradients", "stage-backward")):
        left = [item for item in group.judged if item.port.stage.module in near_tie_modules]
        if left:
            modules = sorted({item.port.stage.module for item in left})
            group.notes.append(
                f"gradients of {', '.join(modules)} are not judged: routing choices differ there"
                " where the scores are nearly equal"
            )
            group.judged = [
                item for item in group.judged if item.port.stage.module not in near_tie_modules
            ]
