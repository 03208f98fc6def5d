"""Check a tiny model of every architecture of transformers: `nox -s zoo`.

    python -m packages.core.tests.zoo [--part 1/8] [--only NAME] [--seed N] [--table FILE.csv]

Each model is checked as it is, in float32 and bfloat16, and with one planted fault: a module drawn by the seed returns
values that are 5 % too large. A clean FAIL and a fault that is not found at its module end with exit code 1.
"""

import argparse
import csv
import random
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

import assay
from assay.errors import AssayError, UsageError
from assay.generate.golden import USAGE
from assay.trace import Trace
from assay.verdicts import Coverage, Outcome, Verdict
from packages.core.tests.zoo.architectures import Architecture, build_tiny, list_architectures

# To build an architecture, and to check it: ten times what most take.
_MOST_SECONDS = 120
_INPUTS = {"prompt_length": "8:24", "max_new_tokens": 4}
# What torch says if code mixes float32 with the dtype of the weights.
_OF_DTYPE = re.compile(r"dtype|scalar type|BFloat16")
_PLANT = """
def plant(model):
    def scale(module, args, output):
        if isinstance(output, tuple):
            return (1.05 * output[0], *output[1:])
        return 1.05 * output

    model.get_submodule("{module}").register_forward_hook(scale)
"""


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one architecture."""

    architecture: str
    float32: str = ""
    """Outcome of the clean check, or the reason against it."""
    bfloat16: str = ""
    """The same; "float32 only" if the model's code, which passes in float32, raises in bfloat16."""
    planted: str = ""
    """The module with the fault."""
    found: str = ""
    """The module of the verdict, or its outcome if it names none."""

    @property
    def is_wrong(self) -> bool:
        """Return True for a clean FAIL, or a fault that is not found at its module."""
        is_red = any(one.startswith("FAIL") for one in (self.float32, self.bfloat16))
        return is_red or self.planted != self.found


def main() -> int:
    """Run. Returns: 1 if a check was wrong."""
    parser = argparse.ArgumentParser(prog="nox -s zoo --", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--part", default="1/1", help="K/N: every Nth architecture, from the Kth on"
    )
    parser.add_argument("--only", default="", help="architectures whose name holds this text")
    parser.add_argument("--seed", type=int, default=0, help="draws the module of the fault")
    parser.add_argument("--table", type=Path, help="write the results to this CSV file")
    given = parser.parse_args()
    part, num_parts = (int(number) for number in given.part.split("/"))
    chosen = [one for one in list_architectures()[part - 1 :: num_parts] if given.only in str(one)]
    rows = []
    signal.signal(signal.SIGALRM, _raise_timeout)
    for number, one in enumerate(chosen, 1):
        rows.append(check_architecture(one, given.seed))
        print(f"{number} of {len(chosen)}:", *asdict(rows[-1]).values(), sep="  ", flush=True)  # noqa: T201
    print(*summarize(rows), sep="\n")  # noqa: T201
    if given.table is not None:
        write_table(rows, given.table)
    if not any(row.bfloat16 for row in rows):
        print("nothing was checked")  # noqa: T201
        return 1
    return int(any(row.is_wrong for row in rows))


class _OverTimeError(BaseException):
    """No Exception, which a search for inputs takes for the model's."""


def _raise_timeout(*_: object) -> NoReturn:
    raise _OverTimeError(f"over {_MOST_SECONDS} s")


def check_architecture(architecture: Architecture, seed: int) -> Row:
    """Build, save and check one architecture."""
    try:
        return _check_in_time(architecture, seed)
    except _OverTimeError as error:
        return Row(str(architecture), f"error: {error}")
    finally:
        signal.alarm(0)


