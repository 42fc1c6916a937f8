"""Cache states: fixed-shape buffers of key and value rows, and the static specs that give their shapes.

B batch, T tokens of this call, N query heads, K KV heads, G = N / K, S slots, D head dim.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.rope import Rotation
from kvjax_kernels import SplitRows, join_rows, split_rows, write_split
from kvjax_kernels.dispatch import Implementation, implementation_of

if TYPE_CHECKING:
    from kvjax.policies.base import Policy

#: The position of a slot that holds no token, and of a pad in a batch of unequal rows.
EMPTY = -1

#: `attend(layer, query [B, T, N, D], key [B, T, K, D], value [B, T, K, D]) -> output [B, T, N, D]`, before RoPE.
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What policies and generation need to know of a model; hashable.

    Attributes:
        num_layers: L.
        num_query_heads: N, a multiple of `num_kv_heads`.
        num_kv_heads: K.
        head_dim: D.
        vocab_size: token ids are in [0, vocab_size).
        max_positions: tokens of context that the model was trained for.
        dtype: of queries, keys and values; by default of the cache too.
        rope: the position embedding of queries and keys.
        stop_tokens: ids that end an answer.
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    dtype: str
    rope: Rotation
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_query_heads` must be a multiple of `num_kv_heads`, "
                f"got {self.num_query_heads} and {self.num_kv_heads}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The static shape of one layer's cache.

    Attributes:
        model: the model whose layer this is.
        layer: its index.
        kept: for each KV head, the most tokens that it holds after the prompt has been compressed.
        slots: for each KV head, the slots of its segment: `kept`, and room for tokens to come where the policy
            appends them.
        max_length: the most tokens that a row may have seen by the time of the compression.
        dtype: of the cached rows.
        shared: whether the heads of a layer share all its slots, split for each row by what its tokens are worth;
            `kept` and `slots` are then the heads' means.
        split: whether keys and values lie apart, as `for_platform` chooses.
        implementation: which kernels run, see `kvjax_kernels.dispatch`; None picks by platform.
    """

    model: ModelSpec
    layer: int
    kept: tuple[int, ...]
    slots: tuple[int, ...]
    max_length: int
    dtype: str
    shared: bool = False
    split: bool = False
    implementation: Implementation = None

    @property
    def shape(self) -> "LayerSpec":
        """The same for the first layer: what layers of one shape share."""
        return dataclasses.replace(self, layer=0)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first slot of each KV head's segment, where heads share no slots."""
        return tuple(sum(self.slots[:head]) for head in range(len(self.slots)))

    @property
    def room(self) -> int:
        """Slots of each head beside those of the tokens that are kept."""
        return self.slots[0] - self.kept[0]

    @property
    def widest(self) -> int:
        """The most slots that a head may have."""
        return sum(self.kept) + self.room if self.shared else max(self.slots)

    @property
    def is_uniform(self) -> bool:
        """Whether all heads have the same number of slots in all rows."""
        return not self.shared and len(set(self.slots)) == 1


class LayerState(NamedTuple):
    """One layer's cached tokens.

    The tokens of a KV head fill the first `lengths` slots of its segment; the slots behind are empty and may
    hold anything.

    Attributes:
        kv: [B, S, 2D], one row a token: the key, rotated to the token's absolute position, then the value. Every
            KV head owns a contiguous segment of slots. Key and value side by side fill a TPU's 128 lanes at head
            size 64, where an array whose last axis is 64 would be copied at every kernel call. Where the spec says
            `split`, the same taken apart; `whole_rows` gives it back.
        positions: [B, S], the absolute position of the token in each slot, `EMPTY` where there is none.
        lengths: [B, K], tokens held by each head.
        scores: [B, S] float32, only where the policy needs them for its next step.
        starts: [B, K], each head's first slot, only where heads share a layer's slots (`LayerSpec.shared`).
    """

    kv: Float[Array, "B S twoD"] | SplitRows
    positions: Int[Array, "B S"]
    lengths: Int[Array, "B K"]
    scores: Float[Array, "B S"] | None = None
    starts: Int[Array, "B K"] | None = None


