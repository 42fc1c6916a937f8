"""What does a decoding step cost where as many slots are held: by policy, and by the length of the prompt?

    uv run python benchmarks/equal_slots.py [--kept 512] [--rounds 15]

Steps of SmolLM2 in the compiled loop of `kvjax.generate`, float32, batch 1; all contestants in turn, medians over
SnapKV's behind the shortest prompt.
"""

import argparse
import statistics

import jax.numpy as jnp
from step_times import loop_seconds, random_cache

import kvjax
import kvjax_models

LENGTHS, STEPS = (2048, 4096, 7680), 16


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if args.kept >= LENGTHS[0] or args.rounds < 1:
        parser.error(f"--kept must be below {LENGTHS[0]} and --rounds 1 or more, got {args.kept} and {args.rounds}.")
    params = kvjax_models.load(kvjax_models.embedded_model()).params
    policies = {
        policy.__name__: policy(budget=args.kept)
        for policy in (kvjax.SnapKV, kvjax.PyramidKV, kvjax.H2O, kvjax.TOVA, kvjax.StreamingLLM)
    }
    caches = {
        (name, length): random_cache(params.spec, policy, length, room=STEPS)
        for name, policy in policies.items()
        for length in LENGTHS
    }
    scores = jnp.zeros((1, params.spec.vocab_size), jnp.float32)
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in caches}
    for round_ in range(args.rounds + 1):
        for key, cache in caches.items():
            took = loop_seconds(params, scores, cache, steps=STEPS) / STEPS
            if round_:  # The first compiles.
                seconds[key].append(took)
    medians = {key: statistics.median(times) for key, times in seconds.items()}
    base = medians["SnapKV", LENGTHS[0]]
    print(f"SnapKV behind {LENGTHS[0]:,} tokens: {base * 1e3:.1f} ms a step, {args.kept} tokens kept\n")
    print(f"| policy | {' | '.join(f'{length:,}' for length in LENGTHS)} |\n|---|{'---|' * len(LENGTHS)}")
    for name in policies:
        print(f"| {name} | {' | '.join(f'{medians[name, length] / base:.2f}' for length in LENGTHS)} |")


if __name__ == "__main__":
    main()
