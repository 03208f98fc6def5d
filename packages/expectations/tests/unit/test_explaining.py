"""Answers for a run over a limit: files, code, rounding, the run itself."""

import sys

import pytest

from assay.verdicts import NextStep, Outcome, Verdict
from assay_expectations.explaining import Answer, explain, first_changed
from assay_expectations.records import (
    AllSeen,
    Distributions,
    Exact,
    Expectation,
    Provenance,
    Reference,
    Seen,
    Settings,
    list_steps,
)
from assay_expectations.verdict import SHIPPED, judge_seen
from packages.expectations.tests.unit.sample_expectations import (
    MACHINE,
    NOISE,
    VERSIONS,
    YARDSTICK,
    distributions,
    expectation,
    observed,
    off,
)

RUN = "acme/bfloat16"
EXACT = distributions(YARDSTICK)
MOVED = distributions([-1.5, -2.5])
NEAR = distributions(off(NOISE / 10))
WRONG = distributions(off(5 * NOISE))
BROKEN = distributions(off(1450 * NOISE))
NEWER = VERSIONS | {"torch": "2.14.0"}

EXPECTATION = expectation().model_copy(
    update={
        "exact_layers": {"a": [2, 1, 1], "a.b (input)": [2, 3, 4], "a.b": [2, 0, 1]},
        "layers": {"a": 0.1, "a.b (input)": 0.1, "a.b": 0.1},
    }
)


def reference(yardstick: Distributions, on_host: Distributions | None) -> Reference:
    return Reference(
        yardstick=yardstick,
        yardstick_dtype="float64",
        exact_layers={"a": [3, 9, 9], "a.b (input)": [2, 3, 4.5], "a.b": [2, 0, 2]},
        layers={"a": 0.1, "a.b (input)": 0.1, "a.b": 0.3},
        on_host=on_host,
    )


def answered(
    run: Distributions,
    of: Reference,
    versions: dict[str, str] = NEWER,
    setup: str | None = None,
    config: tuple[str, ...] = (),
    by: Expectation = EXPECTATION,
) -> tuple[Answer, str, str, str | None]:
    seen = Seen(file="e.json", observed=observed(run), reference=of, config=list(config))
    here = AllSeen(machine=MACHINE, versions=versions, seen=[seen], setup=setup)
    found = explain(by, seen, here, RUN, NextStep("accept", RECAPTURE))
    assert found is not None
    return found.answer, found.sentence, list_steps(*found.next_steps), found.module


RECAPTURE = "assay expect capture micro:llama --run acme/bfloat16 --output e.json --reason TEXT"
BY_OLD = (
    "to find the operation. OLD_PYTHON is the Python of an environment with the unedited packages of the capture; it"
    f" runs the reference, and {sys.executable} the candidate:\n"
    "  OLD_PYTHON -m assay.cli check generate micro:llama"
    f" --reference cpu/float32 --candidate acme/bfloat16 --candidate-python {sys.executable}"
)
CHECK = "assay check generate micro:llama --reference cpu/float32 --candidate acme/bfloat16"


def test_other_exact_outputs_are_changed_code() -> None:
    host = distributions([-1.5 + NOISE, -2.5 - NOISE])
    answer, sentence, advice, module = answered(host, reference(MOVED, host))
    # The input of a.b moves by 0.5 of 5; the result of a has other rows.
    assert (answer, module) == ("code", "a")
    assert sentence == (
        "the model's code changed (torch 2.13.0 → 2.14.0): the exact outputs (float64) move by 0.5, first in"
        " a by 0.1; the run agrees with a reference of this environment"
    )
    assert advice == f"{BY_OLD}\naccept:\n  {RECAPTURE}"


OWN_PROMPTS = EXPECTATION.model_copy(update={"prompts": [[1, 2]]})
OTHER_LENGTHS = EXPECTATION.model_copy(
    update={
        "key": EXPECTATION.key.model_copy(
            update={
                "content": EXPECTATION.key.content.model_copy(
                    update={"settings": Settings(prompt_length="8", seed=3)}
                )
            }
        )
    }
)


