import plistlib
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest

from assay_runners.fleet import Fleet, read_fleet
from assay_runners.rendering import HEADER, find_outdated, render_fleet

ROOT = Path(__file__).resolve().parents[5]


def test_the_committed_files_are_up_to_date() -> None:
    assert find_outdated(ROOT, read_fleet(ROOT)) == {}


def test_each_vendor_gets_the_files_that_its_entry_allows(rendered: Mapping[str, str]) -> None:
    assert sorted(rendered) == [
        "README.md",
        "acme/Containerfile",
        "acme/README.md",
        "acme/health.json",
        "acme/pod-8.yaml",
        "acme/pod.yaml",
        "acme/runner-8.env",
        "acme/runner.env",
        "acme/values-8.yaml",
        "acme/values.yaml",
        "bare-metal/assay-runner.plist",
        "bare-metal/assay-runner@.service",
        "bare-metal/bootstrap.sh",
        "bare-metal/register.sh",
        "health.sh",
        "plain/Containerfile",
        "plain/README.md",
        "plain/pod.yaml",
        "plain/runner.env",
        "plain/values.yaml",
        "slab/README.md",
        "slab/health.json",
        "slab/runner.env",
    ]


def test_every_file_has_the_header(rendered: Mapping[str, str]) -> None:
    without = [name for name, text in rendered.items() if HEADER not in text[:250]]
    assert without == []
    assert all(text.endswith("\n") and not text.endswith("\n\n") for text in rendered.values())


def test_the_container_has_the_vendors_image_the_runner_and_both_health_hooks(
    rendered: Mapping[str, str],
) -> None:
    lines = rendered["acme/Containerfile"].splitlines()
    assert 'ARG BASE_IMAGE="acme.example/pytorch:2.1"' in lines
    digest = "5" * 64
    assert f'ARG RUNNER_IMAGE="ghcr.io/actions/actions-runner:2.400.1@sha256:{digest}"' in lines
    assert lines.index("FROM ${RUNNER_IMAGE} AS runner") < lines.index("FROM ${BASE_IMAGE}")
    # An ARG before the first FROM must be declared again after it.
    base = lines.index("FROM ${BASE_IMAGE}")
    assert lines.index("ENV ASSAY_CONTAINER=${BASE_IMAGE}") > lines.index("ARG BASE_IMAGE") > base
    assert "COPY --from=runner --chown=1001:1001 /home/runner /home/runner" in lines
    assert "ENV ASSAY_TORCH=system" in lines
    assert 'ENV HF_HUB_CACHE="/srv/models"' in lines
    assert "ENV HF_HUB_OFFLINE=1" in lines
    assert "ENV ACTIONS_RUNNER_HOOK_JOB_STARTED=/opt/assay/health.sh" in lines
    assert "ENV ACTIONS_RUNNER_HOOK_JOB_COMPLETED=/opt/assay/health.sh" in lines
    # The container ends with an unprivileged user.
    assert [line for line in lines if line.startswith("USER")] == ["USER root", "USER 1001"]
    assert lines[-1] == 'CMD ["/home/runner/run.sh"]'


def test_quotes_and_dollars_in_a_value_reach_the_container(rendered: Mapping[str, str]) -> None:
    assert (
        r'ENV ROCKET_FUEL="don'
        r"'"
        r't use \$HOME or \"/\""' in rendered["acme/Containerfile"].splitlines()
    )


def test_python3_of_a_container_has_the_torch(rendered: Mapping[str, str]) -> None:
    acme, plain = rendered["acme/Containerfile"], rendered["plain/Containerfile"]
    assert "/opt/acme/bin/python > /opt/assay/bin/python3" in acme
    assert 'ENV PATH="/opt/assay/bin:${PATH}"' in acme
    assert "/opt/assay/bin" not in plain


def test_without_a_public_image_the_build_must_name_one(rendered: Mapping[str, str]) -> None:
    lines = rendered["plain/Containerfile"].splitlines()
    assert "ARG BASE_IMAGE" in lines
    assert any("--build-arg BASE_IMAGE=REGISTRY/NAME:TAG" in line for line in lines)
    assert "--build-arg BASE_IMAGE=IMAGE" in rendered["plain/README.md"]


def test_a_machine_without_cards_uses_the_cpu_torch_and_has_no_health_check(
    rendered: Mapping[str, str],
) -> None:
    container = rendered["plain/Containerfile"]
    assert "ENV ASSAY_TORCH=cpu" in container.splitlines()
    assert "health" not in container
    assert "HF_HUB" not in container


