"""Tests marked world in real runs of pytest: outcomes and messages.

The runs are in this process, so that they share its fork server, unless they must be separate.
"""

import os
import sys

import pytest

# pytester drops modules that a run imported; torch cannot be imported a second time.
import torch.distributed.device_mesh  # noqa: F401

import assay.testing.rank_body
import assay.testing.worlds

pytest_plugins = ("pytester",)

ALONE = [f"-pno:{name}" for name in ("anyio", "benchmark", "hypothesispytest", "xdist")]


def run(project: pytest.Pytester, *options: str) -> pytest.RunResult:
    return project.runpytest_inprocess(
        *ALONE, "-pno:cacheprovider", "-rsE", "--strict-markers", *options
    )


def test_body_runs_on_every_rank_with_its_mesh_and_fixtures(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import os
        import pytest
        import torch
        import torch.distributed as dist

        PARENT = os.getpid()

        @pytest.fixture
        def weights():
            return torch.arange(4.0)

        @pytest.fixture
        def tied(weights):
            return {"weights": weights}

        @pytest.mark.world(dp=2, tp=2)
        @pytest.mark.parametrize("factor", [2.0, 3.0])
        def test_sum(mesh, device, weights, tied, factor, tmp_path, assay_run):
            assert mesh.mesh_dim_names == ("dp", "tp")
            assert (device.name, str(assay_run)) == ("cpu", "cpu/float32")
            assert tied["weights"] is weights
            value = weights * factor * mesh.get_local_rank("tp")
            dist.all_reduce(value)
            assert value.tolist() == [0.0, 2 * factor, 4 * factor, 6 * factor]
            (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))

        def test_no_rank_remains(tmp_path):
            assert not dist.is_initialized()

        class TestMethods:
            factor = 3

            @pytest.mark.world(dp=2)
            def test_method(self, tmp_path):
                assert (self.factor, dist.get_world_size()) == (3, 2)
    """)
    result = run(pytester, "--basetemp", str(pytester.path / "temp"))
    result.assert_outcomes(passed=4)
    pids = [path.read_text() for path in sorted(pytester.path.glob("temp/test_sum_*0/[0-3]"))]
    assert len(set(pids)) == len(pids) == 8
    assert str(os.getpid()) not in pids


def test_selection_by_name_runs_only_the_selected_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.world(dp=2)
        @pytest.mark.parametrize("n", [1, 2])
        def test_it(n):
            assert n == 2
    """)
    run(pytester, "-k", "test_it and 2").assert_outcomes(passed=1, deselected=1)


def test_failure_shows_rank_values_source_and_output(
    pytester: pytest.Pytester,
) -> None:
    file = pytester.makepyfile("""
        import pytest

        @pytest.mark.world(dp=2)
        def test_it(mesh):
            print("seen by", mesh.get_local_rank())
            expected = [0, 1]
            assert [mesh.get_local_rank(), 1] == expected
    """)
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of a world of 2 ranks (dp=2) raised AssertionError: assert [[]1, 1] == [[]0, 1]",
            "  Traceback (most recent call last):",
            f'    File "{file}", line 7, in test_it',
            "      assert [[]mesh.get_local_rank(), 1] == expected",
            "  AssertionError: assert [[]1, 1] == [[]0, 1]",
            "  rank 0 returned",
            "*Captured stdout call*",
            "--- rank 0 ---",
            "seen by 0",
            "--- rank 1 ---",
            "seen by 1",
        ]
    )
    result.stdout.no_fnmatch_line("*During handling*")


def test_assertions_of_conftest_are_rewritten_in_the_ranks(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def judge(value):\n    assert value == 4\n")
    pytester.makepyfile("""
        import pytest
        from conftest import judge

        @pytest.mark.world(dp=2)
        def test_it():
            judge(3)
    """)
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*raised AssertionError: assert 3 == 4"])


@pytest.mark.parametrize(
    ("skips", "outcome"), [("True", "skipped"), ("mesh.get_local_rank() == 1", "failed")]
)
def test_test_is_skipped_only_if_all_ranks_skip(
    pytester: pytest.Pytester, skips: str, outcome: str
) -> None:
    pytester.makepyfile(f"""
        import pytest

        @pytest.mark.world(dp=2)
        def test_it(mesh):
            if {skips}:
                pytest.skip("no card")
    """)
    result = run(pytester)
    result.assert_outcomes(**{outcome: 1})
    line = {
        "skipped": "SKIPPED [[]1] test_*.py:3: no card",
        "failed": "rank 1 of * skipped (no card), but not all ranks did",
    }
    result.stdout.fnmatch_lines([line[outcome]])


def test_fixture_that_cannot_be_pickled_is_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.fixture
        def local():
            return lambda: None

        @pytest.fixture
        def group(mesh):
            return mesh.get_group("dp")

        @pytest.mark.world(dp=2)
        def test_fixture(local):
            raise RuntimeError("must not run")

        @pytest.mark.world(dp=2)
        def test_capture(capsys):
            raise RuntimeError("must not run")

        @pytest.mark.world(dp=2)
        def test_mesh(group):
            raise RuntimeError("must not run")
    """)
    result = run(pytester)
    result.assert_outcomes(failed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "E *UsageError: mesh.get_group: the mesh is made in the ranks, after all fixtures; *",
            "fixture 'local' cannot travel to the ranks: function: *",
            "fixture 'capsys' cannot travel to the ranks: CaptureFixture: *",
        ]
    )
    result.stdout.no_fnmatch_line("*must not run*")


def test_tests_that_cannot_run_on_ranks_are_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import unittest
        import pytest

        class TestCase(unittest.TestCase):
            @pytest.mark.world(dp=2)
            def test_method(self): pass

        @pytest.mark.world(dp=2)
        async def test_coroutine(): pass
    """)
    result = run(pytester)
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["marker world: only plain functions, *"])


