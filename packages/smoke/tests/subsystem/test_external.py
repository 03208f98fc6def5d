"""Training libraries by their command line: correct ones pass, and each fault is named."""

import json
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.cli import main
from assay.models.sources import local_folder, resolve_model
from assay.runs import SilentProgress
from assay.runs.results import read_measurements
from assay.verdicts import Location, Outcome, Verdict
from assay_smoke import machine
from assay_smoke.external.levels import run_external
from assay_smoke.session.command import reason_of
from assay_smoke.timelines import phases_of

TOY = Path(__file__).parents[1] / "toy_training.py"
EXAMPLE = Path(__file__).parents[4] / "examples/plain_training/smoke.toml"

LEVELS = [
    "run", "loss", "learning-rate", "checkpoint", "updates", "first-save", "equivalent", "resume",
    "sigterm", "tear-down", "leftovers", "memory",
]  # fmt: skip

WORDS = [
    sys.executable, str(TOY), "--model", "{model}", "--output", "{output}", "--steps", "{steps}",
    "--save-every", "{save_every}", "--keep", "{keep}", "--seed", "{seed}",
]  # fmt: skip
ADAPTER = 'checkpoints.kind = "adapter"'
SIGTERM = 'on_sigterm = "checkpoint"'


def facts_of(verdict: Verdict, level: str) -> dict[str, object]:
    facts = verdict.levels[level].model_extra or {}
    return {name: value for name, value in facts.items() if name != "question"}


