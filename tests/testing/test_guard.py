"""The guard of tests/conftest.py: no test leaves a process group behind."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


def test_a_left_group_fails_its_test_and_not_the_next(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text())
    pytester.makepyfile(
        """
        from torch import distributed as dist

        def test_leaves():
            store = dist.HashStore()
            dist.init_process_group("fake", rank=1, world_size=3, store=store)

        def test_next():
            assert not dist.is_initialized()
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*left a default process group*fake, rank 1 of 3*"])


def test_tests_of_the_pool_share_one_xdist_worker(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        (Path(__file__).parents[1] / "conftest.py").read_text()
        + """
def pytest_collection_finish(session):
    for item in session.items:
        print(item.name, [mark.args for mark in item.iter_markers("xdist_group")])
"""
    )
    pytester.makepyfile("def test_a(gloo_pool): pass\ndef test_b(): pass\n")
    result = pytester.runpytest_inprocess("--collect-only", "-s", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*test_a*('gloo',)*", "*test_b*[[][]]*"])
