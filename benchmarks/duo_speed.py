"""How much faster does DuoAttention decode? SmolLM2 in float32, 4,096 and 7,680 cached tokens, batch 1.

    uv run python benchmarks/duo_speed.py [--rounds 30]

The full cache and three sparsities of the shipped pattern (64 sinks, 256 recent) take steps in turn, so that all see
the same load; the table has the median step's time over the full cache's, and the bytes. What is cached is random:
speed does not depend on it.
"""

import argparse
import statistics
import time

import jax
import numpy as np
from step_times import random_cache

import kvjax
import kvjax_models
from kvjax.shipped_patterns import shipped_pattern

LENGTHS, SPARSITIES, ROOM = (4096, 7680), (0.25, 0.5, 0.75), 128


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    params = kvjax_models.load(kvjax_models.embedded_model()).params
    pattern = shipped_pattern(params.spec)
    policies: dict[str, kvjax.Policy] = {"full": kvjax.Full()}
    policies |= {f"sparsity {s}": kvjax.DuoAttention(pattern=pattern, sparsity=s) for s in SPARSITIES}
    print("| tokens | policy | time of a step | bytes | of full |\n|---|---|---|---|---|")
    for length in LENGTHS:
        caches = {name: random_cache(params.spec, policy, length, room=ROOM) for name, policy in policies.items()}
        sizes = {name: kvjax.cache_bytes(cache) for name, cache in caches.items()}
        seconds: dict[str, list[float]] = {name: [] for name in caches}
        for round_ in range(args.rounds + 2):
            for name, cache in caches.items():
                started = time.perf_counter()
                logits, caches[name] = kvjax.decode(params, cache, np.asarray([42 + round_]))
                jax.block_until_ready(logits)
                # The first steps compile, or wait for memory.
                if round_ > 1:
                    seconds[name].append(time.perf_counter() - started)
        full = statistics.median(seconds["full"])
        for name, times in seconds.items():
            ratio = statistics.median(times) / full
            print(
                f"| {length} | {name} | {ratio:.2f} | {sizes[name]:,} | {sizes[name] / sizes['full']:.2f} |", flush=True
            )
        del caches


if __name__ == "__main__":
    main()