@pytest.fixture(autouse=True)
def nothing_left_running(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    trees: list[machine.ProcessTree] = []
    new_tree = machine.ProcessTree

    def kept() -> machine.ProcessTree:
        trees.append(new_tree())
        return trees[-1]

    monkeypatch.setattr(machine, "ProcessTree", kept)
    yield
    assert [process for tree in trees for process in tree.living()] == []


def write_toml(
    folder: Path, fault: str = "", *, keys: str = "", arguments: tuple[str, ...] = ()
) -> Path:
    """Write the toy's file with a fault and more lines `keys`."""
    toml = folder / "toy.toml"
    toml.write_text(
        f"launch = {json.dumps([*WORDS, *arguments])}\n"
        'resume = ["--resume-from", "{resume_from}"]\n'
        "steps = 6\nsave_every = 2\ntime_limit_seconds = 100\n"
        + ("" if "--adapter" in arguments else 'frozen = ["model.embed_tokens.*"]\n')
        + f"environment.FAULT = {json.dumps(fault)}\n"
        "losses.pattern = 'step (?P<step>\\d+) loss (?P<loss>\\S+) lr (?P<lr>\\S+)'\n"
        "learning_rates = [0.001, 0.0009, 0.0008, 0.0007, 0.0006, 0.0005]\n"
        'checkpoints.folder = "{output}/step-{step}"\n'
        f"{keys}\n",
        encoding="utf-8",
    )
    return toml


def run(
    folder: Path, fault: str = "", *, keys: str = "", arguments: tuple[str, ...] = ()
) -> Verdict:
    """Judge the toy with a fault."""
    toml = write_toml(folder, fault, keys=keys, arguments=arguments)
    results = folder / "results"
    results.mkdir()
    return run_external(toml, results, SilentProgress())


def failed_levels(verdict: Verdict) -> list[str]:
    return [name for name, level in verdict.levels.items() if level.verdict is Outcome.FAIL]


def test_a_clean_library_passes_with_every_level_compared(tmp_path: Path) -> None:
    verdict = run(tmp_path, keys=f"{SIGTERM}\nkeep = 2", arguments=("--pause", "0.2"))

    assert verdict.verdict is Outcome.PASS
    assert list(verdict.levels) == LEVELS
    left_out = {name for name, level in verdict.levels.items() if level.verdict is None}
    assert left_out == {"memory", "equivalent"}
    assert facts_of(verdict, "checkpoint") == {"steps": [4, 6]}
    assert facts_of(verdict, "resume") == {"from_step": 4, "bitwise": True}
    # Of 39 tensors of a micro:llama one is frozen.
    assert verdict.levels["updates"].compared == 39
    assert facts_of(verdict, "updates") == {"frozen": 1}
    assert verdict.levels["first-save"].compared == 39
    # Six uninterrupted, two resumed; at least one before SIGTERM, and the rest after it.
    assert verdict.levels["loss"].compared >= 6 + 2 + 6
    peak = (verdict.levels["memory"].model_extra or {})["host_peak_bytes"]
    assert 10 << 20 < peak < 1 << 30
    rows, _ = read_measurements(tmp_path / "results")
    assert [(row.level, row.step, row.ratio) for row in rows][:2] == [
        ("resume", 5, 0.0),
        ("resume", 6, 0.0),
    ]
    drawn = Counter(row.statistic for row in rows if row.port == "learning-rate")
    assert drawn == {"uninterrupted-learning-rate": 6, "resumed-learning-rate": 2}
    phases = [(one.world, one.phase, one.number) for one in phases_of(tmp_path / "results")]
    assert phases[:7] == [
        ("train", "set-up", None), *[("train", "step", number) for number in (2, 3, 4, 5, 6)],
        ("train", "tear-down", None),
    ]  # fmt: skip
    # What the library wrote is large, and no longer needed; what it said is kept.
    assert not list((tmp_path / "results").glob("*-output"))
    assert "step 6 loss" in (tmp_path / "results/uninterrupted.log").read_text()


def test_a_clean_adapter_passes(tmp_path: Path) -> None:
    verdict = run(tmp_path, keys=ADAPTER, arguments=("--adapter",))

    assert verdict.verdict is Outcome.PASS
    assert verdict.levels["updates"].compared == 2
    assert verdict.levels["sigterm"].verdict is None


def test_an_adapter_that_is_one_step_old_fails(tmp_path: Path) -> None:
    keys = f'{ADAPTER}\nprecision = "float32"'
    verdict = run(tmp_path, "model one step old", keys=keys, arguments=("--adapter",))

    assert failed_levels(verdict) == ["first-save"]


def test_a_resumed_run_that_fails_by_an_old_model_says_so(tmp_path: Path) -> None:
    verdict = run(tmp_path, "resumes a model one step old", keys='precision = "float32"')

    assert failed_levels(verdict) == ["first-save", "resume"]
    assert verdict.location is not None
    assert verdict.location.step == 1
    assert "saved models are one step old" in str(verdict.levels["first-save"].reason)


def test_a_resumed_run_that_fails_by_a_model_that_may_be_old_says_so(tmp_path: Path) -> None:
    verdict = run(tmp_path, "resumes a model one step old")

    assert failed_levels(verdict) == ["resume"]
    first, *next_steps = str(reason_of(verdict)).splitlines()
    assert "weights or random numbers differ)" in first
    assert (
        "; first-save: the checkpoint of step 1 holds the initial model: saved models are one"
        in first
    )
    assert first.endswith("Missing: `precision`")
    assert next_steps == [f"next: {verdict.next_steps[0]}"]
    assert str(verdict.next_steps[0]).startswith("from step 5 on, print the numbers of the rows,")


def test_a_first_step_that_a_loss_scale_may_skip_is_no_pass(tmp_path: Path) -> None:
    verdict = run(tmp_path, "model one step old")

    assert verdict.verdict is Outcome.NOT_COMPARED
    assert str(verdict.levels["first-save"].reason).endswith("Missing: `precision`")


def test_a_first_step_without_a_logged_rate_is_no_pass(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, "warmup", keys='precision = "float32"')
    text = toml.read_text(encoding="utf-8").replace("learning_rates = [", "# [")
    toml.write_text(text.replace(" lr (?P<lr>\\S+)", ""), encoding="utf-8")
    (tmp_path / "results").mkdir()

    verdict = run_external(toml, tmp_path / "results", SilentProgress())

    assert verdict.verdict is Outcome.NOT_COMPARED
    assert str(verdict.levels["first-save"].reason).endswith(
        "Missing: a positive rate of step 1 in `learning_rates`"
    )


def test_a_first_step_with_a_rate_of_zero_is_no_old_model(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, "warmup", keys="")
    text = toml.read_text(encoding="utf-8")
    toml.write_text(text.replace("learning_rates = [", "# ["), encoding="utf-8")
    (tmp_path / "results").mkdir()

    verdict = run_external(toml, tmp_path / "results", SilentProgress())

    assert verdict.verdict is Outcome.PASS
    assert verdict.levels["first-save"].verdict is Outcome.PASS


def test_rates_that_are_logged_are_compared_without_a_declared_schedule(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, "schedule restarted")
    text = toml.read_text(encoding="utf-8")
    toml.write_text(text.replace("learning_rates = [", "# ["), encoding="utf-8")
    (tmp_path / "results").mkdir()

    verdict = run_external(toml, tmp_path / "results", SilentProgress())

    assert failed_levels(verdict) == ["learning-rate"]
    assert "of step 5 of the resumed run is 0.001, in the uninterrupted run 0.0006" in str(
        verdict.levels["learning-rate"].reason
    )
    # No ratio decided, so that none is the headline.
    assert (verdict.statistic, verdict.noise_ratio, verdict.limit) == ("exact", None, 0.0)


def test_a_library_that_resumes_from_the_newest_state_in_its_output_passes(tmp_path: Path) -> None:
    toml = tmp_path / "another.toml"
    toml.write_text(
        f"launch = {json.dumps([*WORDS, '--like-another'])}\n"
        'resume = []\nresume_in = "copy"\nfrozen = ["model.embed_tokens.*"]\n'
        'losses = {file = "{output}/log.jsonl", step = "global_step", loss = "train/loss"}\n'
        'checkpoints.folder = "{output}/epoch_{step}"\ncheckpoints.numbers = [0, 1]\n'
        'checkpoints.state = "{output}/states/epoch_{step}"\n'
        "checkpoints.state_numbers = [0, 1]\nsteps = 6\nsave_every = 2\n",
        encoding="utf-8",
    )
    (tmp_path / "results").mkdir()

    verdict = run_external(toml, tmp_path / "results", SilentProgress())

    assert verdict.verdict is Outcome.PASS
    assert facts_of(verdict, "checkpoint") == {"steps": [2, 4, 6]}
    assert facts_of(verdict, "resume") == {"from_step": 4, "bitwise": True}
    assert verdict.levels["loss"].compared == 6 + 2


@pytest.mark.parametrize(
    ("fault", "level", "words"),
    [
        ("schedule stepped twice", "learning-rate", "of step 2 of the uninterrupted run is 0.0008"),
        ("NaN", "loss", "the loss of step 5 of the uninterrupted run is nan"),
        ("killed", "run", "the uninterrupted run was ended by SIGKILL"),
        ("disk full", "run", "File too large"),
        ("torn checkpoint", "checkpoint", "the checkpoint of step 4"),
        ("checkpoint repeats", "checkpoint", "of step 4 repeats the tensors of step 2"),
        ("shard of zeros", "checkpoint", "only zeros in model.layers.2.mlp.up_proj.weight"),
        ("keeps all", "checkpoint", "3 checkpoints are kept instead of 2: step 2"),
        (
            "parameter stuck",
            "updates",
            "1 of 38 tensors outside of `frozen` never moved: model.norm.weight",
        ),
        ("no labels", "updates", "the loss of 6 of 6 steps is 0 in all logged digits"),
        ("labels in the first step only", "updates", "the loss of 5 of 6 steps is 0 in all"),
        ("loss of constants", "updates", "the loss of 6 of 6 steps is 2.30259 in all"),
        (
            "model one step old",
            "first-save",
            "although its learning rate is 0.001: saved models are one",
        ),
        ("gradients are zero", "updates", "from step 0 to step 2, no element of any tensor grew"),
        ("gradients are zero after a save", "updates", "from step 2 to step 4, no element of any"),
        ("frozen parameter moves", "updates", "frozen tensors moved: model.embed_tokens.weight"),
        ("moments dropped", "resume", "the loss of step 6 is"),
        ("process left", "leftovers", "outlived the run"),
        ("file left", "leftovers", "lock file: "),
    ],
)
def test_a_planted_fault_fails_by_its_name(
    tmp_path: Path, fault: str, level: str, words: str
) -> None:
    keys = {"keeps all": "keep = 2", "model one step old": 'precision = "float32"'}
    verdict = run(tmp_path, fault, keys=keys.get(fault, ""))

    assert verdict.verdict is Outcome.FAIL
    assert failed_levels(verdict)[0] == level
    assert words in str(verdict.levels[level].reason)


def test_a_model_that_is_written_to_fails(tmp_path: Path) -> None:
    model = tmp_path / "model"  # one of its own: other tests read the recipe's
    with local_folder(resolve_model("micro:llama"), "refuse") as recipe:
        shutil.copytree(recipe, model)

    verdict = run(tmp_path, "model written to", keys=f"model = {json.dumps(str(model))}")

    assert failed_levels(verdict) == ["checkpoint"]
    reason = str(verdict.levels["checkpoint"].reason)
    assert reason == "files in the folder of {model} changed: config.json"


def test_a_resume_that_trains_nothing_is_told_as_such(tmp_path: Path) -> None:
    verdict = run(tmp_path, "frozen after a resume")

    assert failed_levels(verdict) == ["resume"]
    reason = str(verdict.levels["resume"].reason)
    assert (
        reason == "the resumed run changed nothing: its checkpoint of step 6 equals that of step 4"
    )


def test_moments_that_are_dropped_are_told_from_weights_that_are(tmp_path: Path) -> None:
    verdict = run(tmp_path, "moments dropped")

    assert failed_levels(verdict) == ["resume"]
    reason = str(verdict.levels["resume"].reason)
    assert (
        "(the first loss after the resume agrees: the optimizer's state, random numbers, later rows or gradients"
        in reason
    )
    assert "although two uninterrupted runs are equal; the last checkpoints differ by" in reason
    assert verdict.diagnosis == "checkpoint-mismatch"
    assert verdict.location == Location(phase="checkpoint", step=4)
    assert str(verdict.next_steps[0]).startswith("from step 5 on, print the numbers of the rows,")


@pytest.mark.parametrize(
    ("fault", "level", "words"),
    [
        (
            "adapter empty",
            "updates",
            "1 of 1 lora_B are zero: they do not train, or are not saved: ",
        ),
        ("adapter without tensors", "checkpoint", "lacks 2 of 2 tensors of its adapter"),
    ],
)
def test_an_adapter_that_holds_nothing_fails(
    tmp_path: Path, fault: str, level: str, words: str
) -> None:
    verdict = run(tmp_path, fault, keys=ADAPTER, arguments=("--adapter",))

    assert failed_levels(verdict)[0] == level
    assert words in str(verdict.levels[level].reason)


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        ("aborts after training", ["tear-down"]),
        ("aborts after training, moments dropped", ["resume", "tear-down"]),
    ],
)
def test_an_abort_after_the_last_step_hides_no_other_level(
    tmp_path: Path, fault: str, failed: list[str]
) -> None:
    verdict = run(tmp_path, fault, keys='precision = "float32"')

    assert failed_levels(verdict) == failed
    judged = {name for name, level in verdict.levels.items() if level.verdict is not None}
    assert judged == set(LEVELS) - {"equivalent", "sigterm", "memory"}
    reason = str(verdict.levels["tear-down"].reason)
    assert reason.startswith(
        "the uninterrupted run was ended by SIGABRT after step 6 of 6, when training was complete;"
        " its last error is \"terminate called after throwing an instance of 'c10::Error': what(): "
    )


