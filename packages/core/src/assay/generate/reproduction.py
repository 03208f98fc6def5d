"""Record the programs that made the wrong values of a stage, for `assay reproduce`.

The candidate and the noise run replay the golden's calls in their own processes. The candidate looks for the
values in all batches and keeps the worst; the noise run records the same ones.
"""

from assay.generate.candidate import load_candidate
from assay.generate.find_operation import load_trusted, open_replay, run_inside, shortened
from assay.generate.generation_loop import count_tokens
from assay.generate.golden import GoldenSection
from assay.generate.passes import Side
from assay.generate.spec import GenerateCheck
from assay.hooks.module_tracer import ModuleTracer
from assay.inputs import Batch
from assay.launch import Rank
from assay.models.inspect.inspection import inspect_load
from assay.models.load import load_model
from assay.recording.programs import RecordedValue
from assay.replay.value_programs import ProgramFinder, Wanted
from assay.reproduce.wrong_values import WrongValue, compare_weights
from assay.runs import Progress
from assay.sites import CallSite


def find_wrong_values(
    check: GenerateCheck, progress: Progress, rank: Rank | None = None
) -> list[WrongValue]:
    """Return the candidate's weights that are not its files'."""
    if rank is not None and rank.number:
        return []  # the first loads the whole model
    manifest = GoldenSection.open(check.golden_folder, check.dtype).golden
    with progress.step("comparing the weights"):
        loaded = load_model(check.model, dtype=check.dtype, remote_code=check.remote_code)
        inspection = inspect_load(loaded, check.remote_code)
        model = load_candidate(check, manifest).loaded.model
        return list(compare_weights(model, inspection, "before the first forward pass"))


def record_programs(
    request: tuple[GenerateCheck, Wanted], progress: Progress, rank: Rank | None = None
) -> list[RecordedValue]:
    """Record the programs of one side. Returns: the candidate's worst value of each port, or each of `sites`."""
    check, wanted = request
    section = GoldenSection.open(check.golden_folder, check.dtype)
    if wanted.sites:
        side = load_trusted(check, section, "noise")
    else:
        side = load_candidate(check, section.golden, rank)
    finder = ProgramFinder(side.loaded.model, wanted=wanted, trace=section.steps, found={})
    batches = {site.at.micro_batch for site in wanted.sites}
    for batch in section.batches:
        if not batches or batch.number in batches:
            with progress.task("recording the operations", count_tokens([batch]), "tokens"):
                _run(side, section, finder, batch)
    return [*finder.found.values()]


def _run(side: Side, section: GoldenSection, finder: ProgramFinder, batch: Batch) -> None:
    """Replay a batch up to the wanted step."""
    wanted = finder.wanted
    last = max((site.at.step for site in wanted.sites), default=wanted.step)
    step = batch.max_new_tokens if last is None else last
    work = shortened(section, CallSite(step, "", micro_batch=batch.number))
    replayer = open_replay(side, section, work)
    replayer.observer, tracer = finder, ModuleTracer(replayer)

    def is_recording() -> bool:
        active = tracer.active
        return wanted.is_of_loop or bool(active and finder.begin_step(active.call.site.step))

    finder.is_recording = is_recording
    finder.forget()
    run_inside(finder, tracer, side, section, work)
