"""A prompt's pass through a model, compiled for chips that are not there: memory that does not grow with its length."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import kvjax_models


@pytest.mark.parametrize("chip", ["v5e", "h100"])
def test_an_mlp_holds_a_stretch_of_a_long_prompt(compile_for, chip):
    config = dataclasses.replace(kvjax_models.KNOWN_MODELS["llama-3.1-8b"], num_hidden_layers=1)
    leaves, structure = jax.tree.flatten(kvjax_models.Llama(config, dtype=jnp.bfloat16, rngs=None).layers[0])

    def layer(leaves, x):
        # In attention's place, every query is its own output.
        return jax.tree.unflatten(structure, leaves)(0, x, lambda index, query, key, value: query)

    x = jax.ShapeDtypeStruct((1, 32_768, config.hidden_size), jnp.bfloat16)
    memory = compile_for(chip, layer, leaves, x, donate_argnums=1).memory_analysis()
    # Measured: 0.27 and 0.54 GB, queries and hidden states; 1.48 and 2.15 GB if the MLP took the whole prompt.
    assert memory.temp_size_in_bytes < x.size // config.hidden_size * config.intermediate_size * 2
