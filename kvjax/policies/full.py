"""Full: every token stays."""

import dataclasses

import jax.numpy as jnp

from kvjax.attention import Asked
from kvjax.policies.base import Policy
from kvjax.state import Kept, LayerSpec, LayerState, ModelSpec, Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keeps every token: what the other policies are measured against."""

    def kept_tokens(self, model: ModelSpec, lengths: range) -> list[tuple[int, ...]]:
        """See `Policy.kept_tokens`."""
        return [(lengths[-1],) * model.num_kv_heads] * model.num_layers

    def representative(self, spec: LayerSpec) -> LayerSpec:
        """See `Policy.representative`."""
        return spec.shape

    def compress(self, spec: LayerSpec, rows: Rows, asked: Asked) -> Kept:
        """See `Policy.compress`."""
        del asked
        slots = jnp.arange(min(max(spec.slots), rows.positions.shape[2]), dtype=jnp.int32)[None, None]
        return Kept(None, slots < rows.lengths[..., None])

    def keep(self, spec: LayerSpec, rows: Rows, asked: Asked) -> LayerState:
        """See `Policy.keep`."""
        # More tokens than slots can only come from a spec made for a shorter prompt: make it loud.
        lost = (rows.lengths > max(spec.slots))[:, :, None, None]
        kv = jnp.where(lost, jnp.asarray(jnp.nan, rows.kv.dtype), rows.kv)
        return super().keep(spec, rows._replace(kv=kv), asked)
