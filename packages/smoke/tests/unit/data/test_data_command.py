"""The verdict from reports, and its output."""

from pathlib import Path
from typing import Any

import pytest

from assay.errors import UsageError
from assay.judge.explain import explain_verdict, find_deciding_rows
from assay.models.sources import local_folder, resolve_model
from assay.plugins import load_object
from assay.verdicts import Outcome
from assay_smoke.data.chats import NO_PROMPT, check_chat
from assay_smoke.data.collating import (
    ISOLATED,
    LABELS,
    PACKED_POSITIONS,
    UNCHANGED,
    check_packing,
    check_padding,
)
from assay_smoke.data.planned_checks import (
    ONE_BOS,
    open_tokenizer,
    padding_tokenizers,
    plan_checks,
    render_by_template,
)
from assay_smoke.data.sampling import (
    ITEM,
    NEW_IN_EPOCHS,
    NEW_IN_WORKERS,
    NEW_ORDER,
    PROPERTIES,
    RESUMED,
    SAMPLER_PLANS,
    SEEDED,
    _Draw,
    _find_equal,
    check_loader,
    check_sampling,
)
from assay_smoke.data.tokens import micro_tokenizer
from assay_smoke.data.verdict import (
    BrokenProperty,
    DataAnswer,
    DataLevel,
    DataRequest,
    Fault,
    RaisedError,
    Subject,
    SubjectReport,
    judge_data,
)

PLANTS = Path(__file__).parents[2] / "data_plants"

RIGHT = SubjectReport(subject="mine.py:good", cases={"one": 3, "other": 2}, notes=["a note"])
WRONG = SubjectReport(
    subject="mine.py:bad",
    cases={"one": 3},
    findings=[
        BrokenProperty(
            name="one", reason="it is lost", example=["sample 0", "> 1"], failed=2, cases=3
        )
    ],
)
UNTRIED = SubjectReport(subject="mine.py:half", cases={"one": 3, "other": 0})
NOTHING = SubjectReport(subject="library 1.0", cases={})


def judged(*reports: SubjectReport, level: DataLevel = "sampler") -> Any:
    answer = DataAnswer(
        reports=[(level, report) for report in reports],
        left_out={"chat": "no chat template: give --render"},
    )
    return judge_data(DataRequest(own_code={"sampler": "mine.py:good"}), answer)


def test_all_properties_hold() -> None:
    verdict = judged(RIGHT)
    assert verdict.verdict is Outcome.PASS
    assert (verdict.compared, verdict.diagnosis) == (5, None)
    words = explain_verdict(verdict, find_deciding_rows(verdict, []))
    assert (words.title, words.headline) == ("PASS: mine.py:good", "All tried properties hold.")
    assert verdict.levels["sampler"].compared == 5
    assert verdict.levels["chat"].verdict is None
    assert verdict.levels["chat"].reason == "no chat template: give --render"
    assert verdict.notes == ["mine.py:good: a note"]


def test_one_finding_fails_its_level_and_the_verdict() -> None:
    verdict = judged(RIGHT, WRONG, UNTRIED)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.levels["sampler"].reason == "mine.py:bad: it is lost"
    assert verdict.diagnosis is None  # an order of samples has none


def test_rows_of_ids_are_no_example_of_wrong_positions() -> None:
    collator: Any = load_object(f"{PLANTS / 'collators.py'}:packed_without_positions")
    report = check_packing(Subject("it"), collator, padding_tokenizers()[:1], packs=[(3, 3)])
    examples = {one.name: one.example for one in report.findings}
    assert len(examples[PACKED_POSITIONS]) == len(examples[ISOLATED]) == 1


def test_the_title_of_a_failure_names_only_code_that_failed() -> None:
    request = DataRequest(own_code={"sampler": RIGHT.subject, "collator": WRONG.subject})
    answer = DataAnswer(reports=[("sampler", RIGHT), ("collator", WRONG)])
    verdict = judge_data(request, answer)
    words = explain_verdict(verdict, find_deciding_rows(verdict, []))
    assert words.title == "FAIL: mine.py:bad"


