"""What a policy is: it owns the attention of every layer, and decides which tokens stay.

B batch, T tokens of this call, N query heads, K KV heads, S slots, D head dim.
"""

import abc
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.attention import Asked
from kvjax.packing import pack
from kvjax.policies.settings import check_settings
from kvjax.rope import Rotation, rotate_one
from kvjax.state import (
    EMPTY,
    Kept,
    LayerSpec,
    LayerState,
    ModelSpec,
    Rows,
    append_rows,
    by_head,
    capacities,
    read_before_write,
    write_token,
)
from kvjax_kernels import DecodeAttention, extend_attention, prefill_attention, ragged_decode_attention
from kvjax_kernels.dispatch import implementation_of


class Policy(abc.ABC):
    """Which tokens of a sequence stay in the cache; a frozen, hashable dataclass, static under jit.

    A model's attention calls `prefill` once with the prompt, `extend` with every later piece of several tokens, and
    `decode` for one token a row. Queries, keys and values arrive before RoPE, with absolute positions: a policy
    may rotate them by another rule. A position of `EMPTY` marks a pad, or a row that is to stay as it is.

    A subclass says how many tokens each head keeps (`kept_tokens`) and which (`compress`). It may change what tokens
    of a prompt and of a later turn see (`attend_prompt`, `attend_turn`); tokens that are decoded later are appended,
    unless it overrides `decode`.
    """

    #: Whether `compress` uses `Asked.log_sum_exp`; some attention kernels do not give it out.
    needs_log_sum_exp: ClassVar[bool] = False

    if not TYPE_CHECKING:  # Type checkers and editors know the settings from the dataclass.

        def __new__(cls, *settings, **named):
            """Checks that there are such settings, before the dataclass takes them."""
            # None are given where a copy or a pickle is made.
            if settings or named:
                check_settings(cls, settings, named)
            return super().__new__(cls)

    @abc.abstractmethod
    def kept_tokens(self, model: ModelSpec, lengths: range) -> list[tuple[int, ...]]:
        """For each layer and KV head, the most tokens kept of a prompt of any of `lengths`."""

    @abc.abstractmethod
    def compress(self, spec: LayerSpec, rows: Rows, asked: Asked) -> Kept:
        """Which tokens stay, of those that are cached or came with this call.

        Args:
            spec: the shape of the state to come; no head may keep more than `spec.kept`.
            rows: all tokens, in ascending position.
            asked: the queries of this call.
        """

    def check_lengths(self, lengths: np.ndarray) -> None:  # noqa: B027 (most policies need no such check)
        """Raises a ValueError if rows of these lengths [B] cannot have what the settings ask for."""

    def layer_specs(
        self,
        model: ModelSpec,
        prompt_length: int,
        max_new_tokens: int,
        *,
        shortest: int = 1,
        dtype: str | None = None,
    ) -> tuple[LayerSpec, ...]:
        """The static shape of every layer's cache.

        Args:
            model: the model that will use it.
            prompt_length: the most tokens that any row has seen once this prompt, or this turn, is in.
            max_new_tokens: tokens to be decoded after it.
            shortest: the fewest tokens that any row has seen. A layer may keep more of a shorter prompt (PyramidKV),
                so the closer the two, the closer the bytes are to what is kept.
            dtype: of the cached rows; the model's by default.
        """
        return tuple(
            LayerSpec(
                model=model,
                layer=layer,
                kept=kept,
                slots=self.slots(kept, max_new_tokens),
                max_length=prompt_length,
                dtype=dtype or model.dtype,
            )
            for layer, kept in enumerate(self.kept_tokens(model, range(shortest, prompt_length + 1)))
        )

    def slots(self, kept: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
        """Slots of each KV head that keeps `kept` tokens of the prompt: room for the decoded ones is added."""
        return tuple(count + max_new_tokens for count in kept)

    @property
    def remembers_scores(self) -> bool:
        """Whether its states have `scores`."""
        return False

    def free_slots(self, spec: LayerSpec, state: LayerState) -> Int[Array, "B"] | None:
        """Tokens that each row can still take by `decode`; None where there is no end."""
        return (capacities(state, spec) - state.lengths).min(-1)

    def is_bounded(self, prompt_length: int, max_positions: int) -> bool:
        """Whether no token is ever rotated further than a model of `max_positions` was trained for.

        Args:
            prompt_length: of the longest row.
            max_positions: the model's.
        """
        del prompt_length, max_positions
        return False

    @property
    def sees_whole_prompt(self) -> bool:
        """Whether a prompt's attention is the full causal one, whatever is kept: such policies can share a prefill."""
        kind = type(self)
        return kind.attend_prompt is Policy.attend_prompt and kind.prefill is Policy.prefill

    def representative(self, spec: LayerSpec) -> LayerSpec:
        """The spec of the first layer that treats prompts and turns as this one does: one program serves both."""
        return spec

    def prefill(
        self,
        spec: LayerSpec,
        query: Float[Array, "B T N D"],
        key: Float[Array, "B T K D"],
        value: Float[Array, "B T K D"],
        positions: Int[Array, "B T"],
        rope: Rotation,
    ) -> tuple[Float[Array, "B T N D"], LayerState]:
        """Attention of a prompt over itself, and the state that keeps it.

        Args:
            spec: the layer's shape.
            query: before RoPE.
            key: before RoPE.
            value: values.
            positions: 0 to n - 1, then `EMPTY` for the pads of a shorter row.
            rope: the model's position embedding.
        """
        asked, key = self._asked(spec, query, key, positions, rope)
        output, log_sum_exp = self.attend_prompt(asked, key, value, layer=spec.layer)
        rows = prompt_rows(key, value, positions)
        return output, self.keep(spec, rows, asked._replace(log_sum_exp=log_sum_exp))

    def extend(
        self,
        spec: LayerSpec,
        state: LayerState,
        query: Float[Array, "B T N D"],
        key: Float[Array, "B T K D"],
        value: Float[Array, "B T K D"],
        positions: Int[Array, "B T"],
        rope: Rotation,
        *,
        held_spec: LayerSpec | None = None,
    ) -> tuple[Float[Array, "B T N D"], LayerState]:
        """Attention of further tokens over the cache and themselves, and the state that keeps both.

        Args:
            spec: the shape of the state to return.
            state: what is cached.
            query: before RoPE.
            key: before RoPE.
            value: values.
            positions: absolute, continuing the row's; then `EMPTY` for pads.
            rope: the model's position embedding.
            held_spec: the shape of `state`, where it differs from `spec`.
        """
        asked, key = self._asked(spec, query, key, positions, rope)
        held = by_head(state, held_spec or spec)
        rows = append_rows(held, prompt_rows(key, value, positions))
        output, log_sum_exp = self.attend_turn(asked, rows, state.lengths, layer=spec.layer)
        return output, self.keep(spec, rows, asked._replace(log_sum_exp=log_sum_exp))

    @staticmethod
    def _asked(spec: LayerSpec, query: Array, key: Array, positions: Array, rope: Rotation) -> tuple[Asked, Array]:
        """A call's queries, and its keys rotated."""
        asked = Asked(rope.rotate(query, positions), query, positions, None, rope, spec.implementation)
        return asked, rope.rotate(key, positions)

    def attend_prompt(
        self, asked: Asked, key: Float[Array, "B T K D"], value: Float[Array, "B T K D"], *, layer: int
    ) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"] | None]:
        """A prompt's attention over itself: its output, and the log-sum-exps if `needs_log_sum_exp`.

        Args:
            asked: the queries.
            key: rotated.
            value: values.
            layer: its index.
        """
        del layer
        return prefill_attention(
            asked.query,
            key,
            value,
            log_sum_exp=self.needs_log_sum_exp,
            implementation=asked.implementation_of("prefill_attention"),
        )

    def attend_turn(
        self, asked: Asked, rows: Rows, held: Int[Array, "B K"], *, layer: int
    ) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"] | None]:
        """The attention of further tokens over cached ones and themselves.

        Args:
            asked: the queries.
            rows: all tokens, in ascending position.
            held: how many of them were cached.
            layer: its index.
        """
        del held, layer
        dtype = asked.query.dtype
        return extend_attention(
            asked.query,
            rows.key.astype(dtype),
            rows.value.astype(dtype),
            asked.positions,
            rows.positions,
            implementation=asked.implementation_of("extend_attention"),
        )

    def keep(self, spec: LayerSpec, rows: Rows, asked: Asked) -> LayerState:
        """The state that holds what stays of all tokens."""
        return pack(rows, self.compress(spec, rows, asked), spec)

    def decode(
        self,
        spec: LayerSpec,
        state: LayerState,
        query: Float[Array, "B N D"],
        key: Float[Array, "B K D"],
        value: Float[Array, "B K D"],
        positions: Int[Array, "B"],
        rope: Rotation,
    ) -> tuple[Float[Array, "B N D"], LayerState]:
        """Attention of one token a row over the cache and itself, and the state that has it too.

        The output of a row without a free slot is NaN, and its state stays as it is: the token cannot be kept.

        Args:
            spec: the layer's shape.
            state: what is cached.
            query: before RoPE.
            key: before RoPE.
            value: values.
            positions: absolute; `EMPTY` leaves the row's state as it is.
            rope: the model's position embedding.
        """
        query, key = rotate_one(rope, query, positions), rotate_one(rope, key, positions)
        output = self.attend_cached(spec, state, query, key, value).output
        full = (state.lengths >= capacities(state, spec)).any(-1) & (positions != EMPTY)
        output = jnp.where(full[:, None, None], jnp.nan, output).astype(query.dtype)
        output, state = read_before_write(output, state)
        return output, write_token(state, spec, state.lengths, key, value, jnp.where(full, EMPTY, positions))

    def attend_cached(
        self,
        spec: LayerSpec,
        state: LayerState,
        query: Float[Array, "B N D"],
        key: Float[Array, "B K D"],
        value: Float[Array, "B K D"],
        *,
        sink_query: Float[Array, "B N D"] | None = None,
        sinks: int = 0,
        token_attention: bool = False,
    ) -> DecodeAttention:
        """Attention of one rotated token a row over the cache and itself."""
        return ragged_decode_attention(
            query,
            state.kv,
            state.lengths,
            segments=None if spec.shared else spec.slots,
            starts=state.starts,
            own_key=key,
            own_value=value,
            sink_query=sink_query,
            sinks=sinks,
            token_attention=token_attention,
            implementation=implementation_of(spec.implementation, "ragged_decode_attention"),
        )


def prompt_rows(key: Float[Array, "B T K D"], value: Float[Array, "B T K D"], positions: Int[Array, "B T"]) -> Rows:
    """The tokens of a call by KV head."""
    batch, length, kv_heads, _ = key.shape
    by_head_positions = jnp.broadcast_to(positions[:, None], (batch, kv_heads, length))
    return Rows(jnp.concatenate([key, value], axis=-1).swapaxes(1, 2), by_head_positions)


def seen_tokens(rows: Rows) -> Int[Array, "B K"]:
    """Tokens that each row has seen, kept or not: the newest is always there."""
    newest = rows.positions.max(-1).max(-1, keepdims=True)
    return jnp.broadcast_to(newest + 1, rows.positions.shape[:2])


def last_queries(asked: Asked, count: int) -> tuple[Float[Array, "B W N D"], Int[Array, "B W"]]:
    """The last `count` queries of each row, and their positions, `EMPTY` where a row has fewer."""
    length = asked.positions.shape[1]
    tokens = (asked.positions != EMPTY).sum(-1, dtype=jnp.int32)
    index = tokens[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None]
    inside = jnp.clip(index, 0, length - 1)
    query = jnp.take_along_axis(asked.query, inside[:, :, None, None], axis=1)
    positions = jnp.take_along_axis(asked.positions, inside, axis=1)
    return query, jnp.where(index < 0, EMPTY, positions)
