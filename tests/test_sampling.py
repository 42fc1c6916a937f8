"""The tokens that may be drawn, against NumPy, and how often they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.sampling import Sampling, choose, restrict, row_keys


def allowed(logits: np.ndarray, top_k: int | None, top_p: float | None, min_p: float | None) -> np.ndarray:
    """Which tokens of one row may be drawn: min_p, then top_k, then top_p of what is left."""
    stays = np.ones(len(logits), bool)
    probabilities = np.exp(logits - logits.max())
    if min_p is not None:
        stays &= probabilities >= min_p * probabilities.max()
    if top_k is not None and top_k < stays.sum():
        stays &= logits >= sorted(logits[stays], reverse=True)[top_k - 1]
    if top_p is not None:
        shares = np.where(stays, probabilities, 0.0) / probabilities[stays].sum()
        total, threshold = 0.0, 0.0
        for share in sorted(shares[stays], reverse=True):
            threshold = share
            total += share
            if total >= top_p:
                break
        stays &= shares >= threshold
    return stays


SETTINGS = [
    (1, None, None),
    (5, None, None),
    (50, None, None),
    (999, None, None),
    (None, 0.1, None),
    (None, 0.5, None),
    (None, 0.95, None),
    (None, 1.0, None),
    (None, None, 0.02),
    (None, None, 0.3),
    (None, None, 1.0),
    (7, 0.6, None),
    (7, 0.6, 0.1),
    (None, 0.9, 0.05),
]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), SETTINGS)
def test_the_tokens_that_may_be_drawn_are_those_of_numpy(top_k, top_p, min_p):
    logits = np.random.default_rng(0).normal(size=(16, 50)).astype(np.float32) * 2
    arrays = Sampling(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p).arrays()
    assert arrays is not None
    restricted = np.asarray(restrict(jnp.asarray(logits), arrays))
    for row in range(16):
        stays = allowed(logits[row].astype(np.float64), top_k, top_p, min_p)
        np.testing.assert_array_equal(restricted[row] > -np.inf, stays)
        np.testing.assert_array_equal(restricted[row][stays], logits[row][stays])


def test_the_best_token_always_stays():
    arrays = Sampling(temperature=1.0, top_k=1, top_p=1e-6, min_p=1.0).arrays()
    assert arrays is not None
    logits = jnp.asarray([[0.0, 5.0, 1.0], [-3.0, -2.0, -50.0]])
    np.testing.assert_array_equal(restrict(logits, arrays) > -np.inf, [[False, True, False], [False, True, False]])


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}])
def test_ties_with_the_last_token_stay_too(settings):
    arrays = Sampling(temperature=1.0, **settings).arrays()
    assert arrays is not None
    restricted = restrict(jnp.asarray([[1.0, 0.0, 1.0, 1.0, 1.0]]), arrays)
    np.testing.assert_array_equal(restricted[0] > -np.inf, [True, False, True, True, True])


def draws(logits: list[float], count: int, *, seed: int = 0, **settings) -> np.ndarray:
    """How often each token comes up in `count` rows."""
    rows = jnp.broadcast_to(jnp.asarray(logits)[None], (count, len(logits)))
    arrays = Sampling(**settings).arrays()
    tokens, _ = choose(rows, row_keys(seed, count), jnp.zeros(count, jnp.int32), arrays)
    return np.bincount(np.asarray(tokens), minlength=len(logits))


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({"temperature": 1.0}, [0.5, 0.25, 0.125, 0.0625, 0.0625]),
        # Powers 1 / T of the probabilities, divided by their sum.
        ({"temperature": 0.5}, [0.727273, 0.181818, 0.045455, 0.011364, 0.011364]),
        ({"temperature": 2.0}, [0.326934, 0.231178, 0.163467, 0.115589, 0.115589]),
        ({"temperature": 1.0, "top_k": 2}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.8}, [4 / 7, 2 / 7, 1 / 7, 0, 0]),
        ({"temperature": 1.0, "min_p": 0.25}, [4 / 7, 2 / 7, 1 / 7, 0, 0]),
        # The temperature comes first: at 0.5 the second token has a quarter of the best one's probability.
        ({"temperature": 0.5, "min_p": 0.25}, [0.8, 0.2, 0, 0, 0]),
    ],
)
def test_tokens_come_up_as_often_as_their_probability_says(settings, shares):
    logits = [float(np.log(p)) for p in (0.5, 0.25, 0.125, 0.0625, 0.0625)]
    count = 4000
    observed, expected = draws(logits, count, **settings), count * np.asarray(shares)
    assert (observed[expected == 0] == 0).all()
    inside = expected > 0
    statistic = ((observed - expected)[inside] ** 2 / expected[inside]).sum()
    # The chi-square distribution of 4 degrees of freedom is above 18.5 once in a thousand.
    assert statistic < 18.5


def test_no_temperature_takes_the_best_token_and_of_equals_the_first():
    logits = jnp.asarray([[0.0, 3.0, 3.0], [1.0, 0.0, -1.0]])
    tokens, _ = choose(logits, row_keys(0, 2), jnp.zeros(2, jnp.int32), Sampling().arrays())
    np.testing.assert_array_equal(tokens, [1, 0])
    assert tokens.dtype == jnp.int32


def test_a_row_draws_by_its_own_seed_and_step():
    logits = jnp.zeros((3, 1000))
    arrays = Sampling(temperature=1.0).arrays()

    def tokens(seed, step):
        return np.asarray(choose(logits, row_keys(seed, 3), jnp.full(3, step, jnp.int32), arrays)[0])

    first = tokens(7, 0)
    assert len(set(first)) == 3
    np.testing.assert_array_equal(first, tokens(7, 0))
    np.testing.assert_array_equal(first, tokens([7, 8, 9], 0))
    np.testing.assert_array_equal(first[1:], tokens(8, 0)[:2])
    np.testing.assert_array_equal(first[::-1], tokens([9, 8, 7], 0))
    assert (first != tokens(7, 1)).any()


def test_negative_and_large_seeds_are_seeds():
    data = jax.random.key_data
    np.testing.assert_array_equal(data(row_keys(-1, 2)), data(row_keys([2**32 - 1, 0], 2)))
    np.testing.assert_array_equal(data(row_keys(2**40 + 3, 1)), data(row_keys(3, 1)))


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("seed", [1.5, "seed", None, [1.0, 2.0]])
def test_rejects_seeds_that_are_not_integers(seed):
    with pytest.raises(ValueError, match="`seed` must be an integer, or one for each row"):
        row_keys(seed, 2)


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "`temperature` must be 0 or more, got -0.1"),
        ({"temperature": float("nan")}, "`temperature` must be 0 or more, got nan"),
        ({"top_k": 0}, "`top_k` must be an integer of at least 1, got 0"),
        ({"top_k": 2.5}, "`top_k` must be an integer of at least 1, got 2.5"),
        ({"top_k": True}, "`top_k` must be an integer of at least 1, got True"),
        ({"top_p": 0.0}, "`top_p` must be over 0 and at most 1, got 0.0"),
        ({"top_p": 1.01}, "`top_p` must be over 0 and at most 1, got 1.01"),
        ({"min_p": -0.5}, "`min_p` must be over 0 and at most 1, got -0.5"),
        ({"min_p": float("nan")}, "`min_p` must be over 0 and at most 1, got nan"),
    ],
)
def test_rejects_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)