@pytest.mark.long
def test_a_hang_in_tear_down_is_ended_with_its_stack(tmp_path: Path) -> None:
    verdict = run(tmp_path, "hang in tear-down", keys="end_limit_seconds = 3")

    reason = str(verdict.levels["tear-down"].reason)
    assert failed_levels(verdict) == ["tear-down"]
    assert reason.startswith("the uninterrupted run hung in tear-down, after step 6 of 6: over 3 s")
    assert "toy_training.py:" in reason
    assert " in end" in reason


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("dies of SIGTERM", "no checkpoint holds step 1, the last one logged; there is none"),
        ("SIGTERM saved as the end", "the newest checkpoint claims step 6"),
        ("ignores SIGTERM", "training continued to its last step"),
    ],
)
def test_sigterm_without_its_checkpoint_fails(tmp_path: Path, fault: str, words: str) -> None:
    verdict = run(tmp_path, fault, keys=SIGTERM, arguments=("--pause", "0.3"))

    assert failed_levels(verdict) == ["sigterm"]
    assert words in str(verdict.levels["sigterm"].reason)


def test_a_library_that_is_not_deterministic_is_held_to_its_own_spread(tmp_path: Path) -> None:
    verdict = run(tmp_path, "not deterministic")

    assert verdict.verdict is Outcome.PASS
    assert facts_of(verdict, "resume") == {"from_step": 4, "bitwise": False}
    assert verdict.statistic in ("loss-error", "trajectory-error")
    assert verdict.noise_ratio is not None
    assert 0 < verdict.noise_ratio < 5
    assert any("two uninterrupted runs of one seed differ" in note for note in verdict.notes)