@pytest.mark.parametrize(
    ("subject", "diagnosis"),
    [("accumulation", "loss-scale"), ("workers", None), ("collator", None)],
)
def test_only_a_fitting_diagnosis_is_given(subject: Any, diagnosis: str | None) -> None:
    assert judged(WRONG, level=subject).diagnosis == diagnosis


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (UNTRIED, "mine.py:half: never tried: other"),
        (NOTHING, "library 1.0: tried no case"),
        (
            NOTHING.model_copy(update={"problem": "library 1.0 raised KeyError"}),
            "library 1.0 raised KeyError",
        ),
    ],
)
def test_what_was_promised_and_not_tried_is_no_pass(report: SubjectReport, reason: str) -> None:
    verdict = judged(RIGHT, report)
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.levels["sampler"].reason == reason


def test_a_shift_of_labels_to_the_right_is_named_by_a_sample_that_shows_it() -> None:
    collator: Any = load_object(f"{PLANTS / 'collators.py'}:shifted_to_the_right")
    (finding,) = [
        one
        for one in check_padding(
            Subject("it"), collator, padding_tokenizers(), batches=[(4,)]
        ).findings
        if one.name == LABELS
    ]
    assert finding.reason == "labels are shifted by one position to the right"


def test_a_resume_with_too_many_epochs_shows_those_that_were_drawn() -> None:
    run: Any = load_object(f"{PLANTS / 'samplers.py'}:epoch_not_restored")
    (finding,) = check_sampling(Subject("it"), run, SAMPLER_PLANS[:1]).findings
    assert [line.partition(":")[0] for line in finding.example[1:]] == ["resumed"] * 2
    assert "resumed: no batch" not in finding.example


def test_no_check_at_all_is_no_pass() -> None:
    assert judged().verdict is Outcome.NOT_COMPARED


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (DataRequest(truncation="drop"), r"^--truncation declares what --render or MODEL's"),
        (DataRequest(features="plain"), r"^--features are samples for --collator or --packing"),
        (DataRequest(own_code={"sampler": "nowhere.py:run"}), r"^nowhere.py:run: there is no file"),
        (DataRequest(own_code={"sampler": "run"}), r"^'run' is not of the form FILE.py:NAME"),
    ],
)
def test_options_without_a_meaning_are_refused(request_: DataRequest, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        request_.require_meaning()


def test_without_options_every_installed_library_is_checked() -> None:
    levels = {check.level for check in plan_checks(DataRequest(), DataAnswer())}
    assert levels == {
        "chat", "labels", "collator", "packing", "accumulation", "workers",
    }  # fmt: skip


def test_what_is_given_is_all_that_is_checked() -> None:
    request = DataRequest(own_code={"sampler": f"{PLANTS / 'samplers.py'}:right"})
    assert [check.level for check in plan_checks(request, DataAnswer())] == ["sampler"]


def test_a_property_breaks_by_its_first_fault_and_counts_every_case() -> None:
    report = SubjectReport.promising("it", ("one", "other"))
    report.judge(("one", "other"), [])
    report.judge(("one", "other"), [Fault("one", "first", ("row 0",)), Fault("one", "second")])
    report.judge(["one"], [Fault("one", "third")])
    assert report.cases == {"one": 3, "other": 2}
    assert [finding.model_dump() for finding in report.findings] == [
        {"name": "one", "reason": "first", "example": ["row 0"], "failed": 2, "cases": 3}
    ]


def test_a_fault_of_a_property_that_is_not_judged_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"not judged: \{'other'\}"):
        SubjectReport.promising("it", ("one", "other")).judge(["one"], [Fault("other", "lost")])


def tokenizer_folder(path: Path, template: str | None) -> str:
    tokenizer = micro_tokenizer(bos="both")
    tokenizer.chat_template = template if template is not None else tokenizer.chat_template
    tokenizer.save_pretrained(path)
    return str(path)


