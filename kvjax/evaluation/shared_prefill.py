"""One prefill for many policies and budgets: all see the same attention, and each keeps its own tokens of it.

B batch, T tokens of this call, N query heads, K KV heads, S slots, D head dim.

The model runs layer by layer, one compiled program for what a policy does in a layer: layers that a policy treats
alike share it, so that little is compiled where many policies are tried.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.allocation import bucket_start
from kvjax.attention import Asked
from kvjax.implementation import check_implementation
from kvjax.model import Model, check_model
from kvjax.packing import pack
from kvjax.policies.base import Policy, prompt_rows
from kvjax.policies.scored import ScoredPolicy
from kvjax.prompts import Batch, batch_of, check_new_tokens, check_policy, token_rows
from kvjax.rope import Rotation
from kvjax.state import EMPTY, Cache, LayerSpec, LayerState, Rows, for_platform
from kvjax.steps import dtype_name
from kvjax_kernels import prefill_attention
from kvjax_kernels.dispatch import Implementation, implementation_of


class SharedPrefill(NamedTuple):
    """What one prefill gave.

    Attributes:
        logits: float32 scores [B, V] of each row's next token.
        caches: for each policy, what `kvjax.prefill` of the whole rows gives.
        prefix_caches: for each prefix policy, what `kvjax.prefill` of the rows' prefixes gives.
    """

    logits: jax.Array
    caches: list[Cache]
    prefix_caches: list[Cache]


class _Seen(NamedTuple):
    """A layer's queries as arrays, see `kvjax.attention.Asked`."""

    query: Float[Array, "B T N D"]
    unrotated: Float[Array, "B T N D"]
    positions: Int[Array, "B T"]
    log_sum_exp: Float[Array, "B N T"] | None


class _Wanted(NamedTuple):
    """A policy's caches to be.

    Attributes:
        policy: the policy.
        specs: of every layer.
        states: of the layers so far.
    """

    policy: Policy
    specs: tuple[LayerSpec, ...]
    states: list[LayerState]


def shared_prefill(
    params: Model,
    tokens: object,
    *,
    policies: Sequence[Policy],
    max_new_tokens: int,
    prefix_lengths: Sequence[int] | None = None,
    prefix_policies: Sequence[Policy] = (),
    cache_dtype: object = None,
    implementation: str | Mapping[str, str] | None = None,
) -> SharedPrefill:
    """Runs a prompt through the model once, and keeps what each of the policies keeps.

    A token sees only those before it, so one run also serves caches of the rows' first tokens alone.

    Args:
        params: the model.
        tokens: ids [n] or [B, n], or a list of rows of different lengths.
        policies: each gets a cache of the rows.
        max_new_tokens: tokens to be decoded after it; the caches have room for them.
        prefix_lengths: tokens of each row's prefix.
        prefix_policies: each gets a cache of the prefixes.
        cache_dtype: of cached keys and values; the model's by default.
        implementation: which kernels run: see `kvjax.generate`.

    Raises:
        ValueError: a policy whose attention over a prompt is its own (`Policy.sees_whole_prompt`), or other arguments
            that cannot be.
    """
    model, room, forced = check_model(params), check_new_tokens(max_new_tokens), check_implementation(implementation)
    for policy in (*policies, *prefix_policies):
        if not check_policy(policy).sees_whole_prompt:
            raise ValueError(f"`policies` must attend to a prompt in full to share its prefill, and {policy} does not.")
    batch = batch_of(token_rows(tokens, model=model.spec))
    prefixes = _prefix_lengths(prefix_lengths, batch)
    settings = {"model": model, "padded": batch.tokens.shape[1], "room": room, "dtype": dtype_name(cache_dtype)}
    whole = [_wanted(policy, batch.lengths, implementation=forced, **settings) for policy in policies]
    first = [_wanted(policy, prefixes, implementation=forced, **settings) for policy in prefix_policies]
    positions = [_positions(batch, batch.lengths), _positions(batch, prefixes)]
    with_sums = any(policy.needs_log_sum_exp for policy in (*policies, *prefix_policies))

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        output, rows, seen = _attend(
            query, key, value, positions[0], rope=model.spec.rope, with_sums=with_sums, implementation=forced
        )
        for wanted, places in zip((whole, first), positions, strict=True):
            held = rows._replace(positions=jnp.broadcast_to(places[:, None], rows.positions.shape))
            _keep_layer(wanted, layer, held, seen._replace(positions=places), model.spec.rope)
        return output

    hidden = model(jnp.asarray(batch.tokens), attend)
    last = jnp.take_along_axis(hidden, jnp.asarray(batch.lengths - 1)[:, None, None], axis=1)[:, 0]
    return SharedPrefill(
        model.logits(last),
        [_cache(wanted, batch.lengths, room) for wanted in whole],
        [_cache(wanted, prefixes, room) for wanted in first],
    )


