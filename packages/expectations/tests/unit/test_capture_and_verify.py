"""Captures that must agree, and the verification of files."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from assay.errors import MachineError, UsageError
from assay.files import DiskError
from assay.report.run_report import read_report
from assay.runs import RunFolder, SilentProgress
from assay.verdicts import Outcome
from assay_expectations import capture_and_verify
from assay_expectations.capture_and_verify import (
    capture_expectation,
    diff_expectations,
    find_files,
    read_side,
    verify_expectations,
    with_settings_of_earlier,
)
from assay_expectations.judging import LIMITS, limits_origin
from assay_expectations.records import (
    AllSeen,
    Captured,
    CaptureOptions,
    Distributions,
    Seen,
    Signature,
    VerifyRequest,
    list_steps,
    read_expectation,
    write_expectation,
)
from assay_expectations.verdict import SHIPPED
from packages.expectations.tests.unit.sample_expectations import (
    CONTENT,
    MACHINE,
    NOISE,
    PROVENANCE,
    VERSIONS,
    distributions,
    expectation,
    observed,
    off,
)

OPTIONS = CaptureOptions(
    model="micro:llama", run="cpu/bfloat16", approved_by="Ada", reason="first of all"
)


def answer(
    monkeypatch: pytest.MonkeyPatch,
    signature: Signature,
    *errors: float,
    options: CaptureOptions = OPTIONS,
    on_host: Distributions | None = None,
    **captured: object,
) -> None:
    """Fake the processes: the first captures `signature`, later ones have `errors`. captured: other fields of it."""
    approval = {"approved_by": options.approved_by, "reason": options.reason}
    origin = PROVENANCE.model_copy(update=approval)
    update = {"signature": signature, "provenance": origin} | captured
    first = Captured(expectation=expectation().model_copy(update=update), on_host=on_host)
    answers: list[Captured | AllSeen] = [first]
    for error in errors:
        seen = Seen(file="x", observed=observed(distributions(off(error))))
        answers.append(AllSeen(machine=MACHINE, versions=VERSIONS, seen=[seen]))

    def call(_work: object, request: object, **_: object) -> list[Captured | AllSeen]:
        assert isinstance(request, CaptureOptions) == (len(answers) == 1 + len(errors))
        return [answers.pop(0)]

    monkeypatch.setattr(capture_and_verify, "call", call)


def test_limits_scale_with_the_spread_of_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, expectation().signature, NOISE, 1.5 * NOISE)
    path = capture_expectation(OPTIONS, tmp_path, SilentProgress())

    written = read_expectation(path)
    assert [one["logits-error"] for one in written.captures] == pytest.approx([1.0, 1.0, 1.5])
    # 1.5 times 2, 3 and 2.
    assert written.limits == pytest.approx(
        {"logits-error": 3.0, "logits-worst": 4.5, "logits-whole": 3.0}
    )
    assert (written.provenance.approved_by, written.provenance.reason) == ("Ada", "first of all")
    assert written.key.content == CONTENT


def test_unwritable_output_is_refused_before_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*_: object, **__: object) -> None:
        pytest.fail("a capture was started")

    monkeypatch.setattr(capture_and_verify, "call", call)
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=r"cannot write .*file/below"):
        capture_expectation(OPTIONS, tmp_path / "file" / "below", SilentProgress())


def test_captures_without_agreement_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, expectation().signature, NOISE, 4 * NOISE)
    with pytest.raises(MachineError) as raised:
        capture_expectation(OPTIONS, tmp_path, SilentProgress())
    assert str(raised.value) == (
        "captures 1 and 3 do not agree: relative error of the logits 4e-2 is 4.0x the error of capture 1"
        " (limit 2.0x)."
        " Nothing was written"
    )
    assert not list(tmp_path.iterdir())


def test_device_with_a_larger_error_than_the_host_is_not_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CaptureOptions(model="micro:llama", run="acme/bfloat16", num_captures=1)
    wrong = expectation(noise=5 * NOISE).signature
    answer(monkeypatch, wrong, on_host=distributions(off(NOISE)))
    with pytest.raises(UsageError) as raised:
        capture_expectation(options, tmp_path, SilentProgress())
    assert str(raised.value).startswith(
        "acme/bfloat16 cannot be trusted: relative error of the logits 5e-2 is 5.0x the error of"
        " cpu/bfloat16 (limit 2.0x)."
    )

    answer(monkeypatch, expectation().signature, on_host=distributions(off(NOISE)))
    assert capture_expectation(options, tmp_path, SilentProgress()).is_file()


def test_recapture_that_hides_a_break_needs_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CaptureOptions(model="micro:llama", run="cpu/bfloat16", num_captures=1)
    answer(monkeypatch, expectation(noise=NOISE).signature)
    path = capture_expectation(options, tmp_path, SilentProgress())
    before = path.read_bytes()

    answer(monkeypatch, expectation(noise=5 * NOISE).signature)
    with pytest.raises(UsageError) as raised:
        capture_expectation(options, tmp_path, SilentProgress())
    assert str(raised.value) == (
        f"{path} exists, and the new capture differs from it: the run is less accurate: the exact outputs"
        " are the same; over a limit: relative error of the logits 5e-2 is 5.0x the error of the older"
        " capture (limit 2.0x). Nothing was written. If the change is intended, add --reason TEXT"
    )
    assert path.read_bytes() == before

    meant = CaptureOptions(
        model="micro:llama", run="cpu/bfloat16", num_captures=1, reason="new kernels"
    )
    answer(monkeypatch, expectation(noise=5 * NOISE).signature, options=meant)
    assert read_expectation(
        capture_expectation(meant, tmp_path, SilentProgress())
    ).provenance.reason


def test_recapture_whose_exact_outputs_moved_needs_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CaptureOptions(model="micro:llama", run="cpu/bfloat16", num_captures=1)
    answer(monkeypatch, expectation().signature)
    path = capture_expectation(options, tmp_path, SilentProgress())
    before = path.read_bytes()
    moved = expectation().signature.model_copy(update={"yardstick": distributions(off(1e-3))})
    answer(monkeypatch, moved)
    with pytest.raises(UsageError, match=r"the exact outputs move by 1e-3; the run is within the"):
        capture_expectation(options, tmp_path, SilentProgress())
    assert path.read_bytes() == before


def test_a_recapture_within_the_limits_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CaptureOptions(model="micro:llama", run="cpu/bfloat16", num_captures=1)
    answer(monkeypatch, expectation(noise=NOISE).signature, options=options)
    capture_expectation(options, tmp_path, SilentProgress())
    answer(monkeypatch, expectation(noise=1.1 * NOISE).signature, options=options)
    path = capture_expectation(options, tmp_path, SilentProgress())
    kept = read_expectation(path).signature.captured.log_probabilities[0][0][0]
    assert kept[:2] == off(1.1 * NOISE)


def test_non_finite_outputs_are_not_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned = distributions([float("nan"), -3.0])
    signature = expectation().signature.model_copy(update={"captured": poisoned})
    answer(monkeypatch, signature)
    with pytest.raises(MachineError, match="gives NaN or infinity on cpu/bfloat16"):
        capture_expectation(OPTIONS, tmp_path, SilentProgress())


def test_expectations_are_found_in_folders(tmp_path: Path) -> None:
    for name in ("b.json", "a.json", "notes.txt"):
        (tmp_path / name).touch()
    assert find_files([tmp_path]) == [tmp_path / "a.json", tmp_path / "b.json"]
    assert find_files([tmp_path / "b.json"]) == [tmp_path / "b.json"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "",
            r"has no expectation\. To capture one:\n  assay expect capture MODEL --run cpu/float32 ",
        ),
        ("absent.json", r"absent.json: no such file or folder\. To capture one:\n  assay expect"),
    ],
)
def test_path_without_expectations_is_an_error(tmp_path: Path, name: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        find_files([tmp_path / name], "cpu/float32")


def test_missing_path_names_a_near_one_and_git_only_if_it_has_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_expectation(expectation(), tmp_path / "expectations")
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "expectations"], check=True)
    capture = "To capture one:\n  assay expect capture MODEL --run cpu/float32 --output"
    with pytest.raises(UsageError) as raised:
        find_files([Path("expectation")], "cpu/float32")
    assert str(raised.value) == (
        f"expectation: no such file or folder; did you mean expectations? {capture} expectation"
    )
    file.unlink()
    deleted = file.relative_to(tmp_path)
    with pytest.raises(UsageError) as raised:
        find_files([deleted], "cpu/float32")
    assert str(raised.value) == (
        f"{deleted}: no such file or folder. To restore a deleted one:\n  git checkout {deleted}\n{capture} {deleted}"
    )


def test_a_diff_names_the_files_and_the_kind_of_change(tmp_path: Path) -> None:
    for name, noise in (("old", NOISE), ("same", 1.1 * NOISE), ("new", 5 * NOISE)):
        write_expectation(expectation(noise=noise), tmp_path / f"{name}.json")
    told = {}
    for name in ("same", "new"):
        folder = RunFolder.create("expect diff", tmp_path / name).path
        diff_expectations(str(tmp_path / "old.json"), str(tmp_path / f"{name}.json"), folder)
        words = read_report(folder).explanation
        told[name] = (words.title, words.headline, words.details)
    assert told["same"][:2] == (
        "PASS: micro:llama on same.json (bfloat16) against old.json (bfloat16)",
        "noise: relative error of the logits 1.1e-2 is 1.1x the error of the older capture (limit 2.0x)",
    )
    reason = (
        "outputs: the run is less accurate: the exact outputs are the same; over a limit: relative error of"
        " the logits 5e-2 is 5.0x the error of the older capture (limit 2.0x)"
    )
    assert told["new"] == (
        "FAIL: micro:llama on new.json (bfloat16) against old.json (bfloat16)",
        "break: over the limits of OLD",
        (reason,),
    )


def test_a_failed_verification_names_the_command_for_an_intended_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_expectation(expectation(), tmp_path / "e.json")
    steps = []
    for number, stale in enumerate((["different tokenizer"], [])):
        run = observed(distributions(off(NOISE)))
        seen = Seen(file=str(file), observed=run, stale=stale)
        here = AllSeen(machine=MACHINE, versions=VERSIONS, seen=[seen])
        monkeypatch.setattr(capture_and_verify, "call", lambda *_, here=here, **__: [here])
        folder = RunFolder.create("expect verify", tmp_path / str(number)).path
        verdict = verify_expectations([file], "acme/bfloat16", folder, SilentProgress())
        steps.append(list_steps(*verdict.next_steps))
    command = f"assay expect capture micro:llama --run acme/bfloat16 --output {file} --reason TEXT"
    restored = f"restore the model's files, then:\n  assay expect verify {file} --run acme/bfloat16"
    assert steps == [f"{restored}\nif the change is intended:\n  {command}", ""]


def test_a_capture_says_what_became_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CaptureOptions(model="micro:llama", run="cpu/bfloat16", num_captures=1)
    notes: list[str] = []
    progress = SilentProgress()
    monkeypatch.setattr(progress, "note", notes.append)
    for noise in (NOISE, NOISE, 1.1 * NOISE):
        answer(monkeypatch, expectation(noise=noise).signature, options=options)
        capture_expectation(options, tmp_path, progress)
    (path,) = tmp_path.iterdir()
    assert notes == [
        f"written: {path}, of 1 capture",
        f"unchanged: {path}",
        f"replaced: {path}, of 1 capture",
    ]


def test_a_capture_says_that_it_replaces_another_model_or_other_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CaptureOptions(
        model="micro:llama", run="cpu/bfloat16", num_captures=1, reason="shorter"
    )
    notes: list[str] = []
    progress = SilentProgress()
    monkeypatch.setattr(progress, "note", notes.append)
    path, signature = tmp_path / "e.json", expectation().signature
    content = CONTENT.model_copy(update={"prompts_hash": "p2"})
    key = expectation().key.model_copy(update={"content": content})
    for captured in ({}, {"model": "mut/llama"}, {"model": "mut/llama", "key": key}):
        answer(monkeypatch, signature, options=options, **captured)
        capture_expectation(options, path, progress)
    replaced = f"replaced: {path}, of 1 capture"
    prompts = "built-in prompts with other token ids or padding"
    assert notes[1:] == ["model micro:llama → mut/llama", replaced, prompts, replaced]

    answer(monkeypatch, signature, model="org/other")
    plain = options.model_copy(update={"reason": None})
    with pytest.raises(UsageError) as raised:
        capture_expectation(plain, path, SilentProgress())
    assert str(raised.value).endswith(
        f"model mut/llama → org/other. Nothing was written. If the change is intended, add --reason TEXT."
        f" To keep both, use --output {tmp_path}/NAME.json"
    )


def test_an_equal_capture_keeps_the_approval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, expectation().signature, NOISE, NOISE)
    path = capture_expectation(OPTIONS, tmp_path, SilentProgress())
    before = path.read_bytes()
    plain = CaptureOptions(model="micro:llama", run="cpu/bfloat16")
    answer(monkeypatch, expectation().signature, NOISE, NOISE, options=plain)
    capture_expectation(plain, tmp_path, SilentProgress())
    assert path.read_bytes() == before


def test_an_equal_capture_can_approve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    progress = SilentProgress()
    monkeypatch.setattr(progress, "note", notes.append)
    plain = CaptureOptions(model="micro:llama", run="cpu/bfloat16", num_captures=1)
    path, approvals = tmp_path, []
    for update in ({}, {"approved_by": "Ada"}, {"reason": "read again"}):
        options = plain.model_copy(update=update)
        answer(monkeypatch, expectation().signature, options=options)
        path = capture_expectation(options, tmp_path, progress)
        origin = read_expectation(path).provenance
        approvals.append((origin.approved_by, origin.reason))
    assert approvals == [(None, None), ("Ada", None), ("Ada", "read again")]
    assert notes == [
        f"written: {path}, of 1 capture",
        f"approved: {path}, of 1 capture",
        f"approved: {path}, of 1 capture",
    ]


def test_a_capture_says_that_it_drops_an_approval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, expectation().signature, NOISE, NOISE)
    path = capture_expectation(OPTIONS, tmp_path, SilentProgress())
    notes: list[str] = []
    progress = SilentProgress()
    monkeypatch.setattr(progress, "note", notes.append)
    dropped = (
        "the approval of Ada is dropped, because the new capture differs. To approve it, repeat the command"
        " with --approved-by NAME"
    )
    for approver in ("Ada", None):
        options = OPTIONS.model_copy(update={"num_captures": 1, "approved_by": approver})
        noise = 1.1 * NOISE if approver else 1.2 * NOISE
        answer(monkeypatch, expectation(noise=noise).signature, options=options)
        capture_expectation(options, tmp_path, progress)
    assert notes == [f"replaced: {path}, of 1 capture", dropped, f"replaced: {path}, of 1 capture"]

    path.write_text("{}")
    answer(monkeypatch, expectation().signature, options=OPTIONS)
    capture_expectation(OPTIONS.model_copy(update={"num_captures": 1}), tmp_path, progress)
    assert notes[-2].endswith(": an approval in it is lost")


def test_an_approved_expectation_is_only_replaced_for_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, expectation().signature, NOISE, NOISE)
    path = capture_expectation(OPTIONS, tmp_path, SilentProgress())
    before = path.read_bytes()
    plain = CaptureOptions(model="micro:llama", run="cpu/bfloat16", num_captures=1)
    answer(monkeypatch, expectation(noise=1.1 * NOISE).signature, options=plain)
    with pytest.raises(UsageError) as raised:
        capture_expectation(plain, tmp_path, SilentProgress())
    assert str(raised.value).startswith(f"{path} was approved by Ada, and the new capture differs")
    assert path.read_bytes() == before


def test_a_second_file_of_one_key_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = write_expectation(expectation(), tmp_path)
    copy = write_expectation(expectation(), tmp_path / "a-copy.json")
    asked = []

    def call(_work: object, request: VerifyRequest, **_: object) -> list[AllSeen]:
        asked.append(request.files)
        seen = [Seen(file=str(named), observed=observed(distributions(off(NOISE))))]
        return [AllSeen(machine=MACHINE, versions=VERSIONS, seen=seen)]

    monkeypatch.setattr(capture_and_verify, "call", call)
    folder = RunFolder.create("expect verify", tmp_path / "run").path
    verdict = verify_expectations([tmp_path], "acme/bfloat16", folder, SilentProgress())
    assert asked == [[str(named)]]
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.levels[named.stem].verdict is Outcome.PASS
    assert verdict.levels[str(copy)].reason == (
        f"it is for the same model, inputs and machine as {named}, which is verified"
    )
    assert (
        list_steps(*verdict.next_steps) == f"delete one of the two, for example:\n  git rm {copy}"
    )


def test_shipped_expectations_have_the_current_limits() -> None:
    shipped = [read_expectation(file) for file in find_files([SHIPPED])]
    assert shipped
    for one in shipped:
        assert one.limits == LIMITS
        assert one.limits_origin == limits_origin(one.model, one.key.machine)


@pytest.mark.parametrize("has_other", [True, False])
def test_a_broken_file_is_not_compared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_other: bool,
) -> None:
    seen = []
    if has_other:
        good = write_expectation(expectation(), tmp_path / "a.json")
        seen = [Seen(file=str(good), observed=observed(distributions(off(NOISE))))]
    broken = tmp_path / "b.json"
    broken.write_text("<<<<<<< HEAD\n{}\n")
    here = AllSeen(machine=MACHINE, versions=VERSIONS, seen=seen)
    if has_other:  # no process loads torch for broken files alone
        monkeypatch.setattr(capture_and_verify, "call", lambda *_, **__: [here])
    folder = RunFolder.create("expect verify", tmp_path / "run").path
    verdict = verify_expectations([tmp_path], "acme/bfloat16", folder, SilentProgress())
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert not has_other or verdict.levels["a"].verdict is Outcome.PASS
    assert verdict.levels[str(broken)].reason == ("it has a conflict marker of git in line 1")
    assert list_steps(*verdict.next_steps) == (
        f"take one side, then verify it:\n  git checkout --ours {broken}\n"
        f"or the other side:\n  git checkout --theirs {broken}"
    )


def test_a_side_of_a_diff_may_be_in_git_or_in_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_expectation(expectation(), tmp_path / "a.json")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    path.write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert read_side("HEAD:a.json").model == "micro:llama"
    with pytest.raises(
        UsageError, match=r"^HEAD:b.json is neither a file nor a version in git: path "
    ):
        read_side("HEAD:b.json")

    # A file with a wrong hash: a new capture goes into a file, never into REV:FILE.
    (tmp_path / "a.json").write_text(json.dumps(expectation().to_json() | {"hash": "x"}))
    subprocess.run([*git, "commit", "-qam", "y"], cwd=tmp_path, check=True)
    for side in ("HEAD:a.json", ":0:a.json", ":a.json"):
        with pytest.raises(UsageError) as raised:
            read_side(side)
        assert str(raised.value).startswith(f"{side}: its hash does not match its content")
        assert str(raised.value).endswith(" --output a.json --reason TEXT")
    with pytest.raises(
        UsageError, match=r"^HEAD: no such file\. A version in git is .* HEAD:FILE$"
    ):
        read_side("HEAD")
    subprocess.run([*git, "reset", "-q", "--hard", "HEAD~1"], cwd=tmp_path, check=True)

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    git_show = subprocess.Popen(f"git show HEAD:a.json > {pipe}", shell=True)  # noqa: S602
    assert read_side(str(pipe)).model == "micro:llama"
    assert git_show.wait() == 0


CHAT = [{"role": "user", "content": "abc"}]


def test_a_second_capture_repeats_the_inputs_of_the_first(tmp_path: Path) -> None:
    first = expectation()
    content = first.key.content
    settings = content.settings.model_copy(update={"max_new_tokens": 3, "seed": 5})
    key = first.key.model_copy(
        update={"content": content.model_copy(update={"settings": settings})}
    )
    path = write_expectation(
        first.model_copy(update={"key": key, "prompts": [[1, 2]], "chats": [CHAT]}),
        tmp_path / "e.json",
    )
    options = CaptureOptions(model="micro:llama", run="acme/bfloat16")
    again = with_settings_of_earlier(options, {"seed": 6}, path)
    assert (again.settings.max_new_tokens, again.settings.seed) == (3, 6)
    assert (again.prompts, again.chats) == ([[1, 2]], [CHAT])
    (tmp_path / "other.jsonl").write_text('{"prompt": "a"}')
    texts = options.model_copy(update={"prompts": str(tmp_path / "other.jsonl")})
    assert with_settings_of_earlier(texts, {}, path).chats == []
    with pytest.raises(UsageError, match="name --prompts again"):
        with_settings_of_earlier(options, {"chat": True}, path)
    other = options.model_copy(update={"run": "cpu/bfloat16"})
    assert with_settings_of_earlier(other, {}, path).prompts == [[1, 2]]
    # Another file repeats them if they are named.
    named = other.model_copy(update={"prompts": str(path)})
    elsewhere = with_settings_of_earlier(named, {}, tmp_path)
    assert (elsewhere.prompts, elsewhere.chats) == ([[1, 2]], [CHAT])
    assert (elsewhere.settings.max_new_tokens, elsewhere.repeats) == (3, str(path))
    assert with_settings_of_earlier(other, {}, tmp_path) == other
    # The file that is named is replaced, wherever the model lies now.
    moved = options.model_copy(update={"model": "other/place"})
    assert with_settings_of_earlier(moved, {}, path).prompts == [[1, 2]]
    # A file with a name of its own is not the one that a capture into the folder replaces.
    assert with_settings_of_earlier(options, {}, tmp_path).prompts is None
    path.rename(tmp_path / f"{read_expectation(path).name}.json")
    assert with_settings_of_earlier(options, {}, tmp_path).prompts == [[1, 2]]
    assert with_settings_of_earlier(moved, {}, tmp_path).prompts is None


def test_one_model_cannot_stand_for_several(tmp_path: Path) -> None:
    other = expectation().model_copy(update={"model": "micro:bert"})
    for number, one in enumerate((expectation(), other)):
        write_expectation(one, tmp_path / f"{number}.json")
    with pytest.raises(
        UsageError, match=r"^--model is for one model, and the files are of micro:bert"
    ):
        verify_expectations(
            [tmp_path], "cpu/bfloat16", tmp_path, SilentProgress(), model="micro:bert"
        )