def test_a_folder_with_a_tokenizer_alone_is_a_model(tmp_path: Path) -> None:
    opened = open_tokenizer(tokenizer_folder(tmp_path, None), "refuse")
    assert opened.report is not None
    assert opened.report.cases == {ONE_BOS: 1}
    assert opened.report.findings == []
    assert "tokenize its text with add_special_tokens=False" in " ".join(opened.report.notes)
    checks = plan_checks(DataRequest(model=str(tmp_path)), DataAnswer())
    assert [check.level for check in checks] == ["chat", "chat", "labels"]


def test_eos_of_the_generation_config_says_where_a_model_stops(tmp_path: Path) -> None:
    with local_folder(resolve_model("micro:llama"), "refuse") as folder:
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tokenizer_folder(tmp_path, None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    opened = open_tokenizer(str(tmp_path), "refuse")
    assert opened.eos_token_ids == (257, 258)


@pytest.mark.parametrize(
    ("template", "left_out"),
    [
        ("", {"chat", "labels"}),
        ("{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}", {"labels"}),
    ],
)
def test_a_tokenizer_without_template_or_marks_leaves_levels_out(
    tmp_path: Path, template: str, left_out: set[str]
) -> None:
    answer = DataAnswer()
    plan_checks(DataRequest(model=tokenizer_folder(tmp_path, template)), answer)
    assert answer.left_out.keys() == left_out
    assert all(reason.endswith("give --render") for reason in answer.left_out.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("endless", r"^it returned an epoch of more than \d+ batches for 12 samples"),
        (
            "one_epoch",
            r"^it returned 1 epochs of 3 for 12 samples.*; it must return an iterable of",
        ),
        ("one_epoch_too_many", r"^it returned more than 3 epochs of 3 for 12 samples"),
        ("raises", r"^it raised IndexError: (.|\n)*  for 12 samples, batches of 1, 1 rank"),
    ],
)
def test_code_that_gives_no_epochs_is_refused(name: str, message: str) -> None:
    run: Any = load_object(f"{PLANTS / 'samplers.py'}:{name}")
    with pytest.raises(RaisedError, match=message):
        check_sampling(Subject("it"), run)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            list,
            r"c.py:pad raised TypeError: .* is not iterable(.|\n)*  for a tokenizer that pads .*\n  {}",
        ),
        (
            str,
            "c.py:pad returned a str; it must return a collator: it is called with the tokenizer",
        ),
    ],
)
def test_a_collator_in_place_of_its_maker_is_explained(given: Any, message: str) -> None:
    hint = "c.py:pad is called with the tokenizer and returns the collator$"
    with pytest.raises(RaisedError, match=message.format(hint)):
        check_padding(Subject("c.py:pad"), given, padding_tokenizers())


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (None, "None"),
        ([0, 1, 2], "0 as an epoch"),  # batches of one sample, flattened
        ([[0, 1, 2]], "0 as a batch"),  # batches instead of epochs
    ],
)
def test_a_result_of_another_form_is_not_blamed_on_the_code(run: Any, words: str) -> None:
    with pytest.raises(RaisedError) as raised:
        check_sampling(Subject("it"), lambda *_: run)
    assert str(raised.value) == (
        f"it returned {words}; it must return an iterable of epochs, each an iterable of batches of"
        " sample numbers"
    )


def test_a_loader_that_is_none_is_not_blamed_on_the_code() -> None:
    with pytest.raises(RaisedError, match=r"^it returned None; it must return a DataLoader$"):
        check_loader(Subject("it"), lambda *_: None)  # type: ignore[arg-type]  # the mistake


@pytest.mark.parametrize("rows", [[[1], [1, 2]], "text"])
def test_a_batch_that_cannot_become_tensors_is_not_blamed_on_the_collator(rows: Any) -> None:
    with pytest.raises(RaisedError, match=r"^it returned a batch that cannot become tensors \("):
        check_padding(Subject("it"), lambda _: lambda _: {"input_ids": rows}, padding_tokenizers())