def _prefix_lengths(prefix_lengths: Sequence[int] | None, batch: Batch) -> np.ndarray:
    if prefix_lengths is None:
        return batch.lengths
    lengths = np.asarray(prefix_lengths, np.int32)
    if lengths.shape != batch.lengths.shape or (lengths < 1).any() or (lengths > batch.lengths).any():
        raise ValueError(
            f"`prefix_lengths` must be from 1 to the length of each row, {batch.lengths.tolist()}, got "
            f"{lengths.tolist()}."
        )
    return lengths


def _wanted(
    policy: Policy,
    lengths: np.ndarray,
    *,
    model: Model,
    padded: int,
    room: int,
    dtype: str | None,
    implementation: Implementation,
) -> _Wanted:
    policy.check_lengths(lengths)
    shortest = bucket_start(int(lengths.min()))
    specs = policy.layer_specs(model.spec, padded, room, shortest=shortest, dtype=dtype)
    return _Wanted(policy, for_platform(specs, implementation), [])


def _positions(batch: Batch, lengths: np.ndarray) -> Int[Array, "B T"]:
    offset = np.arange(batch.tokens.shape[1])[None]
    return jnp.asarray(np.where(offset < lengths[:, None], offset, EMPTY), jnp.int32)


def _cache(wanted: _Wanted, lengths: np.ndarray, room: int) -> Cache:
    return Cache(tuple(wanted.states), jnp.asarray(lengths), policy=wanted.policy, specs=wanted.specs, room=room)


def _keep_layer(wanted: Sequence[_Wanted], layer: int, rows: Rows, seen: _Seen, rope: Rotation) -> None:
    """Adds a layer's state to each policy; what they score alike is scored once."""
    scores: dict[object, jax.Array] = {}
    for policy, specs, states in wanted:
        spec = policy.representative(specs[layer])
        group = _same_scores(policy)
        if group is None:
            states.append(_keep(rows, seen, policy=policy, spec=spec, rope=rope))
            continue
        assert isinstance(policy, ScoredPolicy)
        if group not in scores:
            scores[group] = _score(rows, seen, policy=policy, rope=rope, implementation=spec.implementation)
        states.append(_select(rows, scores[group], policy=policy, spec=spec))


def _same_scores(policy: Policy) -> object:
    """What policies with the same scores have in common; None where nothing can be shared."""
    kind = type(policy)
    if not isinstance(policy, ScoredPolicy):
        return None
    if kind.compress is not ScoredPolicy.compress or kind.keep is not Policy.keep:
        return None
    names = [field.name for field in dataclasses.fields(policy) if field.name not in ("budget", "allocation")]
    return kind, tuple((name, getattr(policy, name)) for name in names)


@functools.partial(jax.jit, static_argnames=("rope", "with_sums", "implementation"))
def _attend(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    positions: Int[Array, "B T"],
    *,
    rope: Rotation,
    with_sums: bool,
    implementation: Implementation,
) -> tuple[Float[Array, "B T N D"], Rows, _Seen]:
    """Full attention of one layer, and what policies look at; as `Policy.prefill` of a policy with none of its own."""
    rotated, key = rope.rotate(query, positions), rope.rotate(key, positions)
    output, log_sum_exp = prefill_attention(
        rotated,
        key,
        value,
        log_sum_exp=with_sums,
        implementation=implementation_of(implementation, "prefill_attention"),
    )
    return output, prompt_rows(key, value, positions), _Seen(rotated, query, positions, log_sum_exp)


def _asked(seen: _Seen, rope: Rotation, implementation: Implementation) -> Asked:
    return Asked(seen.query, seen.unrotated, seen.positions, seen.log_sum_exp, rope, implementation)


@functools.partial(jax.jit, static_argnames=("policy", "spec", "rope"))
def _keep(rows: Rows, seen: _Seen, *, policy: Policy, spec: LayerSpec, rope: Rotation) -> LayerState:
    return policy.keep(spec, rows, _asked(seen, rope, spec.implementation))


@functools.partial(jax.jit, static_argnames=("policy", "rope", "implementation"))
def _score(
    rows: Rows, seen: _Seen, *, policy: ScoredPolicy, rope: Rotation, implementation: Implementation
) -> Float[Array, "B K S"]:
    return policy.score(rows, _asked(seen, rope, implementation))


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def _select(rows: Rows, scores: Float[Array, "B K S"], *, policy: ScoredPolicy, spec: LayerSpec) -> LayerState:
    return pack(rows, policy.select(spec, rows, scores), spec)
