"""The GPU kernels on the device at hand: are they right, and how near does decoding come to the memory's speed?

    uv run --extra cuda python benchmarks/gpu_kernels.py [--rounds 10] [--minutes 7] [--rehearse]

or, with JAX and jaxtyping but not this package installed, `PYTHONPATH=pallas_kernels python ...` from the checkout.
Prints Markdown. First every kernel against XLA's float32 on the same bfloat16 numbers. Then decoding over caches of
8K to 32K rows a head: bytes of held rows over time, beside a copy on the device, `jax.nn.dot_product_attention` and
XLA, interleaved. A call's time is the mean of a loop on the device. `--rehearse` runs all of it on any machine, tiny,
with XLA in the kernels' place. Exit code 1 says that a kernel is wrong.
"""

import argparse
import datetime
import faulthandler
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax_kernels import (
    column_sums,
    compact,
    compact_in_place,
    devices,
    extend_attention,
    pooled_attention,
    ragged_decode_attention,
    select_highest,
)

BF16, F32 = jnp.bfloat16, jnp.float32


class Check(NamedTuple):
    """One run of one kernel: `run(implementation, arrays)` gives arrays that may differ by `limit`."""

    operation: str
    case: str
    limit: float
    run: Callable[[str, dict[str, jax.Array]], Any]
    arrays: dict[str, jax.Array]


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, F32).astype(BF16)


