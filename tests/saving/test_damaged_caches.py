"""Whatever happens to its files, a cache is restored as it was or refused."""

import pathlib
import runpy

import hypothesis
import pytest

import kvjax

DAMAGED = runpy.run_path(str(pathlib.Path(__file__).parent / "damaged.py"))


@pytest.fixture(scope="module", autouse=True)
def _digest_compiled(tiny, saved_once):
    kvjax.restore_cache(saved_once, tiny)


@hypothesis.settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(damage=DAMAGED["damages"]())
def test_a_damaged_cache_is_restored_as_it_was_or_refused_soon(tiny, h2o_cache, saved_once, damage):
    DAMAGED["check_damaged"](saved_once, damage, h2o_cache, tiny)
