"""The TPU kernel: a tile of a head's rows is fetched while the tile before is stored, chunk by chunk."""

import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kvjax_kernels.compact import tpu
from kvjax_kernels.compact.tpu import TILE, buffers, fetch, fetched, source_specs, sources
from kvjax_kernels.compact_in_place.paths import paths_of
from kvjax_kernels.tpu_layout import LANES, SUBLANES, interpreter, round_up


def unsupported_reason(
    pages: Float[Array, "P R W"], table: Int[Array, "H N"], source: Int[Array, "H C"], *, interpret: bool
) -> str | None:
    """Why the kernel cannot do this; None if it can."""
    del table
    if pages.shape[1] % SUBLANES:
        return f"pages must have a multiple of {SUBLANES} slots, got {pages.shape[1]}"
    return tpu.unsupported_reason(pages, source, interpret=interpret)


def run(
    pages: Float[Array, "P R W"],
    table: Int[Array, "H N"],
    source: Int[Array, "H C"],
    *,
    tile: int = TILE,
    interpret: bool = False,
) -> Float[Array, "P R W"]:
    """See `api.compact_in_place`; chunks of slots that keep what they hold are neither read nor written."""
    number, size, width = pages.shape
    heads, count = source.shape
    tile = min(tile, round_up(count, LANES))
    # What lies together of a tile's slots, whatever the size of a page.
    chunk = math.gcd(tile, size)
    paths = paths_of(table, source, size=size, tile=tile, chunk=chunk)
    tiles = paths.source.shape[1]

    def kernel(moves, source_ref, following_ref, flags_ref, targets_ref, _, rows_ref, buffer_ref, tile_ref, semaphores):
        h, i = pl.program_id(0), pl.program_id(1)
        fetch(moves, source_ref, following_ref, rows_ref, buffer_ref, semaphores)

        def chunks(act):
            def one(index, _):
                target = targets_ref[0, index]

                @pl.when(target >= 0)
                def _():
                    here = tile_ref.at[pl.ds(pl.multiple_of(index * chunk, chunk), chunk)]
                    there = rows_ref.at[pl.ds(pl.multiple_of(target, chunk), chunk)]
                    act(pltpu.make_async_copy(here, there, semaphores.at[2]))

                return 0

            jax.lax.fori_loop(0, tile // chunk, one, 0)

        @pl.when(moves[h * tiles + i] > 0)
        def _():
            tile_ref[...] = fetched(flags_ref, buffer_ref, semaphores)
            chunks(lambda copy: copy.start())
            # The next tile's rows are on their way meanwhile: none of them lies where this tile is written.
            chunks(lambda copy: copy.wait())

    rows = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(heads, tiles),
            in_specs=[
                *source_specs(tile, tiles),
                pl.BlockSpec((None, None, 1, tile // chunk), lambda h, i, moves: (h, i, 0, 0), memory_space=pltpu.SMEM),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=buffers(tile, width, pages.dtype, pltpu.VMEM((tile, width), pages.dtype)),
        ),
        out_shape=jax.ShapeDtypeStruct((number * size, width), pages.dtype),
        input_output_aliases={5: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), has_side_effects=True),
        interpret=interpreter(interpret),
        name="compact_in_place",
    )(
        paths.moves.reshape(-1),
        *sources(paths.source[:, :, None], pages.dtype),
        paths.targets[:, :, None],
        pages.reshape(number * size, width),
    )
    return rows.reshape(pages.shape)
