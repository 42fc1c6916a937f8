"""The Flax module by itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax_models


def each_alone(layer, query, key, value):
    """In attention's place: every token sees its own value only."""
    del layer, key
    return jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)


def test_a_long_prompt_gives_what_its_parts_give(tiny):
    tokens = jax.random.randint(jax.random.key(0), (2, 2 * 1024 + 37), 0, tiny.config.vocab_size)
    whole = jax.jit(lambda tokens: tiny(tokens, each_alone))(tokens)
    parts = [tiny(tokens[:, start : start + 500], each_alone) for start in range(0, tokens.shape[1], 500)]
    np.testing.assert_allclose(whole, jnp.concatenate(parts, axis=1), rtol=1e-5, atol=1e-5)


@pytest.fixture
def wide(tiny):
    """A model whose MLPs are sixteen times as wide as its hidden states."""
    config = dataclasses.replace(tiny.config, intermediate_size=16 * tiny.config.hidden_size)
    return kvjax_models.Llama(config, rngs=nnx.Rngs(0))


def temporary_bytes(function, *arrays):
    stats = jax.jit(function).lower(*arrays).compile().memory_analysis()
    assert stats is not None
    return stats.temp_size_in_bytes


def test_a_long_prompts_mlp_holds_a_stretch_of_it(wide):
    tokens = jax.ShapeDtypeStruct((1, 8 * 1024), jnp.int32)
    held = temporary_bytes(lambda tokens: wide(tokens, each_alone), tokens)
    assert held < 4 * tokens.size * wide.config.intermediate_size


def test_its_gradient_holds_no_more(wide):
    x = jax.ShapeDtypeStruct((1, 8 * 1024, wide.config.hidden_size), jnp.float32)
    held = temporary_bytes(jax.grad(lambda x: (wide.layers[0](0, x, each_alone) ** 2).sum()), x)
    assert held < 4 * x.shape[1] * wide.config.intermediate_size


def test_a_long_prompt_has_the_gradient_of_its_parts(tiny):
    x = jax.random.normal(jax.random.key(0), (1, 1024 + 100, tiny.config.hidden_size))
    layer = tiny.layers[0]

    def loss(x):
        return (layer(0, x, each_alone) ** 2).sum()

    parts = [jax.grad(loss)(x[:, :600]), jax.grad(loss)(x[:, 600:])]
    np.testing.assert_allclose(jax.grad(loss)(x), jnp.concatenate(parts, axis=1), rtol=1e-4, atol=1e-5)
