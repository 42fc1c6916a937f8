"""The rows that a decoding step loads are counted as the kernels load them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_kernels import mosaic_gpu
from kvjax_kernels.ragged_decode_attention import gpu, tpu_plan, traffic


def tpu_rows(lengths: np.ndarray, starts: np.ndarray, plan: tpu_plan.Plan) -> int:
    """Rows that the kernel copies, block by block of each part."""
    rows = 0
    for part in range(plan.parts):
        span = tpu_plan.span(jnp.asarray(starts), jnp.asarray(lengths), part, plan)
        for index in range(int(span.last.max())):
            inside = (index >= span.first) & (index < span.last)
            rows += int(jnp.where(inside, tpu_plan.loaded_slots(span, index, plan), 0).sum())
    return rows


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rows_are_counted_as_the_kernels_load_them(head_dim):
    rng = np.random.default_rng(0)
    segments = (700, 40, 2100, 1)
    slots = sum(segments)
    shape: dict[str, Any] = {"slots": sum(segments), "head_dim": head_dim, "dtype": "bfloat16"}
    lengths = np.minimum(rng.integers(0, 2200, (5, 4)), segments).astype(np.int32)
    lengths[0] = 0
    starts = np.broadcast_to(np.cumsum((0, *segments[:-1])), lengths.shape).astype(np.int32)
    kv = jnp.zeros((5, slots, 2 * head_dim), jnp.bfloat16)
    for cores in (1, 2):
        plan = tpu_plan.make_plan(kv, 4, segments=segments, cores=cores)
        loaded = tpu_rows(lengths, starts, plan)
        assert traffic.loaded_rows("tpu", lengths, segments=segments, **shape) == loaded
        assert traffic.loaded_rows("tpu", lengths, starts=starts, **shape) == loaded
    if head_dim % 32 == 0:
        block = gpu.block_rows(head_dim)
        parts = mosaic_gpu.count_parts(lengths.size, -(-max(segments) // block), thread_blocks=6)
        shares = [mosaic_gpu.share(lengths, part, parts=parts, block=block)[1] for part in range(parts)]
        loaded = block * int(np.sum(shares))
        assert traffic.loaded_rows("gpu", lengths, segments=segments, **shape) == loaded
    in_blocks = sum(512 * -(-int(length) // 512) for length in lengths.flat)
    assert traffic.loaded_rows("xla", lengths, segments=segments, **shape) == in_blocks
    assert traffic.loaded_rows("xla", lengths, starts=starts, **shape) == in_blocks
    equal = (slots // 4,) * 4
    assert traffic.loaded_rows("xla", lengths, segments=equal, **{**shape, "slots": sum(equal)}) == 2 * 5 * sum(equal)


def test_where_a_kernel_cannot_plain_jax_is_counted():
    shape = {"batch": 2, "query_heads": 8, "kv_heads": 2, "slots": 64}
    assert traffic.backend_for("gpu", head_dim=128, dtype="bfloat16", **shape) == "gpu"
    assert traffic.backend_for("gpu", head_dim=128, dtype="float32", **shape) == "xla"
    assert traffic.backend_for("gpu", head_dim=80, dtype="bfloat16", **shape) == "xla"
    assert traffic.backend_for("tpu", head_dim=80, dtype="float32", **shape) == "tpu"
    assert traffic.backend_for("tpu", head_dim=128, dtype="float16", **shape) == "xla"
    assert traffic.backend_for("xla", head_dim=128, dtype="bfloat16", **shape) == "xla"
