"""The launch of a run, and what it needs of this machine."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from assay.devices.base import Device
from assay.devices.registry import open_device
from assay.errors import MachineError
from assay.files import UnreadableFileError
from assay_smoke.external.library import ExternalLibrary, fill, read_library
from assay_smoke.machine.leftovers import free_port, ports_taken


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of the library. Its log NAME.log and its output go to `folder`."""

    name: str
    library: ExternalLibrary
    model: Path
    folder: Path
    working_folder: Path
    device: Device | None = None
    resume_from: Path | None = None
    """Checkpoint to resume from."""
    first_step: int = 0
    """Number of steps made before."""
    sigterm_after: int | None = None
    """Number of logged losses after which the process gets SIGTERM; None for never."""

    @property
    def log(self) -> Path:
        """Return the file with all output of the processes."""
        return self.folder / f"{self.name}.log"

    @property
    def output(self) -> Path:
        """Return the folder of {output}."""
        return self.folder / f"{self.name}-output"

    @property
    def values(self) -> dict[str, object]:
        """Return the values of all placeholders except the port."""
        library = self.library
        values = {
            "python": sys.executable, "model": self.model, "output": self.output.resolve(),
            "steps": library.steps, "save_every": library.save_every, "seed": library.seed,
            "ranks": library.ranks, "cards": library.cards,
            "batch_size": library.batch_size, "accumulation": library.accumulation,
            "saves": len(library.saved_steps),
            "keep": len(library.saved_steps) if library.keep is None else library.keep,
        }  # fmt: skip
        if library.data is not None:
            values["data"] = (self.working_folder / library.data).resolve()
        return values

    def command(self) -> list[str]:
        """Return the words of the launch line, with a free port for {port}."""
        values = self.values | {"port": free_port()}
        words = [fill(word, values) for word in self.library.launch]
        if self.resume_from is not None:
            values["resume_from"] = self.resume_from.resolve()
            words += [fill(word, values) for word in self.library.resume]
        return words


def search_path() -> str:
    """Return the search path of programs, with the folder of this Python first, as if it were activated."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def require_runnable(toml: Path) -> ExternalLibrary:
    """Read the library that `toml` describes, and check what its launch line needs of this machine.

    Raises: UsageError or MachineError for a wrong key, program, port or number of cards.
    """
    library = read_library(toml)
    program, path = fill(library.launch[0], {"python": sys.executable}), search_path()
    if not any(shutil.which(name, path=path) for name in (program, str(toml.parent / program))):
        hint = library.install or "install it, or give its path"
        raise UnreadableFileError(f"launch: the program {program!r} was not found: {hint}")
    if taken := ports_taken(library.ports):
        raise MachineError(
            f"port {taken[0]} of `ports` is taken: end the process that listens there (ss -ltnp), or"
            " write {port} in the launch line for a free one"
        )
    device = open_device(library.device)
    here = 0 if device.torch_device == "cpu" else device.count()
    if library.cards > here:
        raise MachineError(
            f"`cards` is {library.cards}, but this machine has {here} of `device` {library.device!r}"
            " (`assay devices` lists all): ask for fewer, or name another device"
        )
    return library