def test_the_environment_file_is_shell_syntax_without_secrets(
    written: Path, rendered: Mapping[str, str]
) -> None:
    printed = subprocess.run(
        ["bash", "-c", 'set -a; . "$0"; env -0', str(written / "acme/runner-8.env")],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    shown = dict(line.split("=", 1) for line in printed.stdout.split("\0") if line)
    assert {name: shown[name] for name in shown if name[:3] in ("ASS", "HF_", "PIP", "ROC")} == {
        "ASSAY_TARGET": "acme-8",
        "ASSAY_LABEL": "assay-acme-8",
        "ASSAY_ORGANISATION": "acme-org",
        "ASSAY_RUNNER_GROUP": "rockets",
        "ASSAY_CARDS": "8",
        "ASSAY_JOB_MINUTES": "120",
        "ASSAY_DEVICE_NODES": "dev/rocket[0-9]* dev/launch pad",
        "ASSAY_TORCH_MODULES": "torch torch_rocket",
        "ASSAY_PACKAGES": "/var/cache/assay/packages",
        "PIP_BREAK_SYSTEM_PACKAGES": "1",
        "HF_HUB_CACHE": "/srv/models",
        "HF_HUB_OFFLINE": "1",
        "ROCKET_FUEL": 'don\'t use $HOME or "/"',
    }
    assert "ASSAY_TORCH=cpu" in rendered["plain/runner.env"].splitlines()


def test_the_readme_names_labels_resources_and_unverified_fields(
    rendered: Mapping[str, str],
) -> None:
    readme = rendered["acme/README.md"]
    assert (
        "| `assay-acme-8` | 8 | `smoke` | 90 min | `acme.com/rocket: 8` "
        "| [values-8.yaml](values-8.yaml) [pod-8.yaml](pod-8.yaml) [runner-8.env](runner-8.env) |"
    ) in readme.splitlines()
    assert "(`acme.com/missile`)" in readme
    unverified = readme[: readme.index("| `runs-on`")]
    assert "- `health`: the program that lists the cards, and its output" in unverified
    assert "- `scheduler`: the name of the scheduler" in unverified
    assert "Nobody has confirmed" not in rendered["plain/README.md"]


def test_every_file_that_a_page_names_exists(fleet: Fleet) -> None:
    acme, *others = fleet.vendors
    for runners in (acme.runners, acme.runners[1:]):
        changed = acme.model_copy(update={"runners": runners})
        files = render_fleet(fleet.model_copy(update={"vendors": (changed, *others)}))
        page = files[PurePosixPath("runners/acme/README.md")]
        named = re.findall(r"\b(?:runner|pod|values)[\w-]*\.(?:env|yaml)", page)
        assert "runner-8.env" in named
        assert {f"runners/acme/{name}" for name in named} - set(map(str, files)) == set()
        units = re.findall(r"assay-runner@([\w-]+)`", page)
        assert set(units) == ({"TARGET"} if len(runners) > 1 else {"acme-8"})


def test_the_overview_has_a_line_for_each_vendor(rendered: Mapping[str, str]) -> None:
    rows = [line for line in rendered["README.md"].splitlines() if line.startswith("| [")]
    assert rows == [
        "| [Acme Rocket](acme/README.md) | `smoke:acme` `smoke:acme-8` | 1, 8 | health, scheduler |",
        "| [no accelerator](plain/README.md) | `smoke:plain` | 0 |  |",
        "| [a desk](slab/README.md) | `smoke:slab` | 1 |  |",
    ]


def test_the_readme_of_a_vendor_without_pods_mentions_no_cluster(
    rendered: Mapping[str, str],
) -> None:
    readme = rendered["slab/README.md"]
    assert "| `assay-slab` | 1 | `smoke` | 20 min | [runner.env](runner.env) |" in readme
    assert "docker" not in readme
    assert "helm" not in readme
    assert "settings=runners/slab/runner.env\n" in readme
    assert "launchctl bootout system/org.assay.runner.slab" in readme
    assert "systemctl" not in readme


@pytest.mark.parametrize(("ended", "starts_again"), [(0, True), (1, True), (75, False)])
def test_launchd_restarts_unless_the_machine_is_sick(
    rendered: Mapping[str, str], tmp_path: Path, ended: int, starts_again: bool
) -> None:
    daemon = plistlib.loads(rendered["bare-metal/assay-runner.plist"].encode())
    assert daemon["KeepAlive"] == {"SuccessfulExit": True}
    (tmp_path / "settings").write_text(f"ENDED={ended}\n")
    (tmp_path / "register.sh").write_text('#!/bin/sh\nexit "$ENDED"\n')
    (tmp_path / "register.sh").chmod(0o755)
    command = [
        word.replace("/etc/assay-runner/@TARGET@.env", str(tmp_path / "settings")).replace(
            "/opt/assay-runner/", f"{tmp_path}/"
        )
        for word in daemon["ProgramArguments"]
    ]
    assert (subprocess.run(command, check=False).returncode == 0) is starts_again


def test_systemd_keeps_a_sick_machine_down_and_hides_the_credential(
    rendered: Mapping[str, str],
) -> None:
    lines = rendered["bare-metal/assay-runner@.service"].splitlines()
    assert "Restart=always" in lines
    assert "RestartPreventExitStatus=75" in lines
    assert "LoadCredential=credential:/etc/assay-runner/credential" in lines
    # With User=, that user and so the job could read the credential.
    assert not [line for line in lines if line.startswith(("User=", "DynamicUser=", "RuntimeMax"))]
