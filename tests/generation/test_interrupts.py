"""The compiled loop runs in calls of about half a second, so that Ctrl-C takes effect."""

import jax.numpy as jnp
import pytest

from kvjax import decoding
from kvjax.implementation import Ran


class Slow:
    """Stands for the loop: decodes at some speed of a clock of its own, after a compilation."""

    def __init__(self, monkeypatch, *, seconds: float, compilation: float = 0.0, interrupted_at: int | None = None):
        self.now, self.calls, self._seconds, self._compilation = 0.0, [], seconds, compilation
        self._interrupted_at = interrupted_at
        monkeypatch.setattr(decoding.time, "perf_counter", lambda: self.now)

    def __call__(self, progress, steps):
        self.calls.append(steps)
        self.now += steps * self._seconds + self._compilation
        self._compilation = 0.0
        if len(self.calls) == self._interrupted_at:
            raise KeyboardInterrupt
        return progress, Ran(())


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(("seconds", "compilation"), [(1e-4, 0.0), (0.02, 0.0), (0.02, 9.0), (3.0, 0.0)])
def test_a_call_takes_about_half_a_second_and_all_give_the_whole_answer(monkeypatch, seconds, compilation):
    progress = decoding.Progress.start(None, jnp.zeros((1, 4)), room=512)  # pyright: ignore
    loop = Slow(monkeypatch, seconds=seconds, compilation=compilation)
    decoding.decode_all(progress, loop)
    assert sum(loop.calls) == 512
    assert all(steps * seconds <= 0.6 or steps == 1 for steps in loop.calls[1:])
    # The first call's speed is not known; few calls cost little.
    assert loop.calls[0] <= 4
    assert len(loop.calls) <= 3 + 512 * seconds / 0.4 or seconds > 1


@pytest.mark.usefixtures("no_shape_checks")
def test_nothing_goes_on_behind_an_interrupt(monkeypatch):
    progress = decoding.Progress.start(None, jnp.zeros((1, 4)), room=512)  # pyright: ignore
    loop = Slow(monkeypatch, seconds=0.05, interrupted_at=3)
    with pytest.raises(KeyboardInterrupt):
        decoding.decode_all(progress, loop)
    assert len(loop.calls) == 3


@pytest.mark.usefixtures("no_shape_checks")
def test_a_second_answer_begins_with_a_call_of_the_right_length(monkeypatch):
    monkeypatch.setattr(decoding, "_steps", {})
    calls = []
    for compilation in (9.0, 0.0):
        progress = decoding.Progress.start(None, jnp.zeros((1, 4)), room=64)  # pyright: ignore
        loop = Slow(monkeypatch, seconds=0.001, compilation=compilation)
        decoding.decode_all(progress, loop, alike="model")
        calls.append(loop.calls)
    assert len(calls[0]) > 1
    assert calls[1] == [64]
