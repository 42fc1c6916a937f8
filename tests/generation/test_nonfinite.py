"""Rows whose scores become NaN or infinite end there, and the others go on."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.sampling import Sampling, choose, row_keys

NEW = 8
RNG = np.random.default_rng(5)
LONG, SHORT = (RNG.integers(3, 512, length).tolist() for length in (14, 3))


@pytest.mark.parametrize("watched", [False, True])
def test_a_row_ends_before_a_token_that_has_no_finite_scores(model, cut, words, watched):
    free = kvjax.generate(model, [LONG, SHORT], max_new_tokens=NEW, stop_tokens=())
    last = int(free.tokens[0, 2])
    assert last not in [*LONG, *SHORT, *free.tokens[0, :2], *free.tokens[1]]
    broken = cut(model)
    broken.embedding = nnx.Param(model.embedding[...].at[last].set(jnp.nan))
    seen = []
    settings: Any = {"callback": seen.append} if watched else {}
    with pytest.warns(kvjax.NonFiniteWarning, match=r"row 0 ended after 3 new tokens: .* NaN or infinite"):
        result = kvjax.generate(broken, [LONG, SHORT], max_new_tokens=NEW, stop_tokens=(), tokenizer=words, **settings)
    assert result.finish_reasons == ["nonfinite", "length"]
    assert result.lengths.tolist() == [3, NEW]
    np.testing.assert_array_equal(result.tokens, [[*free.tokens[0, :3], 0, 0, 0, 0, 0], free.tokens[1]])
    assert result.cache.next_position.tolist() == [len(LONG) + 3, len(SHORT) + NEW]
    if watched:
        assert [int(new.tokens[0]) for new in seen] == [*free.tokens[0, :3].tolist(), -1, -1, -1, -1, -1]
    # A prompt that has it gives no token at all, least of all token 0.
    with pytest.warns(kvjax.NonFiniteWarning, match=r"row 0 ended after 0 new tokens"):
        nothing = kvjax.generate(
            broken, [[*LONG[:13], last], SHORT], max_new_tokens=NEW, stop_tokens=(), tokenizer=words, **settings
        )
    assert nothing.texts is not None
    assert (nothing.lengths[0], nothing.finish_reasons[0], nothing.texts[0]) == (0, "nonfinite", "")


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1, "top_k": 2, "top_p": 0.9}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_are_finite_where_one_is_and_none_is_nan_or_infinite(temperature, settings):
    inf, nan = np.inf, np.nan
    rows = [[0, nan, 5, 1], [0, inf, 5, 1], [-inf] * 4, [nan] * 4, [-inf, nan, 1, 1], [inf, -inf, 0, 0], [inf] * 4]
    rows += [[-inf, 2, -inf, -inf], [0, 5, 1, -1], [-3e38, 3e38, -3e38, 0]]
    logits = jnp.asarray(rows, jnp.float32)
    arrays = Sampling(temperature=temperature, **settings).arrays()
    token, finite = choose(logits, row_keys(0, len(rows)), jnp.zeros(len(rows), jnp.int32), arrays)
    np.testing.assert_array_equal(finite, [False] * 7 + [True] * 3)
    assert token[7] == 1  # The only one that the mask allows.


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-39},
        {"temperature": 1.2e-38},
        {"temperature": 5e-324},
        {"temperature": 1.0, "top_p": 1e-45},
        {"temperature": np.float32(1e-30)},
        {"temperature": 1, "top_p": 5e-324, "min_p": 1e-320, "top_k": 2**40},
    ],
)
def test_settings_near_zero_take_the_best_token(settings):
    """Broken by: numbers that devices flush to zero, and quotients that overflow."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(32, 64)) * 30, jnp.float32)
    token, finite = choose(logits, row_keys(0, 32), jnp.zeros(32, jnp.int32), Sampling(**settings).arrays())
    np.testing.assert_array_equal(token, logits.argmax(-1))
    assert finite.all()
