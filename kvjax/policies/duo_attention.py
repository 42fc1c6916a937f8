"""DuoAttention: the full cache for heads that retrieve, sinks and a window for the others."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.allocation import check_choice
from kvjax.attention import Asked, streaming_extend_attention, streaming_prefill_attention
from kvjax.eviction import ring_rows, ring_slot
from kvjax.head_pattern import HeadPattern
from kvjax.policies.base import Policy, seen_tokens
from kvjax.policies.numbers import store_count, store_share
from kvjax.rope import Rotation, rotate_one
from kvjax.shipped_patterns import shipped_pattern
from kvjax.state import (
    EMPTY,
    Kept,
    LayerSpec,
    LayerState,
    ModelSpec,
    Rows,
    capacities,
    read_before_write,
    write_token,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DuoAttention(Policy):
    """Keeps everything for retrieval heads, and the first `sinks` and last `recent` tokens for streaming heads.

    Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads" (arXiv
    2410.10819). Which head does what is decided before serving, by a pattern that was learned for the model; nothing
    is scored at run time. Positions are absolute for all heads. A streaming head's segment really has only
    `sinks + recent` slots. A decoded token sees sinks, the last `recent` tokens and itself.

    Attributes:
        pattern: a score for every KV head of the model; None takes the one that kvjax comes with, where it has one.
        sparsity: share of streaming heads, the lowest scores; None where `threshold` is given.
        threshold: heads with a lower score stream; published patterns keep 81 to 95 % of the heads at 0.5.
        sinks: 64 (the paper's quality setting; 128 for efficiency).
        recent: 256.
        prefill_mask: "dense", causal attention over a prompt for all heads (the authors' evaluation), or
            "streaming", where tokens of streaming heads see only what they would see if they were decoded.
    """

    pattern: HeadPattern | None = None
    sparsity: float | None = None
    threshold: float | None = None
    sinks: int = 64
    recent: int = 256
    prefill_mask: Literal["dense", "streaming"] = "dense"

    def __post_init__(self) -> None:
        if self.pattern is not None and not isinstance(self.pattern, HeadPattern):
            raise ValueError(f"`pattern` must be a kvjax.HeadPattern, got {type(self.pattern).__name__}.")
        store_count(self, "sinks", at_least=0)
        store_count(self, "recent", at_least=1)
        check_choice("prefill_mask", self.prefill_mask, ("dense", "streaming"))
        if self.sparsity is None and self.threshold is None:
            object.__setattr__(self, "sparsity", 0.5)
        for name in ("sparsity", "threshold"):
            if getattr(self, name) is not None:
                store_share(self, name)
        HeadPattern.of([[0.0]]).streaming_heads(sparsity=self.sparsity, threshold=self.threshold)

    @classmethod
    def kvpress(
        cls, *, head_scores: np.ndarray, head_compression_ratio: float, sink_size: int, recent_size: int
    ) -> "DuoAttention":
        """Kvpress's DuoAttentionPress, which only masks what is dropped here for real."""
        pattern = HeadPattern.of(head_scores)
        return cls(pattern=pattern, sparsity=head_compression_ratio, sinks=sink_size, recent=recent_size)

    def for_model(self, model: ModelSpec) -> "DuoAttention":
        """This policy with a pattern.

        Raises:
            ValueError: none was given, and kvjax comes with none for this model.
        """
        return self if self.pattern is not None else dataclasses.replace(self, pattern=shipped_pattern(model))

    def streaming(self, layer: int) -> np.ndarray:
        """Which KV heads of a layer stream, [K] bool; for a policy that has a pattern."""
        assert self.pattern is not None, "`for_model` gives it one"
        return np.asarray(self.pattern.streaming_heads(sparsity=self.sparsity, threshold=self.threshold)[layer])

    def kept_tokens(self, model: ModelSpec, lengths: range) -> list[tuple[int, ...]]:
        """See `Policy.kept_tokens`."""
        mine = self.for_model(model)
        assert mine.pattern is not None
        shape = np.asarray(mine.pattern.scores).shape
        if shape != (model.num_layers, model.num_kv_heads):
            raise ValueError(
                f"`pattern` must have a score for each of the model's {model.num_layers} layers and "
                f"{model.num_kv_heads} KV heads, got {shape[0]} and {shape[1]}."
            )
        longest = lengths[-1]
        ring = min(self.sinks + self.recent, longest)
        return [
            tuple(ring if streams else longest for streams in mine.streaming(layer))
            for layer in range(model.num_layers)
        ]

    def layer_specs(
        self,
        model: ModelSpec,
        prompt_length: int,
        max_new_tokens: int,
        *,
        shortest: int = 1,
        dtype: str | None = None,
    ) -> tuple[LayerSpec, ...]:
        """See `Policy.layer_specs`. A ring has no more slots than there will be tokens."""
        most = prompt_length + max_new_tokens
        ring = min(self.sinks + self.recent, most)
        mine = self.for_model(model)
        return tuple(
            dataclasses.replace(spec, slots=tuple(ring if s else most for s in mine.streaming(spec.layer)))
            for spec in super().layer_specs(model, prompt_length, max_new_tokens, shortest=shortest, dtype=dtype)
        )

    def free_slots(self, spec: LayerSpec, state: LayerState) -> Int[Array, "B"] | None:
        """See `Policy.free_slots`. Only retrieval heads can be full, or rings that were made for fewer tokens."""
        fixed = ~self.for_model(spec.model).streaming(spec.layer) | (np.asarray(spec.slots) < self.sinks + self.recent)
        if not fixed.any():
            return None
        return (capacities(state, spec) - state.lengths)[:, fixed].min(-1)

    @property
    def sees_whole_prompt(self) -> bool:
        """See `Policy.sees_whole_prompt`."""
        return self.prefill_mask == "dense"

    def representative(self, spec: LayerSpec) -> LayerSpec:
        """See `Policy.representative`. The first layer whose heads of the same places stream."""
        mine = self.for_model(spec.model)
        layers = range(spec.layer + 1)
        first = next(layer for layer in layers if (mine.streaming(layer) == mine.streaming(spec.layer)).all())
        return dataclasses.replace(spec, layer=first)

    def compress(self, spec: LayerSpec, rows: Rows, asked: Asked) -> Kept:
        """See `Policy.compress`. A streaming head's window lies in the ring where decoding would have written it."""
        del asked
        slots = max(spec.slots)
        kept = jnp.minimum(rows.lengths, self.sinks + self.recent)
        ring, in_ring = ring_rows(
            rows, seen_tokens(rows), kept, jnp.full_like(kept, self.recent), sinks=self.sinks, slots=slots
        )
        index = jnp.arange(slots, dtype=jnp.int32)[None, None]
        streams = jnp.asarray(self.for_model(spec.model).streaming(spec.layer))[None, :, None]
        everything = index < rows.lengths[..., None]
        chosen = jnp.where(streams, in_ring, everything)
        return Kept(jnp.where(chosen, jnp.where(streams, ring, index), 0), chosen)

    def prefill(self, spec: LayerSpec, *arrays: Any, **settings: Any) -> tuple[Float[Array, "B T N D"], LayerState]:
        """See `Policy.prefill`."""
        return super(DuoAttention, self.for_model(spec.model)).prefill(spec, *arrays, **settings)

    def extend(self, spec: LayerSpec, *arrays: Any, **settings: Any) -> tuple[Float[Array, "B T N D"], LayerState]:
        """See `Policy.extend`."""
        return super(DuoAttention, self.for_model(spec.model)).extend(spec, *arrays, **settings)

    def attend_prompt(
        self, asked: Asked, key: Float[Array, "B T K D"], value: Float[Array, "B T K D"], *, layer: int
    ) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"] | None]:
        """See `Policy.attend_prompt`."""
        if self.prefill_mask == "dense":
            return super().attend_prompt(asked, key, value, layer=layer)

        def attend(part: Asked, heads: np.ndarray, streams: bool) -> Array:
            keys, values = key[:, :, heads], value[:, :, heads]
            if streams:
                return streaming_prefill_attention(part, part.query, keys, values, window=self.recent, sinks=self.sinks)
            return super(DuoAttention, self).attend_prompt(part, keys, values, layer=layer)[0]

        return self._by_kind(asked, layer, attend), None

    def attend_turn(
        self, asked: Asked, rows: Rows, held: Int[Array, "B K"], *, layer: int
    ) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"] | None]:
        """See `Policy.attend_turn`."""
        if self.prefill_mask == "dense":
            return super().attend_turn(asked, rows, held, layer=layer)

        def attend(part: Asked, heads: np.ndarray, streams: bool) -> Array:
            mine = Rows(rows.kv[:, heads], rows.positions[:, heads])
            if streams:
                return streaming_extend_attention(part, part.query, mine, window=self.recent, sinks=self.sinks)
            return super(DuoAttention, self).attend_turn(part, mine, held[:, heads], layer=layer)[0]

        return self._by_kind(asked, layer, attend), None

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
        """See `Policy.decode`. Retrieval heads append, streaming heads overwrite the oldest of their window."""
        query, key = rotate_one(rope, query, positions), rotate_one(rope, key, positions)
        output = self.attend_cached(spec, state, query, key, value).output
        place = jnp.broadcast_to(positions[:, None], state.lengths.shape)
        ring = ring_slot(place, jnp.full_like(place, self.recent), sinks=self.sinks)
        streams = jnp.asarray(self.for_model(spec.model).streaming(spec.layer))[None]
        slots = jnp.where(streams, ring, state.lengths)
        full = (slots >= capacities(state, spec)).any(-1) & (positions != EMPTY)
        output = jnp.where(full[:, None, None], jnp.nan, output).astype(query.dtype)
        output, state = read_before_write(output, state)
        return output, write_token(state, spec, slots, key, value, jnp.where(full, EMPTY, positions))

    def _by_kind(
        self, asked: Asked, layer: int, attend: Callable[[Asked, np.ndarray, bool], Array]
    ) -> Float[Array, "B T N D"]:
        """Attention of retrieval and of streaming heads, each by `attend(queries, KV heads, streams)`, in order."""
        streams = self.streaming(layer)
        batch, length, query_heads, head_dim = asked.query.shape
        grouped = asked.query.reshape(batch, length, len(streams), -1, head_dim)
        order, outputs = [], []
        for kind in (False, True):
            heads = np.flatnonzero(streams == kind)
            if len(heads):
                part = asked._replace(query=grouped[:, :, heads].reshape(batch, length, -1, head_dim))
                outputs.append(attend(part, heads, kind).reshape(batch, length, len(heads), -1, head_dim))
                order.extend(heads)
        output = jnp.concatenate(outputs, axis=2)[:, :, np.argsort(order)]
        return output.reshape(batch, length, query_heads, head_dim)