@pytest.mark.parametrize("fault", ["", "moments dropped, "])
def test_runs_that_seeds_do_not_decide_are_no_measure_of_a_resumed_one(
    tmp_path: Path, fault: str
) -> None:
    verdict = run(tmp_path, f"{fault}not seeded")

    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "two uninterrupted runs of one seed end" in str(verdict.levels["resume"].reason)
    assert "on {seed} alone?" in str(verdict.levels["resume"].reason)


def test_rounding_in_the_last_digit_is_no_failure(tmp_path: Path) -> None:
    verdict = run(tmp_path, "not deterministic in the last digit")

    assert verdict.verdict is Outcome.PASS


def test_moments_dropped_are_seen_through_the_spread(tmp_path: Path) -> None:
    verdict = run(tmp_path, "moments dropped, not deterministic")

    assert failed_levels(verdict) == ["resume"]
    assert "the difference of two uninterrupted runs of one seed" in str(
        verdict.levels["resume"].reason
    )


@pytest.mark.parametrize(
    ("fault", "change", "words"),
    [
        ("", ("launch = ", "lunch = "), "toy.toml: unknown key 'lunch'; did you mean launch?"),
        ("", ("launch = [", "# ["), "toy.toml: launch: it is missing; expected: the command line"),
        ("", (sys.executable, "tune"), "launch: the program 'tune' was not found: pip install toy"),
        ("", ("steps = 6", "steps = 6\ncards = 2"), "`cards` is 2, but this machine has 0 of `device` 'cpu'"),
        ("", ("steps = 6", "steps = 6\nports = [PORT]"), "port PORT of `ports` is taken"),
        ("", ("0.0006, ", ""), "`learning_rates` has 5 numbers for 6 `steps`"),
        ("", ("model.embed_tokens.*", "model.embed.*"), "toy.toml: frozen: unknown parameter 'model.embed.*'; did you mean model.embed_tokens.weight?"),
        ("not installed", ("", ""), "needs the Python package 'no_such_library', which is absent: pip"),
        ("no losses", ("", ""), "the launch line logs no losses: no line of its output matches"),
        ("every second loss", ("", ""), "a loss is logged every 2 steps, but every step is needed"),
        ("no checkpoints", ("", ""), "checkpoints.folder: nothing matches "),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_one_message_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    change: tuple[str, str],
    words: str,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        toml = write_toml(tmp_path, fault, keys='install = "pip install toy"')
        before, after = change
        text = toml.read_text(encoding="utf-8").replace(before, after.replace("PORT", port), 1)
        toml.write_text(text, encoding="utf-8")
        folder = str(tmp_path / "session")
        command = ["assay", "smoke", "run", f"command:{toml}", "--output", folder]
        monkeypatch.setattr(sys, "argv", command)

        with pytest.raises(SystemExit) as ended:
            main()

    assert ended.value.code == 2
    said = "".join(capsys.readouterr())
    assert said.count(words.replace("PORT", port)) == 1
    assert "not judged: what all runs" not in said
    assert "Traceback" not in said.partition("Its last lines")[0]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_example_passes(tmp_path: Path) -> None:
    verdict = run_external(EXAMPLE, tmp_path, SilentProgress())

    reasons = {name: level.reason for name, level in verdict.levels.items() if level.reason}
    assert reasons == {"memory": "the library trains on the host"}
    assert verdict.verdict is Outcome.PASS
    assert facts_of(verdict, "updates") == {"frozen": 1}
