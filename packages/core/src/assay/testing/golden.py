"""Goldens of tests, captured once on a trusted device and compared with every device, and their assertions."""

import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn
from urllib.parse import quote

import pytest

from assay.devices.run_string import Run
from assay.errors import AssayError, UsageError
from assay.judge.explain import explain_verdict, find_deciding_rows
from assay.judge.wording import describe_sides
from assay.report.run_report import read_report
from assay.runs import SilentProgress
from assay.runs.results import GOLDEN_FOLDER
from assay.verdicts import Measurement, Verdict

if TYPE_CHECKING:
    from assay.generate.spec import InputOptions


def assert_passed(verdict: Verdict, measurements: Sequence[Measurement] = ()) -> None:
    """Raise AssertionError with the explanation unless `verdict` is a PASS.

    measurements: rows for the numbers in the explanation.
    """
    __tracebackhide__ = True
    if not verdict.passed:
        raise AssertionError(_explain(verdict, measurements))


def assert_run_passed(folder: Path) -> Verdict:
    """Raise AssertionError unless the finished run in `folder` has passed.

    The message ends with the command that opens the run's report.
    Returns: the verdict of the run.
    Raises: UnreadableFileError if `folder` holds no finished run.
    """
    __tracebackhide__ = True
    report = read_report(folder)
    if not report.verdict.passed:
        explanation = _explain(report.verdict, report.measurements)
        raise AssertionError(f"{explanation}\nReport: assay report {shlex.quote(str(folder))}")
    return report.verdict


def _explain(verdict: Verdict, measurements: Sequence[Measurement]) -> str:
    """Format the message and the notes of `verdict`; the second line names the model and both RUNs."""
    deciding = find_deciding_rows(verdict, measurements)
    headline, *rest = explain_verdict(verdict, deciding).message.splitlines()
    notes = [f"note: {note}" for note in verdict.notes]
    return "\n".join([headline, f"  {describe_sides(verdict)}", *rest, *notes])


Mode = Literal["capture", "check"]


class GoldenSaved(AssertionError):  # noqa: N818 - not an error
    """End of a capturing test, which compared nothing."""


@dataclass(frozen=True, slots=True)
class Golden:
    """The value of the fixture `golden`: the golden of one test."""

    folder: Path
    """Folder of the golden, kept with the test."""
    scratch: Path
    """Folder for the files of this run."""
    run: Run
    mode: Mode

    def check(
        self,
        model: str,
        *,
        noise_for: Sequence[str] = (),
        setup: str | None = None,
        **inputs: object,
    ) -> "Verdict":
        """Check that `model` generates on the device under test as recorded in the golden.

        Under --capture-expectation, capture the golden instead.

        noise_for: dtypes of candidates for the capture, by default that of the RUN under test.
        setup: FILE.py:FUNC, called with the candidate's model.
        inputs: options of `assay capture`, such as max_new_tokens=8, prompts="file.jsonl".
        Raises: AssertionError with the explanation; GoldenSaved after a capture. Fails the test
            without a golden, or if the golden cannot be checked.
        """
        __tracebackhide__ = True
        from assay.generate.spec import InputOptions

        asked = InputOptions.model_validate(inputs)
        try:
            if self.mode == "capture":
                self._capture(model, noise_for, asked)
            self._check(model, setup, asked)
        except AssayError as error:
            # assay's traceback does not help the reader of the test.
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        return assert_run_passed(self.scratch)

    def _check(self, model: str, setup: str | None, inputs: "InputOptions") -> None:
        from assay.generate.check import check_generate
        from assay.generate.spec import GenerateCheck

        if not self.folder.is_dir():
            raise UsageError(
                f"there is no golden in {self.folder}; capture it on a trusted device:"
                " pytest --capture-expectation --assay-device cpu/float32"
            )
        self.scratch.mkdir(parents=True, exist_ok=True)
        check = GenerateCheck(
            model=model,
            candidate=self.run,
            golden=self.folder,
            inputs=inputs,
            given=frozenset(type(inputs).model_fields),
            setup=setup,
        )
        check_generate(check, self.scratch, SilentProgress())

    def _capture(self, model: str, noise_for: Sequence[str], inputs: "InputOptions") -> NoReturn:
        __tracebackhide__ = True
        from assay.generate.check import capture
        from assay.generate.spec import GoldenSpec

        captured = self.scratch / GOLDEN_FOLDER
        captured.mkdir(parents=True)
        spec = GoldenSpec(
            model=model,
            reference=self.run,
            noise_for=list(noise_for) or [self.run.dtype],
            inputs=inputs,
            folder=captured,
        )
        capture(spec, self.scratch, SilentProgress())
        # Only a complete golden replaces the previous one.
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(captured, self.folder)
        raise GoldenSaved(
            f"the golden is saved in {self.folder}; run again without --capture-expectation"
        )


def golden_folder(file: Path, test: str) -> Path:
    """Return the folder of the golden of `test` in `file`."""
    return file.parent / "goldens" / file.stem / quote(test, safe="[]=,")


def refuse_stale_goldens(file: Path, tests: Iterable[str]) -> None:
    """Raise UsageError if `file` has a golden of a test that is not in `tests`."""
    folder = file.parent / "goldens" / file.stem
    asked_for = {golden_folder(file, test) for test in tests}
    stale = sorted(set(folder.glob("*/")) - asked_for)
    if stale:
        names = " ".join(shlex.quote(str(one)) for one in stale)
        raise UsageError(f"no test uses these goldens; delete them: {names}")