def _check_in_time(architecture: Architecture, seed: int) -> Row:
    name = str(architecture)
    # A process that is stopped may still write.
    with tempfile.TemporaryDirectory(prefix="assay-zoo-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        signal.alarm(_MOST_SECONDS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(seed)
                model = build_tiny(architecture)
                model.save_pretrained(folder / "model")  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - each class fails in its own way
            return Row(name, f"not built: {_first_line(error)}")
        signal.alarm(_MOST_SECONDS)
        wide: Verdict | None = None
        try:
            wide = _check(folder, "float32")
            narrow, described = _check_narrow(folder)
            judged = "bfloat16" if narrow is not None else "float32"
            generator = random.Random(f"{seed} {name}")  # noqa: S311 - reproducible
            module = draw_module(model, _list_called(folder / judged, judged), generator)
            clean = narrow or wide
            if clean.verdict is Outcome.FAIL or module is None:
                return Row(name, _describe(wide), described)
            (folder / "plant.py").write_text(_PLANT.format(module=module))
            wrong = _check(folder, judged, setup=f"{folder / 'plant.py'}:plant")
        except AssayError as error:
            refusal = f"refused: {_first_line(error)}"
            return Row(name, refusal) if wide is None else Row(name, _describe(wide), refusal)
        except Exception as error:  # noqa: BLE001 - one architecture must not end the run
            traceback.print_exc()
            return Row(name, f"error: {_first_line(error)}")
    place_found = wrong.location.module if wrong.location is not None else None
    # Normalized keys hide a factor: the module is named, and the verdict is PASS.
    if wrong.diagnosis == "representation-difference":
        place_found = next((module for note in wrong.notes if module in note), None)
    found = place_found or f"{wrong.verdict.value} {wrong.location or ''}".strip()
    return Row(name, _describe(wide), described, module, found)


def _check_narrow(folder: Path) -> tuple[Verdict | None, str]:
    """Check in bfloat16. Returns: the verdict and its description; None if the model's own code raises in it."""
    try:
        verdict = _check(folder, "bfloat16")
    except UsageError as error:
        if not _OF_DTYPE.search(str(error)):
            raise
        return None, f"float32 only: {_first_line(error)}"
    return verdict, _describe(verdict)


def _list_called(run: Path, dtype: str) -> list[str]:
    """Return the modules that the reference called: others read the weights of some."""
    usage: Any = Trace.open(run / "golden" / dtype).attachment_json(USAGE)
    called: list[str] = usage["called"]
    return called


def draw_module(model: nn.Module, called: Collection[str], generator: random.Random) -> str | None:
    """Draw a linear layer, a norm or a convolution from the `called` modules; None without one."""
    kinds = ("Linear", "Conv", "Norm")
    names = [
        name
        for name, module in model.named_modules()
        if not [*module.children()]
        and [*module.parameters(recurse=False)]
        and any(kind in type(module).__name__ for kind in kinds)
        and name in called
    ]
    return generator.choice(names) if names else None


def _check(folder: Path, dtype: str, setup: str | None = None) -> Verdict:
    golden = folder / dtype / "golden"
    source: dict[str, Any] = {"reference": "cpu/float32", **_INPUTS}
    if setup is not None:
        source = {"golden": golden, "candidate_setup": setup}
    return assay.check_generate(
        str(folder / "model"),
        candidate=f"cpu/{dtype}",
        output=folder / (dtype if setup is None else "planted"),
        **source,
    )


def _describe(verdict: Verdict) -> str:
    """Return the outcome, and the reason unless it is PASS."""
    if verdict.verdict is Outcome.PASS:
        return "PASS"
    if verdict.verdict is Outcome.FAIL:
        ratio = f"{verdict.noise_ratio:.3g} of {verdict.limit}" if verdict.noise_ratio else ""
        return f"FAIL: {verdict.statistic} {verdict.location or ''} {ratio}".rstrip()
    reasons = [
        level.reason or "" for level in verdict.levels.values() if level.verdict is verdict.verdict
    ]
    if verdict.coverage is not None:
        reasons += list(_gaps(verdict.coverage))
    return f"NOT_COMPARED: {'; '.join(reasons) or 'no reason'}"


def _gaps(coverage: Coverage) -> Iterator[str]:
    for name in ("not_run_parts", "not_run", "unused_parameters", "unrouted_experts"):
        if found := [*getattr(coverage, name)]:
            yield f"{name}: {', '.join(found[:2])}{' ...' if len(found) > 2 else ''}"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def summarize(rows: Sequence[Row]) -> list[str]:
    """Count the results."""
    counts = Counter(
        row.bfloat16.partition(":")[0] or row.float32.partition(":")[0] for row in rows
    )
    planted = [row for row in rows if row.planted]
    found = sum(row.planted == row.found for row in planted)
    lines = [f"{count:5d}  {name}" for name, count in counts.most_common()]
    return [*lines, f"{found:5d}  faults of {len(planted)} found at their module"]


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write one line for each architecture."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(one.name for one in fields(Row))
        writer.writerows(asdict(row).values() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