@pytest.mark.parametrize(
    ("by", "inputs"),
    [
        (OWN_PROMPTS, "--prompts e.json --max-new-tokens 16"),
        (OTHER_LENGTHS, "--prompt-length 8 --seed 3"),
    ],
)
def test_every_check_runs_the_recorded_inputs(by: Expectation, inputs: str) -> None:
    answers = {}
    for run, of, setup in (
        (MOVED, reference(MOVED, None), None),
        (MOVED, reference(MOVED, distributions(off(9 * NOISE))), None),
        (WRONG, reference(EXACT, None), None),
        (BROKEN, reference(EXACT, None), "k.py:install"),
        (WRONG, reference(EXACT, EXACT), "k.py:install"),
    ):
        answer, sentence, advice, _ = answered(run, of, setup=setup, by=by)
        answers[answer] = sentence
        checks = [line for line in advice.splitlines() if "check generate" in line]
        assert checks
        assert all(inputs in line for line in checks), (sentence, checks)
    assert answers.keys() == {"code", "rounding", "none", "run"}
    unexplained = Seen(file="e.json", observed=observed(WRONG))
    here = AllSeen(machine=MACHINE, versions=NEWER, seen=[unexplained])
    assert inputs in judge_seen(RUN, [by], here)[0].next_steps[0].command


def test_library_edited_in_place_is_named() -> None:
    answer, sentence, advice, _ = answered(MOVED, reference(MOVED, None), versions=VERSIONS)
    assert answer == "code"
    assert sentence.startswith(
        "the model's code changed (no version differs: the installed library was edited): the exact outputs"
    )
    assert advice == f"{BY_OLD}\naccept:\n  {RECAPTURE}"


def judged_within(of: Reference | None, setup: str | None = None, **facts: object) -> Verdict:
    run = observed(distributions(off(1.06 * NOISE)))
    seen = Seen(file="e.json", observed=run, reference=of).model_copy(update=facts)
    here = AllSeen(machine=MACHINE, versions=VERSIONS, seen=[seen], setup=setup)
    return judge_seen(RUN, [EXPECTATION], here)[0]


def bare(yardstick: Distributions) -> Reference:
    return reference(yardstick, None).model_copy(update={"layers": {}})


def test_changed_code_fails_a_run_within_its_limits() -> None:
    verdict = judged_within(bare(NEAR))
    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "module-error")
    assert verdict.location is not None
    assert verdict.location.module == "a"
    assert verdict.headline == "e has other exact outputs than at the capture"
    level = verdict.levels["e"]
    assert level.reason == (
        "the model's code changed (no version differs: the installed library was edited): the exact outputs"
        " (float64) move by 1e-3, first in a by 0.1; the outputs of the run are within the limits: relative error"
        " of the logits 1.06e-2 is 1.06x the error of the captured run (limit 2.0x)"
    )
    assert (level.model_extra or {})["drift"] == {"answer": "code", "module": "a"}
    # bfloat16 hides the change, and the capture's environment has the reference.
    find, accept = verdict.next_steps
    assert accept.purpose == "if the change is intended"
    assert find.command == BY_OLD.splitlines()[-1].strip().replace("acme/bfloat16", "acme/float32")


def test_model_found_around_the_file_is_named() -> None:
    verdict = judged_within(bare(NEAR), model="/home/parent/lla")
    assert "e: micro:llama is not in this folder: /home/parent/lla ran" in verdict.notes
    assert "check generate /home/parent/lla" in verdict.next_steps[0].command
    assert judged_within(bare(NEAR), model="micro:llama").notes == judged_within(bare(NEAR)).notes


def test_changed_settings_fail_a_run_within_its_limits() -> None:
    verdict = judged_within(bare(NEAR), config=[CHANGE])
    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "stale")
    assert str(verdict.levels["e"].reason).startswith(f"{CHANGE}: the exact outputs (float64) move")


@pytest.mark.parametrize("size", [0.0, 5e-10])
def test_exact_outputs_within_rounding_pass(size: float) -> None:
    verdict = judged_within(bare(distributions(off(size))))
    assert verdict.verdict is Outcome.PASS
    assert "drift" not in (verdict.levels["e"].model_extra or {})


def test_run_within_its_limits_shows_changed_code_beside_changed_weights() -> None:
    verdict = judged_within(bare(NEAR), stale=[WEIGHTS], changed_modules=["a"])
    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "stale")
    assert verdict.levels["e"].reason == (
        f"stale, different content: {WEIGHTS}; the outputs on the recorded tokens are within the limits"
    )
    verdict = judged_within(bare(NEAR), stale=["different tokenizer"])
    assert verdict.diagnosis == "module-error"
    assert verdict.headline == (
        "e is stale: its model or its inputs changed; besides, the model's code changed"
    )


