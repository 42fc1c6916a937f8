"""Compiling before the first run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import compiling


@pytest.fixture
def calls(monkeypatch):
    """How often programs were compiled by the compiler, and freed memory given back, in order."""
    found = []

    def compiled(event, duration_secs, **kwargs):
        del duration_secs, kwargs
        if event == "/jax/core/compile/backend_compile_duration":
            found.append("compiled")

    jax.monitoring.register_event_duration_secs_listener(compiled)
    monkeypatch.setattr(compiling, "give_back_freed_memory", lambda: found.append("given back"))
    yield found
    jax.monitoring.unregister_event_duration_listener(compiled)


def test_a_program_is_compiled_once_and_then_the_memory_given_back(calls):
    @jax.jit
    def double(x):
        return x + x

    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(compiling.run_compiled(double, x), [2, 2, 2])
    assert calls == ["compiled", "given back"]
    np.testing.assert_array_equal(compiling.run_compiled(double, 3 * x), [6, 6, 6])
    assert calls == ["compiled", "given back"]
    np.testing.assert_array_equal(compiling.run_compiled(double, np.ones(4, np.float32)), [2, 2, 2, 2])
    assert calls == 2 * ["compiled", "given back"]


def test_within_another_program_nothing_is_compiled_by_itself(calls):
    double = jax.jit(lambda x: x + x)
    x = np.ones(5, np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: compiling.run_compiled(double, x) + 1)(x), 3 * x)
    assert calls == ["compiled"]


def test_a_prompt_gives_back_what_its_compiler_took(tiny, calls, monkeypatch):
    monkeypatch.setattr(compiling, "_compiled", set())
    prompt = np.arange(40) % tiny.spec.vocab_size
    first, _ = kvjax.prefill(tiny, prompt, policy=kvjax.SnapKV(budget=32, window=8), max_new_tokens=3)
    assert calls.count("given back") == 1
    again, _ = kvjax.prefill(tiny, prompt, policy=kvjax.SnapKV(budget=32, window=8), max_new_tokens=3)
    assert calls.count("given back") == 1
    assert jnp.array_equal(first, again)


def test_a_python_number_may_be_a_leaf(calls):
    scaled = jax.jit(lambda x, scale: x * scale)
    np.testing.assert_array_equal(compiling.run_compiled(scaled, np.ones(3, np.float32), 2.0), [2, 2, 2])
    np.testing.assert_array_equal(compiling.run_compiled(scaled, np.ones(3, np.float32), 3.0), [3, 3, 3])
    assert calls == ["compiled", "given back"]


def test_a_compilation_tells_when_it_begins_and_ends_and_how_long_it_took():
    told = []
    with compiling.Compilation(told.append) as compilation:
        jax.jit(lambda x: x - 17)(np.ones(7, np.float32))
    assert told == [True, False]
    assert compilation.seconds > 0
    jax.jit(lambda x: x - 18)(np.ones(7, np.float32))
    assert told == [True, False]