class Rows(NamedTuple):
    """Tokens by KV head, all heads padded to one length: what attention and selection of many tokens work on.

    Attributes:
        kv: [B, K, S, 2D], the key, rotated to its absolute position, then the value.
        positions: [B, K, S]; a head's tokens come first, in ascending order, then `EMPTY`.
        scores: [B, K, S] float32 or None: what the policy has remembered of cached tokens.
    """

    kv: Float[Array, "B K S twoD"]
    positions: Int[Array, "B K S"]
    scores: Float[Array, "B K S"] | None = None

    @property
    def key(self) -> Float[Array, "B K S D"]:
        """The keys."""
        return self.kv[..., : self.kv.shape[-1] // 2]

    @property
    def value(self) -> Float[Array, "B K S D"]:
        """The values."""
        return self.kv[..., self.kv.shape[-1] // 2 :]

    @property
    def lengths(self) -> Int[Array, "B K"]:
        """Tokens of each head."""
        return (self.positions != EMPTY).sum(-1, dtype=jnp.int32)


class Kept(NamedTuple):
    """Which of a layer's `Rows` stay, and in which slot of its head's segment.

    Attributes:
        tokens: [B, K, C], for each slot the token along S that it gets; None where slot i gets token i.
        held: [B, K, C], the slots that get one: a prefix of each head's.
        scores: [B, K, S] float32, of all rows, where the policy needs them for its next step.
    """

    tokens: Int[Array, "B K C"] | None
    held: Bool[Array, "B K C"]
    scores: Float[Array, "B K S"] | None = None


class Known(NamedTuple):
    """What the host knows of a cache without asking the device.

    Attributes:
        last_tokens: [B], the id of the newest token of each row; -1 where it is not known.
        free: [B], tokens that each row can still take by `decode`, at least; None where it is not known.
    """

    last_tokens: np.ndarray
    free: np.ndarray | None = None


@jax.tree_util.register_pytree_with_keys_class
class Cache:
    """What a model remembers of each row: one state a layer, and the next absolute position.

    A pytree whose leaves are the arrays; policy, model and shapes are its static structure.

    Attributes:
        layers: a `LayerState` for each layer.
        next_position: [B] int32, the tokens that each row has seen, kept or not.
        policy: the policy that keeps it.
        specs: a `LayerSpec` for each layer.
        room: tokens that were to be decoded after the last prompt; `extend` makes room for as many again.
        known: what the host knows besides; no part of the pytree, so None behind `jax.jit` and `jax.tree.map`.
    """

    __slots__ = ("known", "layers", "next_position", "policy", "room", "specs")

    def __init__(
        self,
        layers: "tuple[LayerState, ...]",
        next_position: jax.Array,
        *,
        policy: "Policy",
        specs: tuple[LayerSpec, ...],
        room: int,
        known: Known | None = None,
    ):
        self.known = known
        self.layers = layers
        self.next_position = next_position
        self.policy = policy
        self.specs = specs
        self.room = room

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        key = jax.tree_util.GetAttrKey
        children = ((key("layers"), self.layers), (key("next_position"), self.next_position))
        return children, (self.policy, self.specs, self.room)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        return (self.layers, self.next_position), (self.policy, self.specs, self.room)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], children: tuple[Any, ...]) -> "Cache":
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        # Not through __init__: what JAX puts in place of arrays need not be arrays.
        cache = object.__new__(cls)
        cache.layers, cache.next_position = children
        cache.policy, cache.specs, cache.room = static
        cache.known = None
        return cache

    @property
    def model(self) -> ModelSpec:
        """The model that the cache belongs to."""
        return self.specs[0].model

    def using(self, implementation: Implementation) -> "Cache":
        """The same cache, whose next steps run other kernels."""
        return self.laid_out(for_platform(self.specs, implementation))

    def laid_out(self, specs: tuple[LayerSpec, ...]) -> "Cache":
        """The same tokens as other specs of the same shapes say; shares the arrays that stay as they are."""
        layers = tuple(
            _laid_out(state, old, new) for state, old, new in zip(self.layers, self.specs, specs, strict=True)
        )
        return Cache(layers, self.next_position, policy=self.policy, specs=specs, room=self.room, known=self.known)

    def __repr__(self) -> str:
        batch = self.next_position.shape[0]
        slots = sum(sum(spec.slots) for spec in self.specs)
        return f"Cache({self.policy}, {batch} rows, {slots} slots a row in {len(self.specs)} layers)"


def for_platform(specs: tuple[LayerSpec, ...], implementation: Implementation) -> tuple[LayerSpec, ...]:
    """The specs of a cache that these kernels read, in the layout that they read fastest.

    Plain JAX on a CPU has keys and values apart; all else, and heads that share a layer's slots, has them in rows.
    """
    forced = implementation_of(implementation, "ragged_decode_attention")
    split = jax.default_backend() == "cpu" and forced in (None, "xla")
    return tuple(
        dataclasses.replace(spec, split=split and not spec.shared, implementation=implementation) for spec in specs
    )


def whole_rows(state: LayerState, spec: LayerSpec) -> Float[Array, "B S twoD"]:
    """A layer's kv rows, whatever the layout."""
    return join_rows(state.kv, spec.slots) if isinstance(state.kv, SplitRows) else state.kv


def _laid_out(state: LayerState, old: LayerSpec, new: LayerSpec) -> LayerState:
    if old.split == new.split:
        return state
    kv = whole_rows(state, old)
    return state._replace(kv=split_rows(kv, new.slots) if new.split else kv)


def segment_starts(state: LayerState, spec: LayerSpec) -> Int[Array, "B K"]:
    """The first slot of each head's segment in each row."""
    if state.starts is not None:
        return state.starts
    return jnp.broadcast_to(jnp.asarray(spec.starts, jnp.int32)[None], state.lengths.shape)