def test_exact_comparison_that_was_left_out_is_noted() -> None:
    verdict = judged_within(None, exact_left_out="over 2 billion parameters")
    assert verdict.verdict is Outcome.PASS
    assert verdict.notes == [
        "e: the exact outputs were not compared with the captured ones: over 2 billion parameters"
    ]
    verdict = judged_within(None, setup="p.py:setup", exact_left_out="over 2 billion parameters")
    assert verdict.notes == [
        (
            "e: the exact outputs were not compared with the captured ones, and the setup function did not run in"
            " float64, so bfloat16 may hide its effect: over 2 billion parameters"
        )
    ]


CHANGE = "config.json: rms_norm_eps 1e-06 → 1e-05"
RESTORE = "restore the model's files, then:\n  assay expect verify e.json --run acme/bfloat16\n"
ACCEPT = f"accept:\n  {RECAPTURE}"
FIND = f"{BY_OLD}\n"


def with_restored(yardstick: Distributions) -> Reference:
    layers = {"a": [2, 1, 1], "a.b (input)": [2, 3, 4], "a.b": [2, 0, 2]}
    restored = Exact(yardstick=yardstick, exact_layers=layers)
    return reference(MOVED, None).model_copy(update={"restored": restored})


def test_changed_settings_explain_other_exact_outputs() -> None:
    answer, sentence, advice, _ = answered(MOVED, with_restored(EXACT), config=(CHANGE,))
    assert answer == "files"
    assert sentence.startswith(f"{CHANGE}: the exact outputs (float64) move by 0.5, first in a by")
    assert advice == RESTORE + ACCEPT


@pytest.mark.parametrize(("ratio", "is_told"), [(0.9, False), (2.0, True)])
def test_run_is_less_accurate_only_by_its_own_exact_outputs(ratio: float, is_told: bool) -> None:
    run = distributions([-1.5 + ratio * NOISE, -2.5 - ratio * NOISE])
    _, sentence, _, _ = answered(run, with_restored(EXACT), config=(CHANGE,))
    # The spread of the moved values is 0.5, that of the captured ones 1.
    own = "; besides, by its own exact outputs"
    assert (own in sentence) == is_told
    assert "less accurate" not in sentence


def test_capture_without_a_record_of_its_settings_names_no_code() -> None:
    older = EXPECTATION.model_copy(update={"config": {}})
    seen = Seen(file="e.json", observed=observed(MOVED), reference=reference(MOVED, None))
    here = AllSeen(machine=MACHINE, versions=VERSIONS, seen=[seen])
    verdict, _ = judge_seen(RUN, [older], here)
    assert str(verdict.levels["e"].reason).startswith(
        "undecided: config.json, of which the capture has no record, or the model's code changed: the exact"
        " outputs (float64) move by 0.5, first in a by 0.1; "
    )
    drift = (verdict.levels["e"].model_extra or {})["drift"]
    assert (verdict.diagnosis, drift["answer"]) == (None, "none")


def test_code_that_moves_outputs_with_the_recorded_settings_too_is_named() -> None:
    of = with_restored(distributions([-1.25, -2.75]))
    answer, sentence, advice, module = answered(MOVED, of, config=(CHANGE,))
    assert (answer, module) == ("code", "a.b")
    assert sentence.startswith(
        "the model's code changed (torch 2.13.0 → 2.14.0): with the recorded config.json, the exact outputs (float64)"
        f" move by 0.25, first in a.b by 1.0; besides, {CHANGE}"
    )
    assert advice == RESTORE + FIND + ACCEPT


def test_settings_that_cannot_be_restored_leave_the_code_unknown() -> None:
    answer, sentence, advice, _ = answered(MOVED, reference(MOVED, None), config=(CHANGE,))
    assert answer == "files"
    assert sentence.startswith(f"{CHANGE}: the exact outputs (float64) move by 0.5")
    assert "; whether the model's code changed too is not known" in sentence
    assert advice == RESTORE + FIND + ACCEPT


def test_changed_settings_are_no_error_of_a_module() -> None:
    change = "config.json: rms_norm_eps 1e-06 → 1e-05"
    seen = Seen(
        file="e.json", observed=observed(MOVED), reference=reference(MOVED, None), config=[change]
    )
    here = AllSeen(machine=MACHINE, versions=VERSIONS, seen=[seen])
    verdict, _ = judge_seen(RUN, [EXPECTATION], here)
    assert verdict.diagnosis == "stale"
    assert str(verdict.levels["e"].reason).startswith(change)