def test_a_collator_that_reads_labels_of_plain_samples_is_explained() -> None:
    def read_labels(_: Any) -> Any:
        return lambda features: [feature["labels"] for feature in features]

    with pytest.raises(
        RaisedError,
        match=r"KeyError: 'labels'(.|\n)*\n  a sample is a dictionary of lists: input_ids, attention_mask;"
        " plain samples have no labels$",
    ):
        check_padding(Subject("it"), read_labels, padding_tokenizers(), "plain")


@pytest.mark.parametrize(("padding", "is_noted"), [("own", True), ("eos", False)])
def test_padding_with_eos_that_was_not_tried_is_noted(padding: Any, *, is_noted: bool) -> None:
    collator = load_object(f"{PLANTS / 'collators.py'}:pad_id_masked")
    note = "padding with EOS was not tried: this tokenizer has its own pad token"
    report = check_padding(Subject("it"), collator, [micro_tokenizer(padding)])
    assert (note in report.notes) == is_noted


def test_plans_that_are_declined_are_no_failure_and_noted() -> None:
    run: Any = load_object(f"{PLANTS / 'samplers.py'}:in_order_only")
    plans = [plan for plan in SAMPLER_PLANS if plan.num_samples == 12]
    report = check_sampling(Subject("it"), run, plans)
    assert report.findings == []
    assert set(report.cases) == set(PROPERTIES) - {NEW_ORDER, SEEDED}
    assert f"not tried because all plans for it are declined: {NEW_ORDER}" in report.notes
    (declined,) = [note for note in report.notes if note.startswith("declines")]
    assert declined == (
        "declines 4 cases, such as 12 samples, batches of 1, 1 rank, shuffled, seed 0 (never shuffled)"
    )


def test_a_sampler_with_a_fixed_seed_declines_other_seeds() -> None:
    run: Any = load_object(f"{PLANTS / 'samplers.py'}:one_seed_only")
    report = check_sampling(Subject("it"), run, SAMPLER_PLANS[:2])
    assert report.findings == []
    assert set(report.cases) == set(PROPERTIES) - {SEEDED}


@pytest.mark.parametrize(
    ("check", "plant", "words"),
    [
        (
            check_padding,
            "padded_in_place",
            "has 3 values instead of 2. In a later batch, rows have 3 positions instead of 2",
        ),
        (
            check_padding,
            "labels_taken_out",
            "sample 0 loses labels. In a later batch, it raised KeyError: 'labels'",
        ),
        (
            check_packing,
            "packed_in_place",
            "input_ids of sample 0 has 5 values instead of 2. In a later batch, token 0",
        ),
    ],
)
def test_a_collator_that_changes_its_samples_fails_by_what_a_later_batch_gets(
    check: Any, plant: str, words: str
) -> None:
    collator: Any = load_object(f"{PLANTS / 'collators.py'}:{plant}")
    report = check(Subject("it"), collator, [micro_tokenizer()], "masked", [(2, 3)])
    (finding,) = report.findings
    assert finding.name == UNCHANGED
    assert finding.reason.startswith("the collator changes its samples: ")
    assert words in finding.reason
    assert finding.failed == finding.cases


def test_a_change_of_samples_without_an_effect_is_noted() -> None:
    right: Any = load_object(f"{PLANTS / 'collators.py'}:right_padded")

    def make(tokenizer: Any) -> Any:
        def collate(features: Any) -> Any:
            for feature in features:
                feature["length"] = len(feature["input_ids"])
            return right(tokenizer)(features)

        return collate

    report = check_padding(Subject("it"), make, [micro_tokenizer()], batches=[(2, 3)])
    assert report.findings == []
    assert "the collator changes its samples: sample 0 gets length" in report.notes


