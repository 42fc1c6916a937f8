"""How the TPU kernel divides its work: blocks, parts and cores, and what it loads of each head."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kvjax_kernels.split_rows import head_starts
from kvjax_kernels.tpu_layout import LANES, SUBLANES, round_up

# A load of 512 KB takes longer to arrive (0.3 us and more) than to compute on (about 400 instructions).
_BLOCK_BYTES = 512 * 1024
# From so many heads on, cores share them out whole. Fewer are each split over the cores, which balances any lengths.
_HEADS_TO_SHARE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is static of a call. An *item* is one part of a head.

    Attributes:
        heads: KV heads of all rows, B * K.
        kv_heads: K.
        head_dim: D.
        block: slots of a load.
        tile: what a load's first slot and size are multiples of.
        columns: slots of the widest head in whole blocks.
        cores: TensorCores that share the work.
        parts: into how many each head's blocks are split.
        slots_last: whether the kernel takes the cache as [B, 2D, S].
        sinks: slots of a head that the second query is for.
        scale: factor of the scores.
    """

    heads: int
    kv_heads: int
    head_dim: int
    block: int
    tile: int
    columns: int
    cores: int
    parts: int
    slots_last: bool
    sinks: int
    scale: float

    @property
    def steps(self) -> int:
        """Items of one core."""
        return self.parts * self.heads // self.cores

    @property
    def cuts(self) -> bool:
        """Whether keys and values are cut out of a block: not inside of 128 lanes, where a cut moves everything."""
        return self.slots_last or self.head_dim % LANES == 0


def make_plan(
    kv: Float[Array, "B S twoD"],
    kv_heads: int,
    *,
    segments: tuple[int, ...] | None,
    scale: float = 1.0,
    sinks: int = 0,
    cores: int | None = None,
) -> Plan:
    """The plan for these shapes; `cores` is asked of the default device if not given."""
    batch, slots, width = kv.shape
    slots_last = width % LANES != 0
    tile = LANES if slots_last else SUBLANES
    widest = slots + tile - 1
    if segments is not None:
        widest = max(start % tile + size for start, size in zip(head_starts(segments), segments, strict=True))
    fitting = max(_BLOCK_BYTES // (width * kv.dtype.itemsize) // LANES * LANES, LANES)
    block = min(fitting, round_up(widest, LANES))
    heads, cores = batch * kv_heads, _device_cores() if cores is None else cores
    return Plan(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // 2,
        block=block,
        tile=tile,
        columns=round_up(widest, block),
        cores=cores,
        parts=1 if heads >= _HEADS_TO_SHARE and heads % cores == 0 else cores,
        slots_last=slots_last,
        sinks=sinks,
        scale=scale,
    )


def _device_cores() -> int:
    try:
        return pltpu.get_tpu_info().num_cores
    except ValueError:
        # Compiled on a machine without a TPU. What is planned for two cores runs on one as well.
        return 2


class Span(NamedTuple):
    """One part of a head's slots, counted from the tile in which the head begins.

    Attributes:
        origin: the slot of the cache from which they are counted.
        start: the head's first slot.
        stop: the slot after its last.
        first: the part's first block.
        last: the block after its last.
    """

    origin: jax.Array
    start: jax.Array
    stop: jax.Array
    first: jax.Array
    last: jax.Array


def span(start: jax.Array, length: jax.Array, part: jax.Array | int, plan: Plan) -> Span:
    """Part number `part` of a head: an equal share of the blocks that the head fills."""
    begin = lax.rem(start, jnp.int32(plan.tile))
    stop = begin + length
    blocks = jnp.where(length > 0, _ceil_div(stop, plan.block), 0)
    share = _ceil_div(blocks, plan.parts)
    first = jnp.minimum(part * share, blocks)
    return Span(start - begin, begin, stop, first, jnp.minimum(first + share, blocks))


def loaded_slots(of: Span, index: jax.Array | int, plan: Plan) -> jax.Array:
    """How many slots the load of block `index` copies."""
    return jnp.minimum(_ceil_div(of.stop, plan.tile) * plan.tile - index * plan.block, plan.block)


def _ceil_div(x: jax.Array, y: int) -> jax.Array:
    # `//` rounds down for negative numbers too, which takes more scalar code, and a device that is there.
    return lax.div(x + (y - 1), jnp.int32(y))