def test_model_that_cannot_be_loaded_names_its_changed_settings() -> None:
    changes = ["config.json: num_heads 2 → 3", "generation_config.json: temperature absent → 0.7"]
    seen = Seen(file="e.json", problem="k_proj has the shape [48, 96]", config=changes)
    here = AllSeen(machine=MACHINE, versions=VERSIONS, seen=[seen])
    verdict, _ = judge_seen(RUN, [EXPECTATION], here)
    assert verdict.levels["e"].reason == f"{changes[0]}; k_proj has the shape [48, 96]"
    # A check or a capture that loads the model would only repeat the error.
    assert list_steps(*verdict.next_steps) == RESTORE.strip()
    assert (verdict.verdict, verdict.headline) == (
        Outcome.FAIL, "e cannot be verified: its model cannot be loaded or run",
    )  # fmt: skip


def test_first_module_of_a_file_without_all_values_is_not_sure() -> None:
    newer = {"a (output 2)": [2.0, 1.0, 1.0], **reference(MOVED, None).exact_layers}
    of = reference(MOVED, None).model_copy(update={"exact_layers": newer})
    _, sentence, _, _ = answered(MOVED, of)
    assert (
        ", first in a by 0.1 (an earlier module may be the cause: not all inputs and results were captured)"
    ) in sentence


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        (VERSIONS, "no version changed, so a library or the setup function may be wrong"),
        (NEWER, "changed since then: torch 2.13.0 → 2.14.0"),
    ],
)
def test_model_that_cannot_run_with_its_files_is_not_to_be_restored(
    versions: dict[str, str], why: str
) -> None:
    seen = Seen(file="e.json", problem="the model raised", has_recorded_files=True)
    here = AllSeen(machine=MACHINE, versions=versions, seen=[seen])
    verdict, _ = judge_seen(RUN, [EXPECTATION], here)
    assert list_steps(*verdict.next_steps) == (
        f"the model's files are those of the capture; {why}. verify.log has the traceback. Correct the code, then:\n"
        "  assay expect verify e.json --run acme/bfloat16"
    )


def test_change_of_settings_is_named_once_beside_stale_content_with_its_place() -> None:
    seen = Seen(
        file="e.json", observed=observed(MOVED), reference=with_restored(EXACT),
        stale=["different tokenizer"], config=[CHANGE],
    )  # fmt: skip
    here = AllSeen(machine=MACHINE, versions=VERSIONS, seen=[seen])
    verdict, _ = judge_seen(RUN, [EXPECTATION], here)
    reason = str(verdict.levels["e"].reason)
    assert reason.startswith(f"stale, different content: different tokenizer; {CHANGE}: the exact")
    assert reason.count(CHANGE) == 1
    assert verdict.diagnosis == "stale"
    assert verdict.location is not None
    assert verdict.location.module == "a"


def test_stored_dtype_does_not_explain_other_exact_outputs() -> None:
    change = "config.json: dtype float32 → bfloat16"
    assert answered(MOVED, reference(MOVED, None), config=(change,))[0] == "code"


def test_fault_beside_changed_code_is_looked_for_here() -> None:
    host = distributions([-1.5 + NOISE, -2.5 - NOISE])
    answer, sentence, advice, _ = answered(WRONG, reference(MOVED, host))
    assert answer == "code"
    assert sentence.endswith("; besides, the run fails against a reference of this environment")
    assert advice == f"to find the operation:\n  {CHECK}"


def test_same_exact_outputs_and_agreement_with_the_host_are_rounding() -> None:
    answer, sentence, advice, module = answered(WRONG, reference(EXACT, WRONG))
    assert (answer, module) == ("rounding", "a.b")
    assert sentence == (
        "the run is less accurate than the captured one, first in a.b: the exact outputs are those of the"
        " capture, and the run agrees with a reference here; another rounding (torch 2.13.0 → 2.14.0) explains"
        " an error of up to 3 limits, and so does a small fault of a library"
    )
    assert advice == f"{BY_OLD}\naccept:\n  {RECAPTURE}"


def test_host_that_judges_itself_is_sent_to_the_old_environment() -> None:
    answer, _, advice, _ = answered(WRONG, reference(EXACT, None))
    assert answer == "rounding"
    assert advice == f"{BY_OLD}\naccept:\n  {RECAPTURE}"


def test_run_that_disagrees_with_the_host_is_wrong_itself() -> None:
    host = distributions(off(NOISE))
    answer, sentence, advice, _ = answered(WRONG, reference(EXACT, host), setup="k.py:install")
    assert answer == "run"
    assert sentence == (
        "the run itself is wrong, first in a.b: the exact outputs are those of the capture, and the run"
        " disagrees with the host without the setup function"
    )
    assert advice == f"to find the operation:\n  {CHECK} --candidate-setup k.py:install"


