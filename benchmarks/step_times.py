"""How long a decoding step takes: caches to step from, and the time of the compiled loop inside `kvjax.generate`."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.attention import Asked
from kvjax.decoding import Progress, decode_loop
from kvjax.model import Model
from kvjax.policies.base import prompt_rows
from kvjax.sampling import row_keys
from kvjax.state import for_platform


def random_cache(model: kvjax.ModelSpec, policy: kvjax.Policy, length: int, *, room: int, rows: int = 1) -> kvjax.Cache:
    """What a policy keeps of `length` random tokens a row, with room for an answer; speed does not depend on them."""
    rng = np.random.default_rng(0)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
    shape = (rows, length, model.num_kv_heads, model.head_dim)
    key, value = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))
    query = jnp.zeros((rows, length, model.num_query_heads, model.head_dim), jnp.float32)
    sums = jnp.zeros((rows, model.num_query_heads, length), jnp.float32) if policy.needs_log_sum_exp else None
    specs = for_platform(policy.layer_specs(model, length, room, shortest=length), None)
    asked, tokens = Asked(query, query, positions, sums, model.rope), prompt_rows(key, value, positions)
    # Layers that the policy treats alike keep alike; each has arrays of its own.
    kept = {one: policy.keep(one, tokens, asked) for one in map(policy.representative, specs)}
    states = tuple(jax.tree.map(jnp.copy, kept[policy.representative(spec)]) for spec in specs)
    return kvjax.Cache(states, jnp.full(rows, length, jnp.int32), policy=policy, specs=specs, room=room)


def loop_seconds(params: Model, logits: jax.Array, cache: kvjax.Cache, *, steps: int) -> float:
    """Seconds for so many steps of the compiled loop, from `cache`, which stays valid and must have the room."""
    # The loop takes what it is given.
    logits, cache = jax.block_until_ready(jax.tree.map(jnp.copy, (logits, cache)))
    rows = len(logits)
    progress = Progress.start(cache, logits, room=steps)
    leaves, structure = jax.tree.flatten(params)
    settings: dict[str, Any] = {"stops": jnp.zeros(0, jnp.int32), "sampling": None, "structure": structure}
    keys = row_keys(0, rows)
    started = time.perf_counter()
    progress, _ = decode_loop(leaves, progress, keys=keys, steps=steps, **settings)
    progress.tokens.block_until_ready()
    return time.perf_counter() - started
