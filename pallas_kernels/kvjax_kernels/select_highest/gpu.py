"""The GPU kernel of the choice: each head's threshold, found by counting, two bits at a pass over its scores."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from kvjax_kernels import mosaic_gpu
from kvjax_kernels.blocks import pad_to
from kvjax_kernels.devices import missing_nvidia_gpu
from kvjax_kernels.pooled_selection.ranks import LOWEST, places
from kvjax_kernels.select_highest.xla import ascending

# A step's tile of scores, sixteen for each thread.
_ROWS, _COLUMNS = 16, 128
_STAGES = 4
_BITS = 2


def unsupported_reason(scores: Float[Array, "B K S"], *_: Any, interpret: bool, **__: Any) -> str | None:
    """Why the kernel cannot do this; None if it can."""
    return None if interpret else missing_nvidia_gpu(scores, least=mosaic_gpu.OLDEST)


def run(
    scores: Float[Array, "B K S"], counts: Int[Array, "B K"], *, most: int, interpret: bool = False
) -> tuple[Int[Array, "B K C"], Bool[Array, "B K C"]]:
    """See `api.select_highest`. What lies above the thresholds is gathered by XLA."""
    batch, kv_heads, _ = scores.shape
    place = places(scores.astype(jnp.float32))
    wanted = jnp.minimum(counts, most).astype(jnp.int32)
    tiles = pad_to(place, 2, _ROWS * _COLUMNS, fill=int(LOWEST)).reshape(batch, kv_heads, -1, _COLUMNS)

    def kernel(places_ref, wanted_ref, threshold_ref, threshold_s):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        number = wanted_ref[row, head]

        def refine(step, threshold):
            shift = 32 - _BITS * (step + 1)
            candidates = [threshold + (jnp.int32(more) << shift) for more in range(1, 2**_BITS)]

            def count(indices, tile_s, reached):
                del indices
                tile = tile_s[...]
                # All threads have read what the next copy overwrites.
                plgpu.commit_smem()
                return tuple(
                    total + (tile >= candidate).astype(jnp.int32)
                    for total, candidate in zip(reached, candidates, strict=True)
                )

            reached = plgpu.emit_pipeline(
                count,
                grid=(tiles.shape[2] // _ROWS,),
                in_specs=[plgpu.BlockSpec((_ROWS, _COLUMNS), lambda index: (index, 0))],
                max_concurrent_steps=_STAGES,
                init_carry=(jnp.zeros((_ROWS, _COLUMNS), jnp.int32),) * len(candidates),
            )(places_ref.at[row, head])
            enough = [(total.sum() >= number).astype(jnp.int32) for total in reached]
            return threshold + (sum(enough[1:], enough[0]) << shift)

        threshold = lax.fori_loop(0, 32 // _BITS, refine, jnp.int32(LOWEST))
        threshold_s[...] = jnp.full((_COLUMNS,), threshold, jnp.int32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(threshold_s, threshold_ref.at[row, head])
        plgpu.wait_smem_to_gmem(0)

    threshold = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, _COLUMNS), jnp.int32),
        grid=(batch, kv_heads),
        grid_names=("row", "head"),
        scratch_types=[plgpu.SMEM((_COLUMNS,), jnp.int32)],
        interpret=mosaic_gpu.interpreter(interpret),
        kernel_name="select_highest",
    )(tiles, wanted)
    return ascending(threshold[..., :1], place, wanted, most)