def capacities(state: LayerState, spec: LayerSpec) -> Int[Array, "B K"]:
    """Slots of each head's segment in each row."""
    if state.starts is None:
        return jnp.broadcast_to(jnp.asarray(spec.slots, jnp.int32)[None], state.lengths.shape)
    end = jnp.full_like(state.starts[:, :1], state.positions.shape[1])
    return jnp.concatenate([state.starts[:, 1:], end], axis=1) - state.starts


def segments(x: Array, state: LayerState, spec: LayerSpec) -> Array:
    """An array [B, S, ...] of slots by head, [B, K, widest, ...]; repeats other slots where a segment is shorter."""
    batch, slots = x.shape[:2]
    kv_heads = len(spec.slots)
    if spec.is_uniform:
        return x.reshape(batch, kv_heads, -1, *x.shape[2:])
    index = segment_starts(state, spec)[:, :, None] + jnp.arange(spec.widest, dtype=jnp.int32)[None, None]
    index = jnp.minimum(index, slots - 1).reshape(batch, -1)
    taken = jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)
    return taken.reshape(batch, kv_heads, spec.widest, *x.shape[2:])


def by_head(state: LayerState, spec: LayerSpec) -> Rows:
    """A layer's tokens as `Rows`, in the order of their slots; empty slots are zeroed."""
    held = jnp.arange(spec.widest, dtype=jnp.int32)[None, None] < state.lengths[:, :, None]
    kv = segments(whole_rows(state, spec), state, spec)
    positions = jnp.where(held, segments(state.positions, state, spec), EMPTY)
    scores = None if state.scores is None else jnp.where(held, segments(state.scores, state, spec), 0.0)
    return Rows(jnp.where(held[..., None], kv, jnp.zeros((), kv.dtype)), positions, scores)


def append_rows(held: Rows, added: Rows) -> Rows:
    """The tokens of both in ascending position, without gaps; the pads of `added` come after its tokens."""
    positions = jnp.concatenate([held.positions, added.positions], axis=2)
    last = jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(positions == EMPTY, last, positions), axis=-1)
    scores = None
    if held.scores is not None:
        scores = jnp.concatenate([held.scores, jnp.zeros(added.positions.shape, jnp.float32)], axis=2)
    return Rows(
        kv=_along_slots(jnp.concatenate([held.kv, added.kv.astype(held.kv.dtype)], axis=2), order),
        positions=_along_slots(positions, order),
        scores=None if scores is None else _along_slots(scores, order),
    )


def _along_slots(x: Array, index: Int[Array, "B K C"]) -> Array:
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 3)), axis=2)


def read_before_write(output: Array, state: LayerState) -> tuple[Array, LayerState]:
    """What was read from a state, and the state, ordered: what is written to it from here on comes after the reading.

    Without this order XLA copies the whole cache at every step, so that the reading and the writing do not meet.
    """
    return jax.lax.optimization_barrier((output, state))


def write_token(
    state: LayerState,
    spec: LayerSpec,
    slots: Int[Array, "B K"],
    key: Float[Array, "B K D"],
    value: Float[Array, "B K D"],
    positions: Int[Array, "B"],
    scores: Float[Array, "B K"] | None = None,
) -> LayerState:
    """Writes one token a row into the given slots of each head's segment.

    Rows whose position is `EMPTY`, and slots outside the segment, are not written.

    Args:
        state: the layer state; updated in place where it is donated.
        spec: its shape.
        slots: within each head's segment; at most the head's length, so that tokens stay a prefix.
        key: rotated keys.
        value: values.
        positions: absolute positions.
        scores: the token's scores, where the state has scores.
    """
    return _write_token(state, spec.shape, slots, key, value, positions, scores)


@functools.partial(jax.jit, static_argnames="spec")
def _write_token(
    state: LayerState,
    spec: LayerSpec,
    slots: Int[Array, "B K"],
    key: Float[Array, "B K D"],
    value: Float[Array, "B K D"],
    positions: Int[Array, "B"],
    scores: Float[Array, "B K"] | None,
) -> LayerState:
    written = (positions != EMPTY)[:, None] & (slots >= 0) & (slots < capacities(state, spec))
    # An index past the end is dropped by the scatter; each head has one of its own, so that indices stay unique.
    past_end = state.positions.shape[1] + jnp.arange(len(spec.slots), dtype=jnp.int32)[None]
    target = jnp.where(written, slots + segment_starts(state, spec), past_end)
    batch = jnp.arange(target.shape[0], dtype=jnp.int32)[:, None]

    def put(old: Array, new: Array) -> Array:
        return old.at[batch, target].set(new.astype(old.dtype), mode="drop", unique_indices=True)

    if isinstance(state.kv, SplitRows):
        kv = write_split(state.kv, spec.slots, jnp.where(written, slots, EMPTY), key, value)
    else:
        kv = put(state.kv, jnp.concatenate([key, value], axis=-1))
    return state._replace(
        kv=kv,
        positions=put(state.positions, jnp.broadcast_to(positions[:, None], target.shape)),
        lengths=jnp.where(written, jnp.maximum(state.lengths, slots + 1), state.lengths),
        scores=state.scores if state.scores is None or scores is None else put(state.scores, scores),
    )