@pytest.mark.parametrize(
    ("run", "host", "versions", "why"),
    [
        # The host shares an edited library, or the run is the host.
        (WRONG, WRONG, VERSIONS, "no version differs"),
        (WRONG, None, VERSIONS, "no version differs"),
        (
            BROKEN, BROKEN, NEWER,
            "the error is larger than another rounding explains (torch 2.13.0 → 2.14.0)",
        ),
    ],
)  # fmt: skip
def test_advice_on_an_undecided_run_leads_to_no_pass(
    run: Distributions, host: Distributions | None, versions: dict[str, str], why: str
) -> None:
    answer, sentence, advice, module = answered(run, reference(EXACT, host), versions=versions)
    assert (answer, module) == ("none", "a.b")
    assert sentence == (
        "undecided: the run is less accurate than the captured one, first in a.b, but the exact outputs are"
        f" those of the capture, and {why}. A library may have been edited, which a check here cannot see"
    )
    # Neither a recapture nor a check whose reference has the same fault.
    assert advice == BY_OLD


@pytest.mark.parametrize(("change", "expected"), [(1e-10, None), (1e-8, "a"), (float("nan"), "a")])
def test_exact_values_may_differ_by_the_order_of_sums(change: float, expected: str | None) -> None:
    found = first_changed({"a": [1, 1, 0]}, {"a": [1, 1 + change, 0]}, 1e-9)
    assert found[0] == expected


def failing(file: str, expected: Expectation = EXPECTATION) -> Verdict:
    seen = Seen(file=file, observed=observed(WRONG), reference=reference(EXACT, WRONG))
    healthy = Seen(file="h.json", observed=observed(distributions(off(NOISE))))
    here = AllSeen(machine=MACHINE, versions=NEWER, seen=[healthy, seen])
    verdict, _ = judge_seen(RUN, [expected, expected], here)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.noise_ratio == pytest.approx(5)
    assert verdict.location is not None
    assert (verdict.diagnosis, verdict.location.module) == ("module-error", "a.b")
    return verdict


def test_verdict_names_the_failed_file_and_its_place() -> None:
    verdict = failing("e.json")
    assert verdict.headline == "e differs from the captured outputs"
    assert verdict.notes == ["h, e: changed since the capture: torch 2.13.0 → 2.14.0"]
    assert verdict.next_steps == [
        NextStep(*BY_OLD.split(":\n  ")),
        NextStep("if the change is intended", RECAPTURE),
    ]


def test_shipped_file_is_not_to_be_replaced() -> None:
    assert failing(str(SHIPPED / "e.json")).next_steps[-1] == NextStep(
        "if the change is intended (the shipped file belongs to assay: your own goes to expectations/)",
        "assay expect capture micro:llama --run acme/bfloat16 --output expectations --reason TEXT",
    )


def test_absent_model_is_no_failure() -> None:
    absent = Seen(file="e.json", missing="there is no folder m")
    healthy = Seen(file="h.json", observed=observed(distributions(off(NOISE))))
    here = AllSeen(machine=MACHINE, versions=VERSIONS, seen=[healthy, absent])
    verdict, _ = judge_seen(RUN, [EXPECTATION, EXPECTATION], here)
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.headline == "e was not compared"
    assert verdict.levels["e"].reason == "there is no folder m"
    other = NextStep(
        "or name the folder that holds the model now",
        "assay expect verify e.json --run acme/bfloat16 --model FOLDER",
    )
    again = "assay expect verify e.json --run acme/bfloat16"
    assert verdict.next_steps == [NextStep("restore the model's files, then", again), other]

    pointer = absent.model_copy(update={"missing": "x is a pointer of Git LFS: git lfs pull"})
    here = here.model_copy(update={"seen": [healthy, pointer]})
    verdict, _ = judge_seen(RUN, [EXPECTATION, EXPECTATION], here)
    assert verdict.next_steps == [NextStep("fetch the file, then", "git lfs pull"), other]


def test_a_key_that_made_the_file_stale_is_named_once() -> None:
    change = "config.json: sliding_window 24 → 1040"
    lengths = f"long prompt 1,040 → 1,056 tokens, because of {change}"
    seen = Seen(file="e.json", stale=[lengths], config=[change])
    verdict, _ = judge_seen(
        RUN, [EXPECTATION], AllSeen(machine=MACHINE, versions=VERSIONS, seen=[seen])
    )
    assert verdict.levels["e"].reason == f"stale, different content: {lengths}"