def decode_checks(small: bool) -> Iterator[Check]:
    """Lengths around the blocks' edges, NaN in empty slots, segments and starts of any size."""
    shapes = [(64, 3, 4)] if small else [(64, 3, 4), (64, 4, 0), (96, 1, 0), (128, 8, 4), (128, 32, 0), (256, 7, 4)]
    for head_dim, group, sinks in shapes:
        for segments in (None, (37, 200) if small else (1064, 8256, 37, 5000)):
            slots, heads = sum(segments or (237,) if small else segments or (14357,)), 2 if small else 4
            starts = np.tile(np.cumsum([0, *(segments or (slots // heads,) * heads)])[:-1], (2, 1))
            if segments is None:
                starts += np.arange(2 * heads).reshape(2, heads)
            most = np.diff(np.append(starts, [[slots]] * 2, axis=1))
            lengths = np.minimum(np.asarray([[0, 129, 37, 4097], [64, 1, 33, 0]])[:, :heads], most)
            lengths[1, 1] = most[1, 1]
            place = np.arange(slots) - starts[..., None]
            held = jnp.asarray(((place >= 0) & (place < lengths[..., None])).any(1))
            kv = jnp.where(held[..., None], normal(0, 2, slots, 2 * head_dim), jnp.nan)
            arrays = {"query": normal(1, 2, group * heads, head_dim), "kv": kv, "lengths": jnp.asarray(lengths)}
            arrays |= {"own_key": normal(2, 2, heads, head_dim), "own_value": normal(3, 2, heads, head_dim)}
            settings: dict[str, Any] = {"segments": segments, "token_attention": True}
            if segments is None:
                arrays |= {"starts": jnp.asarray(starts)}
            elif sinks:
                arrays |= {"sink_query": normal(4, 2, group * heads, head_dim)}
                settings |= {"sinks": sinks}
            name = f"D {head_dim}, G {group}, {'starts' if segments is None else 'segments'}"
            run = functools.partial(call, ragged_decode_attention, **settings)
            yield Check("ragged_decode_attention", name, 1e-2, run, arrays)


def column_sum_checks(small: bool) -> Iterator[Check]:
    """A prompt with pads, a fifth of the slots empty."""
    for head_dim, length in [(64, 70)] if small else [(64, 1000), (128, 4096)]:
        empty = np.random.default_rng(0).random((2, 2, length)) < 0.2
        key_positions = jnp.asarray(np.where(empty, -1, np.arange(length)), jnp.int32)
        query_positions = jnp.asarray(np.where(np.arange(length) < [[length], [length // 3]], np.arange(length), -1))
        query, key = normal(0, 2, length, 8, head_dim), normal(1, 2, 2, length, head_dim)
        positions = {"query_positions": query_positions.astype(jnp.int32), "key_positions": key_positions}
        exact = query.astype(F32), key.astype(F32)
        _, log_sum_exp = extend_attention(exact[0], exact[1], exact[1], *positions.values(), implementation="xla")
        kv = jnp.concatenate([key, jnp.full_like(key, jnp.nan)], axis=-1)
        arrays = {"query": query, "kv": kv, "log_sum_exp": log_sum_exp, **positions}
        yield Check("column_sums", f"D {head_dim}, {length} tokens", 1e-2, functools.partial(call, column_sums), arrays)


def compact_checks(small: bool) -> Iterator[Check]:
    """Rows by source, with gaps; and within pages that no order is kept among."""
    rng, slots = np.random.default_rng(0), 64 if small else 16384
    for width in (128,) if small else (128, 256):
        source = np.sort(rng.permutation(slots)[: slots // 4])
        source = np.where(rng.random(source.shape) < 0.1, -1, source).astype(np.int32)
        arrays = {"rows": normal(0, 2, slots, width), "source": jnp.asarray(np.stack([source, source[::-1]]))}
        yield Check("compact", f"rows of {width}", 0.0, functools.partial(call, compact), arrays)
        table = jnp.asarray(rng.permutation(slots // 16).reshape(2, -1), jnp.int32)
        kept = np.sort(rng.permutation(slots // 2)[: slots // 8]).astype(np.int32)
        arrays = {"pages": normal(1, slots // 16, 16, width), "table": table, "source": jnp.asarray([kept, kept])}
        yield Check("compact_in_place", f"rows of {width}", 0.0, functools.partial(call, compact_in_place), arrays)


def selection_checks(small: bool) -> Iterator[Check]:
    """Votes of the last queries, and the highest of scores with many ties."""
    for head_dim, slots in [(64, 90)] if small else [(64, 5000), (128, 32768)]:
        held = np.arange(slots) < np.asarray([[slots, slots // 2], [40, slots - 1]])[..., None]
        key_positions = jnp.asarray(np.where(held, np.arange(slots), -1), jnp.int32)
        kv = jnp.where(jnp.asarray(held)[..., None], normal(0, 2, 2, slots, 2 * head_dim), jnp.nan)
        last = np.asarray([[slots], [slots - 1]]) - np.arange(32, 0, -1)
        arrays = {"query": normal(1, 2, 32, 8, head_dim), "kv": kv, "key_positions": key_positions}
        arrays |= {"query_positions": jnp.asarray(last, jnp.int32)}
        run = functools.partial(call, pooled_attention, kernel=7, excluded=32)
        yield Check("pooled_attention", f"D {head_dim}, {slots} tokens", 1e-2, run, arrays)
        scores = jnp.round(100 * jax.random.uniform(jax.random.key(2), (2, 2, slots)))
        arrays = {"scores": scores, "counts": jnp.asarray([[0, 1], [slots // 8, slots // 16]], jnp.int32)}
        run = functools.partial(call, chosen, most=slots // 8)
        yield Check("select_highest", f"{slots} tokens", 0.0, run, arrays)


#: An operation is added by adding what checks it.
CHECKS = (decode_checks, column_sum_checks, compact_checks, selection_checks)


def call(operation: Callable, implementation: str, arrays: dict[str, jax.Array], **settings: Any) -> Any:
    return jax.jit(functools.partial(operation, implementation=implementation, **settings))(**arrays)


def chosen(*args: Any, **settings: Any) -> jax.Array:
    """What `select_highest` has chosen; those it has not are in any order."""
    indices, valid = select_highest(*args, **settings)
    return jnp.where(valid, indices, -1)


def largest_difference(check: Check, implementation: str) -> float:
    """Relative where values exceed 1."""
    exact = {name: x.astype(F32) if x.dtype == BF16 else x for name, x in check.arrays.items()}
    with jax.default_matmul_precision("highest"):
        wanted = check.run("xla", exact)
    worst = 0.0
    for x, y in zip(*(jax.tree.leaves(z) for z in (check.run(implementation, check.arrays), wanted)), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        worst = max(worst, float(np.nan_to_num(np.abs(x - y) / np.maximum(1, np.abs(y)), nan=np.inf).max(initial=0)))
    return worst


def right(implementation: str, small: bool) -> bool:
    """Prints how far each kernel is from XLA's float32, and returns whether all are near enough."""
    print("| operation | case | largest difference | limit | |\n|---|---|---|---|---|")
    fine = True
    for make in CHECKS:
        for check in make(small):
            try:
                difference = largest_difference(check, implementation)
                verdict = "right" if difference <= check.limit else "WRONG"
                shown = f"{difference:.1e}"
            except NotImplementedError as reason:
                shown, verdict = "-", f"left out: {reason}"
            except Exception as error:
                shown, verdict = "-", f"FAILED: {one_line(error)}"
            fine &= verdict.startswith(("right", "left out"))
            print(f"| {check.operation} | {check.case} | {shown} | {check.limit:.0e} | {verdict} |", flush=True)
    return fine


class Cache(NamedTuple):
    """A cache to decode over: every head full to a length of its own, or all heads of a row alike."""

    name: str
    batch: int
    kv_heads: int
    head_dim: int
    slots: int
    lengths: np.ndarray


def caches(small: bool) -> Iterator[Cache]:
    """Lengths from a quarter of the slots to all of them."""
    sizes = [(2, 64, 64)] if small else [(8, 128, 32768), (32, 128, 32768), (8, 64, 32768)]
    for batch, head_dim, slots in sizes:
        rng = np.random.default_rng(batch)
        for by in ("row",) if small else ("row", "head"):
            lengths = rng.integers(slots // 4, slots + 1, (batch, 1 if by == "row" else 8)) + np.zeros((1, 8), int)
            name = f"batch {batch}, D {head_dim}, {slots // 4} to {slots} rows by {by}"
            yield Cache(name, batch, 8, head_dim, slots, lengths)


Loop = Callable[[], jax.Array]


def contenders(cache: Cache, implementation: str, steps: int) -> dict[str, Loop]:
    """What is timed: functions that start `steps` calls, each of which waits for the one before."""
    batch, heads, head_dim, slots = cache.batch, cache.kv_heads, cache.head_dim, cache.slots
    block = normal(0, slots, 2 * head_dim)
    kv = jnp.tile(block, (batch, heads, 1))
    query, lengths = normal(1, batch, 4 * heads, head_dim), jnp.asarray(cache.lengths, jnp.int32)

    def loop(attend: Callable[..., jax.Array], *arrays: jax.Array) -> Loop:
        def body(_: int, query: jax.Array, *arrays: jax.Array) -> jax.Array:
            return query + (attend(query, *arrays) * 1e-30).astype(query.dtype)

        compiled = jax.jit(lambda q, *a: jax.lax.fori_loop(0, steps, lambda i, q: body(i, q, *a), q))
        return lambda: compiled(query, *arrays)

    def ragged(name: str, **settings: Any) -> Loop:
        def attend(query: jax.Array, kv: jax.Array, lengths: jax.Array) -> jax.Array:
            settings_ = {"segments": (slots,) * heads, "implementation": name, **settings}
            result = ragged_decode_attention(query, kv, lengths, **settings_)
            return result.output if result.token_attention is None else result.output + result.token_attention.max()

        return loop(attend, kv, lengths)

    copy = jax.jit(lambda x: jax.lax.fori_loop(0, steps, lambda i, x: x + 1, x))
    runs = {
        "copy on the device": lambda: copy(kv),
        implementation: ragged(implementation),
        f"{implementation}, token_attention": ragged(implementation, token_attention=True),
        "xla": ragged("xla"),
    }
    if (cache.lengths == cache.lengths[:, :1]).all():
        key, value = (jnp.tile(x[None, :, None], (batch, 1, heads, 1)) for x in jnp.split(block, 2, axis=1))
        for name in ("xla", "cudnn"):

            def attend(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, name: Any = name):
                ones = jnp.ones_like(lengths)
                settings = {"query_seq_lengths": ones, "key_value_seq_lengths": lengths, "implementation": name}
                return jax.nn.dot_product_attention(query[:, None], key, value, **settings)[:, 0]

            runs[f"dot_product_attention, {name}"] = loop(attend, key, value, lengths[:, 0])
    return runs


def measure(cache: Cache, implementation: str, *, rounds: int, steps: int, deadline: float) -> None:
    """Prints a row for each contender."""
    runs, failures = contenders(cache, implementation, steps), {}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        try:
            run().block_until_ready()
        except Exception as error:
            failures[name] = one_line(error)
    # Interleaved: a slow spell of the machine falls on all of them.
    for _ in range(rounds):
        for name in [name for name in runs if name not in failures]:
            start = time.perf_counter()
            runs[name]().block_until_ready()
            times[name].append((time.perf_counter() - start) / steps)
        if time.monotonic() > deadline:
            break
    row_bytes = 4 * cache.head_dim
    size = {name: int(cache.lengths.sum()) * row_bytes for name in runs}
    size["copy on the device"] = 2 * cache.batch * cache.kv_heads * cache.slots * row_bytes
    speed = {name: size[name] / statistics.median(taken) for name, taken in times.items() if taken}
    for name in runs:
        if name in failures:
            print(f"| {cache.name} | {name} | - | - | - | {failures[name]} |", flush=True)
            continue
        ratios = [x / y for x, y in zip(times[name], times[implementation], strict=False)]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
        columns = f"{1e6 * statistics.median(times[name]):.0f} | {speed[name] / 1e9:.0f}"
        share = f"{speed[name] / speed['copy on the device']:.2f}" if "copy on the device" in speed else "-"
        print(f"| {cache.name} | {name} | {columns} | {share} | {ratio} |", flush=True)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}".replace("|", "/")


def no_gpu() -> str | None:
    """Why the kernels cannot run here."""
    if jax.default_backend() != "gpu":
        return f"JAX finds only {jax.devices()[0].platform}"
    return devices.missing_nvidia_gpu(least=(9, 0))


def main() -> None:
    """Prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="times that each contender is timed")
    parser.add_argument("--minutes", type=float, default=7, help="after which nothing more is begun")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, XLA in the kernels' place, any machine")
    args = parser.parse_args()
    if not args.rehearse and (reason := no_gpu()):
        sys.exit(f"The GPU kernels need an NVIDIA GPU of compute capability 9.0 or more: {reason}.")
    deadline = time.monotonic() + 60 * args.minutes
    # A kernel that hangs ends the run, with where it was.
    faulthandler.dump_traceback_later(60 * args.minutes + 50, exit=True)
    implementation = "xla" if args.rehearse else "gpu"
    today, device = datetime.date.today(), jax.devices()[0].device_kind
    print(f"{today}, {device}, jax {jax.__version__}, `{' '.join(['python', *sys.argv])}`\n")
    fine = right(implementation, args.rehearse)
    print("\n| cache | what | us a call | GB/s of held rows | over the copy | time over the kernel's |")
    print("|---|---|---|---|---|---|")
    for cache in caches(args.rehearse):
        if time.monotonic() < deadline:
            measure(cache, implementation, rounds=args.rounds, steps=2 if args.rehearse else 20, deadline=deadline)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
