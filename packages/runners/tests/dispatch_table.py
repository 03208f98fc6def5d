"""The rows of the trigger table for workflows that are started by hand."""

from packages.runners.tests.event_payloads import SHELL, dispatch
from packages.runners.tests.trigger_rows import (
    BRANCH,
    EVERY,
    REAP,
    Case,
    by_hand,
    night,
    recapture,
)

BY_HAND = (
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
        "bench of an unknown vendor",
        dispatch("bench.yml", vendor="nvidai"),
        by_hand("bench.yml"),
        says="nearest is nvidia",
    ),
    Case(
        "bench everywhere",
        dispatch("bench.yml", vendor="all"),
        by_hand("bench.yml"),
        says="name one machine",
    ),
    Case(
        "bench where it is not run",
        dispatch("bench.yml", vendor="gaudi-8"),
        by_hand("bench.yml"),
        says="no session of bench",
    ),
    Case(
        "bench of a model like an option",
        dispatch("bench.yml", vendor="cpu", model="--output=/etc"),
        by_hand("bench.yml"),
        says="begins with a dash",
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
        "recapture of an unknown vendor",
        dispatch("recapture.yml", models="micro:llama", vendors="cpu tpu", reason="x"),
        by_hand("recapture.yml"),
        says="there is no machine 'tpu'",
    ),
    Case(
        "recapture with a reason full of shell",
        dispatch("recapture.yml", models="micro:llama", vendors="cpu", reason=SHELL),
        recapture("assay-cpu"),
    ),
    Case(
        "recapture with an option for a model",
        dispatch("recapture.yml", models="micro:llama --approved-by=me", vendors="cpu", reason="x"),
        by_hand("recapture.yml"),
        says="begins with a dash",
    ),
    Case(
        "recapture where no expectations are run",
        dispatch("recapture.yml", models="micro:llama", vendors="cpu gaudi-8", reason="x"),
        by_hand("recapture.yml"),
        says="the machines of gaudi-8 run no session of expectations",
    ),
    Case(
        "recapture without a reason",
        dispatch("recapture.yml", models="micro:llama", vendors="cpu", reason="  "),
        by_hand("recapture.yml"),
        says="needs models, vendors and a reason",
    ),
    Case("the night by hand", dispatch("nightly.yml"), night(8)),
    Case(
        "the night by hand, after no change",
        dispatch("nightly.yml").model_copy(update={"unchanged_since_success": True}),
        night(8),
    ),
    Case(
        "the night by hand, for a branch",
        dispatch("nightly.yml", ref=BRANCH),
        night(8, ref=BRANCH),
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
        "bench without a model",
        dispatch("bench.yml", vendor="nvidia", suite="core", baseline="kept/a.json"),
        by_hand("bench.yml"),
        says="name a model: the shipped baselines are of Python ",
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
)