def test_settings_that_change_no_output_are_noted() -> None:
    change = "generation_config.json: temperature absent → 0.7"
    seen = Seen(file="e.json", observed=observed(distributions(off(NOISE))), config=[change])
    here = AllSeen(machine=MACHINE, versions=VERSIONS, seen=[seen])
    verdict, _ = judge_seen(RUN, [EXPECTATION], here)
    assert verdict.verdict is Outcome.PASS
    assert verdict.notes == [f"e: changed since the capture: {change}"]
    assert (verdict.levels["e"].model_extra or {})["since_capture"] == [change]


def test_stale_weights_state_the_size_of_the_change() -> None:
    weights = "weights with different values (1 of 1): a.weight"
    seen = Seen(file="e.json", observed=observed(WRONG), stale=[weights])
    here = AllSeen(machine=MACHINE, versions=VERSIONS, seen=[seen])
    verdict, _ = judge_seen(RUN, [EXPECTATION], here)
    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "stale")
    reason = str(verdict.levels["e"].reason)
    assert reason.startswith(f"stale, different content: {weights}; ")
    assert reason.endswith(" is 5.0x the error of the captured run (limit 2.0x)")


WEIGHTS = "weights with different values (1 of 1): a.weight"


def stale(
    of: Reference,
    changed_modules: tuple[str, ...] = (),
    setup: str | None = None,
    why: str = WEIGHTS,
) -> Verdict:
    seen = Seen(
        file="e.json", observed=observed(BROKEN), reference=of, stale=[why],
        changed_modules=list(changed_modules),
    )  # fmt: skip
    here = AllSeen(machine=MACHINE, versions=NEWER, seen=[seen], setup=setup)
    return judge_seen(RUN, [EXPECTATION], here)[0]


def moved_before_b() -> Reference:
    layers = {"a": [2, 1, 1.5], "a.b (input)": [2, 3, 4], "a.b": [2, 0, 2]}
    return reference(MOVED, None).model_copy(update={"exact_layers": layers})


def test_changed_code_shows_beside_changed_weights_that_it_precedes() -> None:
    verdict = stale(moved_before_b(), ("a.b",))
    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "module-error")
    assert verdict.location is not None
    assert verdict.location.module == "a"
    assert verdict.headline == (
        "e is stale: its model or its inputs changed; besides, the model's code changed"
    )
    # Of 1 and 1, one moves by 0.5.
    assert str(verdict.levels["e"].reason).startswith(
        f"stale, different content: {WEIGHTS}; the model's code changed (torch 2.13.0 → 2.14.0): values that no"
        " changed weight reaches move, first in a by 0.354; "
    )
    assert [step.purpose for step in verdict.next_steps] == [
        "restore the model's files, then", BY_OLD.partition(":\n")[0], "if the change is intended",
    ]  # fmt: skip


@pytest.mark.parametrize("changed", ["a", "gone"])
def test_what_changed_weights_may_move_shows_no_code(changed: str) -> None:
    verdict = stale(moved_before_b(), (changed,))
    assert (verdict.diagnosis, verdict.location) == ("stale", None)
    assert verdict.headline == "e is stale: its model or its inputs changed"
    unknown = "; whether the model's code changed too is not known with other weights; "
    assert unknown in str(verdict.levels["e"].reason)


def test_wrong_run_shows_beside_changed_weights() -> None:
    verdict = stale(reference(MOVED, MOVED), ("a",), setup="k.py:install")
    assert (verdict.diagnosis, getattr(verdict.location, "module", None)) == ("module-error", "a.b")
    wrong = "the run itself is wrong, first in a.b: it disagrees with the host without the setup function"
    assert f"{WEIGHTS}; {wrong}; whether" in str(verdict.levels["e"].reason)
    assert [step.purpose for step in verdict.next_steps] == [
        "restore the model's files, then", "to find the operation",
    ]  # fmt: skip


def test_other_tokenizer_hides_no_changed_code() -> None:
    verdict = stale(moved_before_b(), why="different tokenizer")
    assert verdict.diagnosis == "module-error"
    assert "different tokenizer; the model's code changed (torch" in str(verdict.levels["e"].reason)


def test_provenance_of_older_files_has_a_float64_yardstick() -> None:
    record = expectation().provenance.model_dump(exclude={"yardstick_dtype"})
    assert Provenance.model_validate(record).yardstick_dtype == "float64"
