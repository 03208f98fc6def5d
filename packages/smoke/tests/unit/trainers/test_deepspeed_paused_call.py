"""A call that pauses midway."""

import threading

import pytest

from assay_smoke.trainers.deepspeed.visible_steps import PausedCall


def test_what_is_after_the_pause_runs_when_the_call_is_finished() -> None:
    done: list[str] = []
    paused: PausedCall

    def call() -> None:
        done.append("clip")
        paused.pause()
        done.append("step")

    paused = PausedCall(call)

    assert paused.start()
    assert done == ["clip"]
    paused.finish()
    assert done == ["clip", "step"]


def test_call_that_ends_before_its_pause_is_told_apart() -> None:
    done: list[str] = []
    paused = PausedCall(lambda: done.append("skipped"))

    assert not paused.start()
    assert done == ["skipped"]


def test_error_before_the_pause_is_raised_by_start() -> None:
    def call() -> None:
        raise ValueError("no gradients")

    with pytest.raises(ValueError, match="no gradients"):
        PausedCall(call).start()


def test_error_after_the_pause_is_raised_by_finish() -> None:
    paused: PausedCall

    def call() -> None:
        paused.pause()
        raise ValueError("no memory")

    paused = PausedCall(call)
    assert paused.start()

    with pytest.raises(ValueError, match="no memory"):
        paused.finish()


def test_call_that_is_never_finished_does_not_keep_the_process_alive() -> None:
    paused: PausedCall

    def call() -> None:
        paused.pause()

    paused = PausedCall(call)
    assert paused.start()

    waiting = [thread for thread in threading.enumerate() if thread.name.startswith("paused call")]
    assert waiting
    assert all(thread.daemon for thread in waiting)
    paused.finish()
