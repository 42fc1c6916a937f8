"""Full: every token stays."""

import dataclasses

import jax.numpy as jnp

from kvjax.policies.base import Asked, Policy
from kvjax.state import LayerSpec, ModelSpec, Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keeps every token: what the other policies are measured against."""

    def kept_tokens(self, model: ModelSpec, lengths: range) -> list[tuple[int, ...]]:
        """See `Policy.kept_tokens`."""
        return [(lengths[-1],) * model.num_kv_heads] * model.num_layers

    def compress(self, spec: LayerSpec, rows: Rows, asked: Asked) -> Rows:
        """See `Policy.compress`."""
        del asked
        slots = max(spec.slots)
        # More tokens than slots can only come from a spec made for a shorter prompt: make it loud.
        lost = (rows.lengths > slots)[:, :, None, None]
        return Rows(
            key=rows.key[:, :, :slots],
            value=jnp.where(lost, jnp.nan, rows.value[:, :, :slots]).astype(rows.value.dtype),
            positions=rows.positions[:, :, :slots],
        )
