"""StreamingLLM: the first tokens and a rolling window."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.allocation import (
    budget_lengths,
    budget_tokens,
    check_budget,
    check_choice,
    check_rows,
    from_compression_ratio,
)
from kvjax.attention import Asked, streaming_extend_attention, streaming_prefill_attention
from kvjax.eviction import ring_rows, ring_slot
from kvjax.policies.base import Policy, seen_tokens
from kvjax.policies.numbers import store_count
from kvjax.rope import Rotation, rotate_one
from kvjax.state import (
    Kept,
    LayerSpec,
    LayerState,
    ModelSpec,
    Rows,
    read_before_write,
    write_token,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """Keeps the first `sinks` tokens and the last `window`, in a ring: a step overwrites the oldest of the window.

    Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453). As in the paper,
    positions are places in the cache, so that a stream may run past the trained context. Keys are not rotated
    again for that: only the distance to the sinks is capped, by a second query. As in the authors' code, a token
    attends to sinks, window and itself; the oldest leaves after the step.

    Attributes:
        budget: tokens kept per KV head, sinks and window; a float in (0, 1) is a fraction of the prompt. None is
            `sinks + window`.
        sinks: tokens kept from the start.
        window: tokens kept from the end. None is `budget - sinks`.
        positions: "cache" (the paper) or "absolute" (kvpress, KVCache-Factory: no stream past the trained context).
        prefill_mask: "dense", causal attention over a whole prompt (the authors' first prompt, kvpress), or
            "streaming", where each token sees what it would see if it were decoded: the cost of a prompt is then
            linear, and its positions bounded too. "streaming" needs a budget in tokens.
    """

    budget: int | float | None = None
    sinks: int = 4
    window: int | None = None
    positions: Literal["cache", "absolute"] = "cache"
    prefill_mask: Literal["dense", "streaming"] = "dense"

    def __post_init__(self) -> None:
        store_count(self, "sinks", at_least=0)
        if self.window is not None:
            store_count(self, "window", at_least=1)
        if self.budget is None and self.window is None:
            raise ValueError("StreamingLLM needs a `budget` or a `window`, got neither.")
        check_choice("positions", self.positions, ("cache", "absolute"))
        check_choice("prefill_mask", self.prefill_mask, ("dense", "streaming"))
        if self.budget is not None:
            budget = check_budget(self.budget, at_least=self.sinks + 1, what="`sinks` + a window of 1")
            object.__setattr__(self, "budget", budget)
            if self.window is not None and self.sinks + self.window != budget:
                raise ValueError(
                    f"`sinks` + `window` must be the `budget` where both are given, "
                    f"got {self.sinks} + {self.window} and {budget}."
                )
            if isinstance(budget, float) and self.prefill_mask == "streaming":
                raise ValueError(f'`prefill_mask="streaming"` needs a `budget` in tokens, got {budget}.')

    @classmethod
    def kvpress(cls, *, compression_ratio: float, n_sink: int = 4) -> "StreamingLLM":
        """Kvpress's StreamingLLMPress: the first `n_sink` and the last tokens, at absolute positions."""
        return cls(budget=from_compression_ratio(compression_ratio), sinks=n_sink, positions="absolute")

    @property
    def total(self) -> int | float:
        """The budget, whichever way it was given."""
        if self.budget is not None:
            return self.budget
        assert self.window is not None
        return self.sinks + self.window

    def check_lengths(self, lengths: np.ndarray) -> None:
        """See `Policy.check_lengths`."""
        check_rows(self.total, lengths, at_least=self.sinks + 1, what="`sinks` + a window of 1")

    def kept_tokens(self, model: ModelSpec, lengths: range) -> list[tuple[int, ...]]:
        """See `Policy.kept_tokens`. The ring has all its slots from the start."""
        total = self.total
        kept = total if isinstance(total, int) else budget_tokens(total, lengths[-1])
        return [(max(kept, self.sinks + 1),) * model.num_kv_heads] * model.num_layers

    def layer_specs(
        self,
        model: ModelSpec,
        prompt_length: int,
        max_new_tokens: int,
        *,
        shortest: int = 1,
        dtype: str | None = None,
    ) -> tuple[LayerSpec, ...]:
        """See `Policy.layer_specs`. With a budget in tokens all lengths are alike: a stream compiles once."""
        if isinstance(self.total, int):
            shortest = prompt_length = self.total
        return super().layer_specs(model, prompt_length, max_new_tokens, shortest=shortest, dtype=dtype)

    def slots(self, kept: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
        """See `Policy.slots`. Decoded tokens take the place of older ones."""
        del max_new_tokens
        return kept

    def free_slots(self, spec: LayerSpec, state: LayerState) -> None:
        """See `Policy.free_slots`. A ring takes tokens for ever."""

    def is_bounded(self, prompt_length: int, max_positions: int) -> bool:
        """See `Policy.is_bounded`. The ring itself may be larger than what the model was trained for."""
        total = self.total
        held = total if isinstance(total, int) else budget_tokens(total, prompt_length)
        # A token sees the ring, and itself behind it.
        fits = held < max_positions and (prompt_length <= max_positions or self.prefill_mask == "streaming")
        return self.positions == "cache" and fits

    @property
    def sees_whole_prompt(self) -> bool:
        """See `Policy.sees_whole_prompt`."""
        return self.prefill_mask == "dense"

    def representative(self, spec: LayerSpec) -> LayerSpec:
        """See `Policy.representative`."""
        return spec.shape

    def compress(self, spec: LayerSpec, rows: Rows, asked: Asked) -> Kept:
        """See `Policy.compress`. The window lies in the ring where decoding would have written it."""
        del asked
        seen = seen_tokens(rows)
        total = budget_lengths(self.total, seen, max_length=spec.max_length)
        kept = jnp.minimum(total, rows.lengths)
        return Kept(*ring_rows(rows, seen, kept, self._ring(kept), sinks=self.sinks, slots=spec.slots[0]))

    def attend_prompt(
        self, asked: Asked, key: Float[Array, "B T K D"], value: Float[Array, "B T K D"], *, layer: int
    ) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"] | None]:
        """See `Policy.attend_prompt`."""
        if self.prefill_mask == "dense":
            return super().attend_prompt(asked, key, value, layer=layer)
        window = self.total - self.sinks
        assert isinstance(window, int)
        to_sinks = asked.rope.rotate(asked.unrotated, self._places(asked.positions))
        return streaming_prefill_attention(asked, to_sinks, key, value, window=window, sinks=self.sinks), None

    def attend_turn(
        self, asked: Asked, rows: Rows, held: Int[Array, "B K"], *, layer: int
    ) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"] | None]:
        """See `Policy.attend_turn`."""
        if self.positions == "absolute" and self.prefill_mask == "dense":
            return super().attend_turn(asked, rows, held, layer=layer)
        places, window = held[:, :1] + jnp.arange(asked.positions.shape[1], dtype=jnp.int32)[None], None
        if self.prefill_mask == "streaming":
            places, window = self._places(asked.positions), self.total - self.sinks
        assert not isinstance(window, float)
        to_sinks = asked.rope.rotate(asked.unrotated, places)
        return streaming_extend_attention(asked, to_sinks, rows, window=window, sinks=self.sinks), None

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
        """See `Policy.decode`. Overwrites the oldest token of the window."""
        rotated, key = rotate_one(rope, query, positions), rotate_one(rope, key, positions)
        capped = self.positions == "cache" and self.sinks > 0
        attention = self.attend_cached(
            spec,
            state,
            rotated,
            key,
            value,
            sink_query=rotate_one(rope, query, state.lengths[:, 0]) if capped else None,
            sinks=self.sinks if capped else 0,
        )
        place = jnp.broadcast_to(positions[:, None], state.lengths.shape)
        slots = ring_slot(place, self._ring(state.lengths), sinks=self.sinks)
        output, state = read_before_write(attention.output.astype(query.dtype), state)
        return output, write_token(state, spec, slots, key, value, positions)

    def _places(self, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Where a token stands in the cache, seen from the sinks, when it is decoded."""
        if self.positions == "absolute":
            return positions
        total = self.total
        assert isinstance(total, int)
        return jnp.minimum(positions, total)

    def _ring(self, kept: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Slots of each row's ring. A fraction of the prompt is full from the start: its ring is what is kept."""
        if isinstance(self.total, int):
            return jnp.full_like(kept, self.total - self.sinks)
        return jnp.maximum(kept - self.sinks, 1)
