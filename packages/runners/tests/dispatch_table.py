"""The rows of the trigger table for workflows that are started by hand."""

from packages.runners.tests.event_payloads import SHELL, dispatch
from packages.runners.tests.trigger_rows import (
    BRANCH,
    BUILD,
    EVERY,
    REAP,
    Case,
    by_hand,
    night,
    recapture,
)

# Inputs that are refused, and what the plan says.
REFUSED: tuple[tuple[str, dict[str, str], str], ...] = (
    ("bench", {"vendor": "nvidai"}, "nearest is nvidia"),
    ("bench", {"vendor": "all"}, "name one machine"),
    ("bench", {"vendor": "gaudi-8"}, "no session of bench"),
    ("bench", {"vendor": "cpu", "model": "--output=/etc"}, "begins with a dash"),
    ("bench", {"vendor": "nvidia", "suite": "core"}, "name a model: the shipped baselines"),
    ("recapture", {"vendors": "cpu tpu", "reason": "x"}, "there is no machine 'tpu'"),
    ("recapture", {"models": "a --approved-by=me", "vendors": "cpu", "reason": "x"}, "a dash"),
    ("recapture", {"vendors": "cpu gaudi-8", "reason": "x"}, "run no session of expectations"),
    ("recapture", {"vendors": "cpu", "reason": "  "}, "needs models, vendors and a reason"),
)

BY_HAND = (
    *(
        Case(
            f"{name} with {given}",
            dispatch(f"{name}.yml", **({"models": "a"} if name == "recapture" else {}) | given),
            by_hand(f"{name}.yml"),
            says=says,
        )
        for name, given, says in REFUSED
    ),
    Case(
        "bench",
        dispatch("bench.yml", vendor="nvidia", model="micro:llama"),
        by_hand("bench.yml", "assay-nvidia"),
    ),
    Case(
        "bench on the CPU",
        dispatch("bench.yml", vendor="cpu", model="micro:llama"),
        by_hand("bench.yml", "assay-cpu"),
    ),
    Case(
        "bench of a model with a baseline",
        dispatch(
            "bench.yml", vendor="amd", suite="core", model="org/model", baseline="kept/a.json"
        ),
        by_hand("bench.yml", "assay-amd"),
    ),
    Case(
        "bench of a model full of shell",
        dispatch("bench.yml", vendor="cpu", model=SHELL),
        by_hand("bench.yml", "assay-cpu"),
    ),
    Case(
        "recapture",
        dispatch(
            "recapture.yml",
            models="micro:llama micro:qwen3",
            vendors="nvidia spyre",
            reason="torch 2.13",
        ),
        recapture("assay-nvidia", "assay-spyre"),
    ),
    Case(
        "recapture everywhere",
        dispatch("recapture.yml", models="micro:llama", vendors="all", reason="a new format"),
        recapture(*EVERY),
    ),
    Case(
        "recapture with a reason full of shell",
        dispatch("recapture.yml", models="micro:llama", vendors="cpu", reason=SHELL),
        recapture("assay-cpu"),
    ),
    Case("the night by hand", dispatch("nightly.yml"), night(8)),
    Case(
        "the night by hand, after no change",
        dispatch("nightly.yml").model_copy(update={"unchanged_since_success": True}),
        night(8),
    ),
    Case(
        "the night by hand, for a branch", dispatch("nightly.yml", ref=BRANCH), night(8, ref=BRANCH)
    ),
    Case(
        "bench of a branch",
        dispatch("bench.yml", ref=BRANCH, vendor="nvidia", model="micro:llama"),
        by_hand("bench.yml", "assay-nvidia"),
    ),
    Case(
        "bench of a tag",
        dispatch("bench.yml", ref="refs/tags/v1.0.0", vendor="nvidia", model="micro:llama"),
        by_hand("bench.yml", "assay-nvidia"),
    ),
    Case(
        "recapture of a branch",
        dispatch(
            "recapture.yml", ref=BRANCH, models="micro:llama", vendors="cpu", reason="torch 2.13"
        ),
        by_hand("recapture.yml"),
        says="start it from refs/heads/main",
    ),
    Case("the reaper by hand", dispatch("reaper.yml"), REAP),
    Case("a release by hand", dispatch("release.yml"), (BUILD,), says="has its own jobs"),
    Case(
        "a release by hand, of a tag",
        dispatch("release.yml", ref="refs/tags/v1.0.0"),
        (BUILD,),
        says="has its own jobs",
    ),
)
