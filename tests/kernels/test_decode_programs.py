"""A whole decoding step, compiled for chips that are not there: no copy of a cache, and little memory beside it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.steps
import kvjax_models

# Small caches would be moved to a TPU's 128 MiB of VMEM whole, which hides their copies.
BATCH, PROMPT, BUDGET, ROOM = 32, 8192, 1024, 64
KERNEL = {"v5e": "tpu", "h100": "gpu"}
POLICIES = {
    "full": lambda heads: kvjax.Full(),
    "streaming_llm": lambda heads: kvjax.StreamingLLM(budget=BUDGET),
    "h2o": lambda heads: kvjax.H2O(budget=BUDGET),
    "snapkv": lambda heads: kvjax.SnapKV(budget=BUDGET),
    "pyramidkv": lambda heads: kvjax.PyramidKV(budget=BUDGET),
    "duo_attention": lambda heads: kvjax.DuoAttention(pattern=kvjax.HeadPattern.of(heads), sparsity=0.5),
    "ada_kv": lambda heads: kvjax.AdaKV(budget=BUDGET),
}


def abstract_model(name: str, layers: int) -> kvjax_models.Llama:
    config = dataclasses.replace(kvjax_models.KNOWN_MODELS[name], num_hidden_layers=layers)
    return kvjax_models.Llama(config, dtype=jnp.bfloat16, rngs=None)


def abstract_cache(model: kvjax_models.Llama, policy: kvjax.Policy, implementation: str) -> kvjax.Cache:
    """The cache that a prompt leaves: what `prefill` would give, without computing it."""
    spec = model.spec
    specs = policy.layer_specs(spec, PROMPT, ROOM, shortest=PROMPT)
    heads = (spec.num_query_heads, spec.num_kv_heads, spec.num_kv_heads)
    arrays = [jax.ShapeDtypeStruct((BATCH, PROMPT, n, spec.head_dim), jnp.bfloat16) for n in heads]
    positions = jax.ShapeDtypeStruct((BATCH, PROMPT), jnp.int32)

    @functools.cache
    def state(shape: kvjax.LayerSpec) -> kvjax.LayerState:
        return jax.eval_shape(lambda *x: policy.prefill(shape, *x, rope=spec.rope)[1], *arrays, positions)

    specs = tuple(dataclasses.replace(shape, implementation=implementation) for shape in specs)
    build = functools.partial(kvjax.Cache, policy=policy, specs=specs, room=ROOM)
    # Layers of one shape are computed once: what a layer's state looks like does not depend on its index.
    states = tuple(state(dataclasses.replace(shape, layer=0, implementation=None)) for shape in specs)
    return jax.eval_shape(build, states, jax.ShapeDtypeStruct((BATCH,), jnp.int32))


def size(tree: object) -> int:
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def check(compile_for, chip: str, name: str, policy_name: str, layers: int) -> None:
    model = abstract_model(name, layers)
    heads = np.random.default_rng(0).random((layers, model.spec.num_kv_heads))
    cache = abstract_cache(model, POLICIES[policy_name](heads), KERNEL[chip])
    leaves, structure = jax.tree.flatten(model)
    step = functools.partial(kvjax.steps._decode_leaves, structure=structure)
    token = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    compiled = compile_for(chip, step, leaves, cache, token, donate_argnums=1)

    text, memory = compiled.as_text(), compiled.memory_analysis()
    # What comes out in the shape of a cache is the cache with a row written into it, in place.
    shapes = "|".join(
        {",".join(map(str, rows.shape)) for rows in jax.tree.leaves([state.kv for state in cache.layers])}
    )
    made = re.findall(rf"= bf16\[(?:{shapes})\]\S* (copy|copy-start|transpose|slice|concatenate|pad|convert)\(", text)
    assert made == []
    assert ("tpu_custom_call" if chip == "v5e" else "mosaic_gpu") in text
    assert memory.alias_size_in_bytes >= size(cache)
    # Beside the scores of the vocabulary temporary memory is one layer's, whatever the number of layers.
    whole = size(cache) * kvjax_models.KNOWN_MODELS[name].num_hidden_layers / layers
    vocabulary = BATCH * model.spec.vocab_size * (4 + 2)
    assert memory.temp_size_in_bytes < 0.02 * whole + vocabulary


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.2-1b"])
@pytest.mark.parametrize("chip", KERNEL)
def test_a_step_copies_no_cache(compile_for, chip, model, policy):
    check(compile_for, chip, model, policy, layers=2)


@pytest.mark.parametrize("chip", KERNEL)
def test_a_step_of_all_layers_copies_no_cache(compile_for, chip):
    check(compile_for, chip, "llama-3.2-1b", "snapkv", layers=16)
