"""Plans of workflows that are started by hand."""

from assay_runners.fleet.entries import Fleet
from assay_runners.planning.choices import machine_job, plan_nothing, plan_refusal
from assay_runners.planning.events import Event
from assay_runners.planning.labels import EVERY, describe_no_runner, find_able_runners
from assay_runners.planning.plan import Plan, Refusal, SessionCall


def plan_bench(event: Event, fleet: Fleet) -> Plan:
    """Plan the bench session on one machine."""
    target = event.inputs.get("vendor", "").casefold()
    if target == EVERY:
        why = "benchmarks take hours: name one machine"
        return plan_refusal(event, Refusal(asked=target, why=why))
    if refusal := _refuse_target(target, "bench", fleet) or _refuse_options(event.inputs):
        return plan_refusal(event, refusal)
    if "model" not in event.inputs:
        why = (
            f"name a model: the shipped baselines are of Python {fleet.github.bench_python}, and"
            " machines have their vendor's"
        )
        return plan_refusal(event, Refusal(asked="bench", why=why))
    (runner,) = find_able_runners(target, "bench", fleet)
    job = machine_job(runner, "bench", _bench_calls(event.inputs), "a dispatch of bench")
    return Plan(event=event.name, sha=event.sha, machines=(job,))


def _bench_calls(inputs: dict[str, str]) -> list[SessionCall]:
    """Evaluate the model and compare it with the baseline, if one is named."""
    suite = ("--suite", inputs["suite"]) if "suite" in inputs else ()
    results = "runs/bench"
    asked = ("run", "--model", inputs["model"], *suite, "--output", results)
    calls = [SessionCall(session="bench", arguments=asked)]
    if "baseline" in inputs:
        compared = ("compare", inputs["baseline"], results, *suite, "--output", "runs/compared")
        calls.append(SessionCall(session="bench", arguments=compared))
    return calls


def plan_recapture(event: Event, fleet: Fleet) -> Plan:
    """Plan the capture of the models' expectations on each machine."""
    protected = f"refs/heads/{fleet.github.protected_ref}"
    if event.ref != protected:
        why = f"its pull request would bring along what {event.ref} has: start it from {protected}"
        return plan_refusal(event, Refusal(asked="recapture", why=why))
    models, targets = (
        event.inputs.get(name, "").replace(",", " ").split() for name in ("models", "vendors")
    )
    reason = event.inputs.get("reason", "")
    if not models or not targets or not reason:
        why = "a recapture needs models, vendors and a reason"
        return plan_refusal(event, Refusal(asked="recapture", why=why))
    named = {**{f"the model {model}": model for model in models}, "the reason": reason}
    refusals = [_refuse_options(named)]
    refusals += [_refuse_target(target.casefold(), "expectations", fleet) for target in targets]
    if any(refusals):
        return plan_refusal(event, *filter(None, refusals))
    chosen = {
        runner.target: runner
        for target in targets
        for runner in find_able_runners(target.casefold(), "expectations", fleet)
    }
    approved_by = str(event.sender.get("login", ""))
    words = (*models, "--reason", reason, "--approved-by", approved_by)
    call = SessionCall(session="recapture", arguments=words)
    return Plan(
        event=event.name,
        sha=event.sha,
        machines=tuple(
            machine_job(runner, "expectations", [call], "a dispatch of recapture")
            for runner in chosen.values()
        ),
    )


def plan_reaper(event: Event, _: Fleet) -> Plan:
    """Plan nothing: the reaper needs no machine."""
    return plan_nothing(event, "the reaper has no sessions")


def _refuse_target(target: str, tier: str, fleet: Fleet) -> Refusal | None:
    if find_able_runners(target, tier, fleet):
        return None
    return Refusal(asked=target, why=describe_no_runner(target, tier, fleet))


def _refuse_options(inputs: dict[str, str]) -> Refusal | None:
    """Refuse an input that a command would read as an option."""
    for name, value in inputs.items():
        if value.startswith("-"):
            return Refusal(asked=value, why=f"{name} begins with a dash, as only options do")
    return None
