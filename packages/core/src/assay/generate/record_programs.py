"""Record the programs that made the wrong values of a stage, for `assay reproduce`.

The candidate and the noise run replay the golden's calls in their own processes. The candidate looks for the
values in all batches and keeps the worst; the noise run records the same ones.
"""

from assay.generate.candidate import load_candidate
from assay.generate.find_operation import load_trusted, shortened
from assay.generate.generation_loop import count_tokens, timeline_of
from assay.generate.golden import GoldenSection
from assay.generate.passes import Side, run_forced, whole_batches
from assay.generate.spec import GenerateCheck
from assay.hooks.module_tracer import ModuleTracer
from assay.launch import Rank
from assay.models.config_files import attention_of
from assay.models.inspect.inspection import inspect_load
from assay.models.load import load_model
from assay.recording.programs import ProgramRecorder
from assay.replay.modules import Replayer
from assay.replay.value_programs import ProgramFinder, RecordedValue, Wanted
from assay.reproduce.wrong_values import WrongValue, compare_weights
from assay.runs import Progress
from assay.sites import CallSite, Phase


def find_wrong_values(
    request: tuple[GenerateCheck, Phase], progress: Progress, rank: Rank | None = None
) -> list[WrongValue]:
    """Return the candidate's weights that are not its files'."""
    check, _ = request
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
    finder = ProgramFinder(wanted, ProgramRecorder(side.loaded.model), section.steps)
    batches = {site.at.micro_batch for site in wanted.sites}
    for batch in section.batches:
        if not batches or batch.number in batches:
            with progress.task("recording the operations", count_tokens([batch]), "tokens"):
                _run(side, section, finder, batch.number)
    return [*finder.found.values()]


def _run(side: Side, section: GoldenSection, finder: ProgramFinder, number: int) -> None:
    """Replay a batch up to the wanted step. A program holds operations of one step."""
    step = finder.wanted.step
    last = max((site.at.step for site in finder.wanted.sites), default=step)
    work = next(one for one in whole_batches(section.batches) if one.batch.number == number)
    if last is not None:
        work = shortened(section, CallSite(last, "", micro_batch=number))
    replayer = Replayer(
        section.steps, section.boundary, attention_of(side.loaded), source=work.source
    )
    replayer.observer, replayer.layout = finder, side.layout
    tracer = ModuleTracer(replayer)
    running = -1

    def is_wanted() -> bool:
        nonlocal running
        if finder.wanted.is_of_loop:
            return True
        if tracer.active is None:
            return False
        now = tracer.active.call.site.step
        if now != running:
            running = now
            finder.recorder.forget()
        return step in (None, now)

    finder.recorder.is_recording = is_wanted
    tokens = section.tensors("tokens")[[one.number for one in section.batches].index(number)]
    with tracer.attached(side.loaded.model):
        tracer.begin_batch(number, timeline_of(work.batch))
        run_forced(side, work, tokens[:, : work.batch.max_new_tokens], finder.recorder)
