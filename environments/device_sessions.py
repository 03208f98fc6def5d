"""Commands of sessions that run on the best device of this machine, which `assay devices --best` names."""

import os

import nox

from environments.shared import Environment, torch_environment

_DEVICE_OPTIONS = ("--run", "--device", "--assay-device")


def run_on_best_device(
    session: nox.Session, *words: str, option: str = "--run", needs_record: bool = False
) -> None:
    """Run `python -m WORDS` and the arguments of the session, on the best device unless they name one.

    option: takes DEVICE/DTYPE; `--device` takes the device alone.
    needs_record: the command compares with recorded results, of which this machine may have none.
    """
    environment = torch_environment(session)
    run = [] if _names_device(session) else [option, _find_best_run(session, environment, option)]
    codes = _codes_of_success() if needs_record else [0]
    environment.run(session, *words, *session.posargs, *run, success_codes=codes)


def run_bench(session: nox.Session) -> None:
    """Run `assay bench` with the arguments of the session, by default its self-test."""
    match session.posargs:
        case []:  # chooses the best device itself
            words, codes = ("assay.cli", "bench", "selftest"), _codes_of_success()
            torch_environment(session).run(session, *words, success_codes=codes)
        case ["run", *_]:
            run_on_best_device(session, "assay.cli", "bench")
        case _:
            torch_environment(session).run(session, "assay.cli", "bench", *session.posargs)


def _names_device(session: nox.Session) -> bool:
    return any(argument.partition("=")[0] in _DEVICE_OPTIONS for argument in session.posargs)


def _find_best_run(session: nox.Session, environment: Environment, option: str) -> str:
    # Drivers may take long to start: a session waits, where a person would not.
    words = ("assay.cli", "devices", "--best", "cpu/float32", "--timeout", "60")
    run = environment.read(session, *words).strip()
    return run.partition("/")[0] if option == "--device" else run


def _codes_of_success() -> list[int]:
    """Return 0, and 3 unless this is GitHub or an accelerator is promised: nothing is recorded here."""
    promised = os.environ.get("ASSAY_REQUIRE_HARDWARE") == "1"
    return [0] if promised or os.environ.get("GITHUB_ACTIONS") == "true" else [0, 3]