def test_warning_filters_apply_in_the_ranks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import warnings
        import pytest

        @pytest.mark.world(dp=2)
        @pytest.mark.filterwarnings("ignore:known")
        def test_it():
            warnings.warn("known")
            warnings.warn("careful")
    """)
    result = run(pytester, "-W", "error")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*raised UserWarning: careful"])


@pytest.mark.long
def test_hang_fails_its_test_before_the_timeout_of_the_session(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import time
        import pytest
        import torch
        import torch.distributed as dist

        @pytest.mark.world(dp=2)
        @pytest.mark.timeout(8)
        def test_hangs(mesh):
            if mesh.get_local_rank():
                time.sleep(100)
            dist.barrier()

        @pytest.mark.world(dp=2)
        def test_next(mesh):
            dist.barrier()
    """)
    result = run(pytester)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of a world of 2 ranks (dp=2) hung: a collective was given up",
            "  rank 0 waited at *test_*.py:11 in test_hangs, in barrier, until RuntimeError: *",
            "  rank 1 waited at *test_*.py:10 in test_hangs",
        ]
    )


def test_expected_failure_is_reported_as_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.xfail
        @pytest.mark.world(dp=2)
        def test_it():
            assert False
    """)
    run(pytester).assert_outcomes(xfailed=1)


def test_preloaded_module_is_imported_once_for_all_ranks(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assay.testing.worlds, "_preloaded", [])
    pytester.makeconftest("""
        from assay.testing.worlds import preload_for_ranks

        preload_for_ranks("antigravity_of_a_test")
    """)
    pytester.makepyfile(antigravity_of_a_test="import os\nPID = os.getpid()\n")
    pytester.makepyfile("""
        import os
        import sys
        import pytest

        @pytest.mark.world(dp=2)
        def test_it():
            assert sys.modules["antigravity_of_a_test"].PID != os.getpid()
    """)
    pytester.syspathinsert()
    run(pytester).assert_outcomes(passed=1)


@pytest.mark.long
def test_xdist_workers_launch_separate_worlds_and_import_no_torch(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile("""
        import sys
        import pytest

        @pytest.mark.world(dp=2)
        @pytest.mark.parametrize("n", range(4))
        def test_it(mesh, n):
            import torch.distributed as dist
            dist.barrier()
            assert n < 3

        @pytest.mark.parametrize("n", range(4))
        def test_here(n):
            assert "torch" not in sys.modules
    """)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-Werror", "-n2")
    result.assert_outcomes(passed=7, failed=1)
    result.stdout.fnmatch_lines(["*raised AssertionError: assert 3 < 3"])


TORCHRUN = """
    import os
    import pytest
    import torch.distributed as dist

    @pytest.fixture
    def local():
        return lambda: 3

    @pytest.mark.world(dp=2)
    def test_it(mesh, device, local):
        assert (mesh.mesh_dim_names, device.name, local()) == (("dp",), "cpu", 3)
        assert os.environ["TORCHELASTIC_RUN_ID"]
        assert dist.get_rank() == int(os.environ["RANK"])

    @pytest.mark.world(dp=2)
    def test_skip():
        pytest.skip("no card")

    @pytest.mark.world(dp=2)
    def test_skip_of_one():
        if os.environ["RANK"] == "1":
            pytest.skip("no card")

    @pytest.mark.world(dp=2)
    def test_failure_of_one():
        assert os.environ["RANK"] == "0"

    @pytest.mark.world(dp=1, tp=2)
    def test_next(mesh):
        dist.barrier(mesh.get_group("tp"))

    @pytest.mark.world(dp=4)
    def test_larger():
        raise RuntimeError("must not run")
"""


@pytest.mark.long
def test_same_tests_run_under_torchrun(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TORCHRUN)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    result = pytester.run(
        *(*launcher, "--no-python", sys.executable, "-m", "pytest"),
        *("-pno:cacheprovider", *ALONE, "-rs"),
    )
    assert result.ret != 0
    # Both ranks print every line: each reports the failures of the other, too.
    text = result.stdout.str()
    for line in (
        "2 failed, 2 passed, 2 skipped",
        "needs a world of 4 ranks (dp=4); the launcher of this process started 2",
        "rank 1 of a world of 2 ranks (dp=2) skipped (no card), but not all ranks did",
    ):
        assert text.count(line) == 2, line
    # pytest shows an exception of this process's own rank like that of any other test.
    assert "E       AssertionError: assert '1' == '0'" in text
    assert "rank 1 of a world of 2 ranks (dp=2) raised AssertionError: assert '1' == '0'" in text
