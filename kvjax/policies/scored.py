"""Policies that keep the tokens with the highest score: allocation, score and eviction, put together."""

import abc
import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.allocation import (
    Adaptive,
    Allocation,
    Uniform,
    check_budget,
    check_choice,
    check_rows,
    count_table,
    endless_counts,
    endless_length,
    largest_counts,
)
from kvjax.attention import Asked
from kvjax.eviction import lowest_slot
from kvjax.policies.base import Policy, seen_tokens
from kvjax.policies.numbers import store_count
from kvjax.rope import Rotation, rotate_one
from kvjax.scores import split_shared
from kvjax.state import (
    EMPTY,
    Kept,
    LayerSpec,
    LayerState,
    ModelSpec,
    Rows,
    capacities,
    read_before_write,
    segments,
    write_token,
)
from kvjax_kernels import select_highest
from kvjax_kernels.dispatch import implementation_of
from kvjax_kernels.pooled_selection.ranks import protect


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredPolicy(Policy):
    """Keeps the tokens with the highest score, and the first and last ones whatever theirs.

    A subclass gives the score (`score`), and for a cache that evicts while decoding how one step changes it (`step`).

    Attributes:
        budget: tokens kept per KV head, all included; a float in (0, 1) is a fraction of the prompt.
        sinks: first tokens that always stay.
        allocation: how the budget is spread over layers and heads: `Uniform()`, `Pyramid()`, `Adaptive()`.
        evict: "prompt", once after every prompt or turn, decoded tokens being appended; or "decode", at every step
            too: the token with the lowest score makes room, and the cache never grows.
    """

    budget: int | float
    sinks: int = 4
    allocation: Allocation = Uniform()  # noqa: RUF009 (frozen, so it may be shared)
    evict: Literal["prompt", "decode"] = "prompt"

    #: Why `evict="decode"` cannot be had, where it cannot.
    no_decode_because: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        store_count(self, "sinks", at_least=0)
        check_choice("evict", self.evict, ("prompt", "decode"))
        if not isinstance(self.allocation, Allocation):
            raise ValueError(f"`allocation` must be one such as `kvjax.Pyramid()`, got {self.allocation!r}.")
        if self.evict == "decode" and self.no_decode_because is not None:
            raise ValueError(f'{type(self).__name__} cannot have `evict="decode"`: {self.no_decode_because}.')
        if self.evict == "decode" and type(self).step is ScoredPolicy.step:
            raise ValueError(f'{type(self).__name__} cannot have `evict="decode"`: it has no `step`.')
        if self.evict == "decode" and isinstance(self.allocation, Adaptive):
            raise ValueError(
                'an `Adaptive` allocation cannot have `evict="decode"`: heads would trade slots at every step, and '
                "rows of the cache would move."
            )
        fewest, what = self._least
        object.__setattr__(self, "budget", check_budget(self.budget, at_least=max(fewest, 1), what=what))

    @property
    def fewest(self) -> tuple[int, str]:
        """Tokens that every head keeps whatever its budget, and where that number comes from."""
        return self.sinks, "`sinks`"

    @property
    def _least(self) -> tuple[int, str]:
        """`fewest`, and one more where a step would find only sinks to evict."""
        fewest, what = self.fewest
        if self.evict == "decode" and fewest <= self.sinks:
            return self.sinks + 1, "`sinks` + 1"
        return fewest, what

    def recent(self, counts: Int[Array, "B K"]) -> Int[Array, "B K"]:
        """Last tokens that stay, of heads that keep `counts` tokens."""
        return jnp.full_like(counts, self.fewest[0] - self.sinks)

    @abc.abstractmethod
    def score(self, rows: Rows, asked: Asked) -> Float[Array, "B K S"]:
        """How much each token matters after a prompt or a turn, higher = keep.

        It depends on neither `budget` nor `allocation`: where several are tried on one prompt, they share it.

        Args:
            rows: all tokens, in ascending position; their `scores` are those of cached ones, where remembered.
            asked: the queries of this call.
        """

    def rank(
        self, scores: Float[Array, "B K S"], positions: Int[Array, "B K S"], newest: Int[Array, "B"]
    ) -> Float[Array, "B K S"]:
        """What is compared when one token must go: the scores, unless they depend on a token's age."""
        del positions, newest
        return scores

    def step(
        self,
        scores: Float[Array, "B S"],
        attention: Float[Array, "B S"],
        own_attention: Float[Array, "B K"],
        key: Float[Array, "B K D"],
    ) -> tuple[Float[Array, "B S"], Float[Array, "B K"]]:
        """The scores after one decoding step, and those of the token that asked.

        Args:
            scores: of all slots.
            attention: probability that each slot's token got, summed over its group's query heads.
            own_attention: the same for the token that asked.
            key: its rotated key.
        """
        raise NotImplementedError(f'{type(self).__name__} has no `step`, which `evict="decode"` needs.')

    def check_lengths(self, lengths: np.ndarray) -> None:
        """See `Policy.check_lengths`."""
        fewest, what = self._least
        check_rows(self.budget, lengths, at_least=max(fewest, 1), what=what)

    def kept_tokens(self, model: ModelSpec, lengths: range) -> list[tuple[int, ...]]:
        """See `Policy.kept_tokens`."""
        fewest = self._least[0]
        layers = model.num_layers
        if self.evict == "decode" and isinstance(self.budget, int):
            most = endless_counts(self.allocation, self.budget, layers=layers, fewest=fewest)
        else:
            most = largest_counts(self.allocation, self.budget, lengths, layers=layers, fewest=fewest)
        return [(max(int(count), 1),) * model.num_kv_heads for count in most]

    def slots(self, kept: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
        """See `Policy.slots`."""
        return kept if self.evict == "decode" else super().slots(kept, max_new_tokens)

    def layer_specs(
        self,
        model: ModelSpec,
        prompt_length: int,
        max_new_tokens: int,
        *,
        shortest: int = 1,
        dtype: str | None = None,
    ) -> tuple[LayerSpec, ...]:
        """See `Policy.layer_specs`.

        With a budget in tokens all prompts over some length are alike, so that later turns compile once.
        """
        if isinstance(self.budget, int):
            layers, fewest = model.num_layers, self._least[0]
            enough = endless_length(self.allocation, self.budget, layers=layers, fewest=fewest)
            shortest, prompt_length = min(shortest, enough), min(prompt_length, enough)
        specs = super().layer_specs(model, prompt_length, max_new_tokens, shortest=shortest, dtype=dtype)
        return tuple(dataclasses.replace(spec, shared=self.allocation.shared) for spec in specs)

    @property
    def remembers_scores(self) -> bool:
        """See `Policy.remembers_scores`."""
        return self.evict == "decode"

    def free_slots(self, spec: LayerSpec, state: LayerState) -> Int[Array, "B"] | None:
        """See `Policy.free_slots`."""
        return None if self.evict == "decode" else super().free_slots(spec, state)

    def counts(self, spec: LayerSpec, seen: Int[Array, "B K"]) -> Int[Array, "B K"]:
        """Tokens that each head of a layer may keep, of rows that have seen so many."""
        if self.evict == "decode" and isinstance(self.budget, int):
            return jnp.minimum(seen, spec.kept[0])
        table = count_table(
            self.allocation,
            self.budget,
            layers=spec.model.num_layers,
            fewest=self._least[0],
            max_length=spec.max_length,
        )[spec.layer]
        return jnp.asarray(table)[jnp.clip(seen, 0, len(table) - 1)]

    def representative(self, spec: LayerSpec) -> LayerSpec:
        """See `Policy.representative`. Layers are alike where they have the same budget whatever the length."""
        allocation = self.allocation.layers if isinstance(self.allocation, Adaptive) else self.allocation
        return spec.shape if isinstance(allocation, Uniform) else spec

    def compress(self, spec: LayerSpec, rows: Rows, asked: Asked) -> Kept:
        """See `Policy.compress`."""
        return self.select(spec, rows, self.score(rows, asked))

    def select(self, spec: LayerSpec, rows: Rows, scores: Float[Array, "B K S"]) -> Kept:
        """Which tokens stay, by their scores; see `compress`."""
        counts = self.counts(spec, seen_tokens(rows))
        if not spec.shared:
            counts = jnp.minimum(counts, rows.lengths)
        implementation = implementation_of(spec.implementation, "select_highest")
        ranks = self.rank(scores, rows.positions, rows.positions.max((1, 2)))
        ranks = protect(ranks, rows.positions, sinks=self.sinks, recent=self.recent(counts))
        if isinstance(self.allocation, Adaptive):
            counts = split_shared(ranks, counts, safeguard=self.allocation.safeguard)
        most = sum(spec.kept) if spec.shared else spec.kept[0]
        tokens, held = select_highest(ranks, counts, most=most, implementation=implementation)
        return Kept(tokens, held, scores if self.evict == "decode" else None)

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
        """See `Policy.decode`. With `evict="decode"` a full head loses its lowest token after the attention."""
        if self.evict == "prompt":
            return super().decode(spec, state, query, key, value, positions, rope)
        query, key = rotate_one(rope, query, positions), rotate_one(rope, key, positions)
        attention = self.attend_cached(spec, state, query, key, value, token_attention=True)
        assert state.scores is not None
        assert attention.token_attention is not None
        assert attention.own_attention is not None
        scores, own_score = self.step(state.scores, attention.token_attention, attention.own_attention, key)
        scores = jnp.where((positions != EMPTY)[:, None], scores, state.scores)
        # A fraction of the prompt is full from the start; its slots are those that it holds.
        capacity = capacities(state, spec) if isinstance(self.budget, int) else state.lengths
        placed = segments(state.positions, state, spec)
        ranks = self.rank(segments(scores, state, spec), placed, positions)
        lowest = lowest_slot(ranks, placed, positions, sinks=self.sinks, recent=self.recent(capacity))
        slots = jnp.where(state.lengths < capacity, state.lengths, lowest)
        # With the scores ordered too, the attention that they come from does not wait for the layers behind.
        state = state._replace(scores=scores)
        output, state = read_before_write(attention.output.astype(query.dtype), state)
        state = write_token(state, spec, slots, key, value, positions, own_score)
        return output, state