def test_a_sampler_that_cannot_resume_is_judged_without() -> None:
    run: Any = load_object(f"{PLANTS / 'samplers.py'}:in_order_only")

    def never_resumed(plan: Any, resumed: Any) -> Any:
        if resumed:
            raise NotImplementedError
        return run(plan, resumed)

    plans = [plan for plan in SAMPLER_PLANS if not plan.shuffle and plan.num_samples == 12]
    report = check_sampling(Subject("it"), never_resumed, plans)
    assert set(report.cases) == set(PROPERTIES) - {NEW_ORDER, SEEDED, RESUMED}
    assert report.notes[0].startswith("declines 18 cases, such as 12 samples")


def test_a_library_that_is_absent_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay_smoke.data.planned_checks.find_spec", lambda _: None)
    answer = DataAnswer()
    names = " ".join(check.subject for check in plan_checks(DataRequest(), answer))
    assert "trl" not in names
    assert answer.notes == ["trl is not installed: its collator is not checked"]


def test_a_micro_model_has_nothing_to_check() -> None:
    with pytest.raises(UsageError, match=r"^micro:llama has no tokenizer: name a folder with one"):
        plan_checks(DataRequest(model="micro:llama"), DataAnswer())


def test_a_wrong_name_is_reported_before_a_model_is_loaded(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("globals()['right'] = print\n")  # only running it shows its names
    request = DataRequest(model="micro:llama", own_code={"collator": f"{code}:wrong"})
    with pytest.raises(UsageError, match="wrong is not a function or class of"):
        plan_checks(request, DataAnswer())


def test_a_template_that_reads_parts_gets_parts() -> None:
    tokenizer = micro_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}: {% for part in m['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|eos|>{% endfor %}"
    )
    report = check_chat(Subject("parts"), render_by_template, [tokenizer])
    assert report.findings == []
    assert report.untried == []


@pytest.mark.parametrize(
    ("before", "after", "is_found"),
    [
        ("{%- if add_generation_prompt -%}", "{%- if true -%}", True),
        (
            "<|im_start|>assistant\n",
            "<|im_start|>",
            False,
        ),  # a prompt without a role is not in chats
        ("{%- if add_generation_prompt -%}", "<|eos|>{%- if add_generation_prompt -%}", False),
    ],
)
def test_a_template_that_always_appends_the_prompt_for_generation_is_found(
    before: str, after: str, *, is_found: bool
) -> None:
    tokenizer = micro_tokenizer()
    tokenizer.chat_template = str(tokenizer.chat_template).replace(before, after)
    report = check_chat(Subject("it"), render_by_template, [tokenizer])
    found = [(one.name, one.failed) for one in report.findings]
    assert found == ([(NO_PROMPT, report.cases[NO_PROMPT])] if is_found else [])
    if is_found:
        assert report.findings[0].reason == (
            "the text of a training chat ends with 'assistant', which begins an assistant's turn: render it"
            " with add_generation_prompt=False, and let the template obey that"
        )


@pytest.mark.parametrize(
    ("name", "epoch", "worker", "item", "fault"),
    [
        ("torch", 0, 1, 3, (NEW_IN_WORKERS, "workers 0 and 1 draw the same from torch")),
        ("torch", 1, 0, 3, (NEW_IN_EPOCHS, "epoch 1 draws from torch what epoch 0 drew")),
        (ITEM, 0, 1, 3, (NEW_IN_WORKERS, "items 2 and 3, of workers 0 and 1, are equal")),
        (ITEM, 1, 0, 2, (NEW_IN_EPOCHS, "item 2 is the same in epochs 0 and 1")),
        (ITEM, 1, 0, 3, None),  # another item may be equal in another epoch
        ("torch", 0, 0, 3, None),
    ],
)
def test_equal_draws_are_named_by_what_repeats(
    name: str, epoch: int, worker: int, item: int, fault: tuple[dict[str, str], str] | None
) -> None:
    draws = [_Draw(0, 0, 2, {name: 5}), _Draw(epoch, worker, item, {name: 5})]
    found = [(one.name, one.reason) for one in _find_equal(draws)]
    assert found == ([(fault[0][name], fault[1])] if fault else [])
