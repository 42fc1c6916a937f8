"""Does a stream run past the trained context? SmolLM2 reads 20,000 tokens through a cache of 4 + 252 slots.

    uv run python benchmarks/streaming.py [--tokens 20000] [--rounds 9] [--plot benchmarks/streaming.png]

Text: the topics of Python's own documentation. Perplexity by stretches of 2,000 tokens, for the sinks' window, the
same window without sinks, and the sinks' window with absolute positions; the bytes of the cache; then the time of a
decoding step behind 1,000 to 50,000 tokens, all in turn.
"""

import argparse
import pathlib
import statistics

import jax
import numpy as np
from step_times import loop_seconds

import kvjax
import kvjax_models

STRETCH, CHUNK = 2000, 250
#: Tokens of a stream behind which steps are timed, and steps of a round.
SEEN, STEPS = (1_000, 8_000, 25_000, 50_000), 32


def plain_text() -> str:
    """English prose that every Python carries."""
    from pydoc_data import topics

    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def losses(params: kvjax_models.Llama, tokens: np.ndarray, policy: kvjax.Policy) -> tuple[np.ndarray, set[int]]:
    """Negative log-likelihood of each token but the first, and the cache's bytes after each chunk."""
    found, sizes, cache = [], set(), None
    for start in range(0, len(tokens) - 1, CHUNK):
        chunk = tokens[start : start + CHUNK]
        following = tokens[start + 1 : start + CHUNK + 1]
        if cache is None:
            logits, cache = kvjax.prefill(params, chunk, policy=policy, max_new_tokens=1, logits="all")
        else:
            logits, cache = kvjax.extend(params, cache, chunk, logits="all")
        sizes.add(kvjax.cache_bytes(cache))
        scores = jax.nn.log_softmax(logits[0, : len(following)], axis=-1)
        found.append(-np.asarray(scores)[np.arange(len(following)), following])
    return np.concatenate(found), sizes


def step_ratios(params: kvjax_models.Llama, tokens: np.ndarray, policy: kvjax.Policy, rounds: int) -> dict[int, float]:
    """The median time of a decoding step behind more and more tokens of a stream, over that behind the first few."""
    reached, cache = {}, None
    for start in range(0, SEEN[-1], CHUNK):
        chunk = tokens[start : start + CHUNK]
        if cache is None:
            logits, cache = kvjax.prefill(params, chunk, policy=policy, max_new_tokens=STEPS)
        else:
            logits, cache = kvjax.extend(params, cache, chunk)
        if start + CHUNK in SEEN:
            reached[start + CHUNK] = logits, cache
    times = {seen: [] for seen in reached}
    for round_ in range(rounds + 1):
        for seen, (logits, cache) in reached.items():
            seconds = loop_seconds(params, logits, cache, steps=STEPS)
            if round_:  # The first compiles.
                times[seen].append(seconds)
    medians = {seen: statistics.median(seconds) for seen, seconds in times.items()}
    return {seen: median / medians[SEEN[0]] for seen, median in medians.items()}


def main() -> None:
    """Prints the tables, and draws them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9, help="of timed steps")
    parser.add_argument("--plot", type=pathlib.Path)
    args = parser.parse_args()
    if min(args.tokens, args.rounds) < 1:
        parser.error(f"--tokens and --rounds must be 1 or more, got {args.tokens} and {args.rounds}.")
    loaded = kvjax_models.load(kvjax_models.embedded_model())
    params, tokenizer = loaded.params, loaded.tokenizer
    assert tokenizer is not None
    every = np.asarray(tokenizer.encode(plain_text()))
    tokens = every[: args.tokens + 1]
    trained = params.spec.max_positions
    runs = {
        "4 sinks + 252": (kvjax.StreamingLLM(budget=256, prefill_mask="streaming"), tokens),
        "0 sinks + 256": (kvjax.StreamingLLM(budget=256, sinks=0, prefill_mask="streaming"), tokens),
        "4 + 252, absolute": (
            kvjax.StreamingLLM(budget=256, positions="absolute", prefill_mask="streaming"),
            tokens,
        ),
    }
    curves, sizes = {}, {}
    for name, (policy, part) in runs.items():
        with np.errstate(over="ignore"):
            curves[name], sizes[name] = losses(params, part, policy)
    starts = range(0, len(tokens) - 1, STRETCH)
    print(f"Perplexity by stretch; the model was trained for {trained} tokens.\n")
    print(f"| tokens | {' | '.join(curves)} |\n|---|{'---|' * len(curves)}")
    for start in starts:
        cells = [f"{np.exp(curve[start : start + STRETCH].mean()):.1f}" for curve in curves.values()]
        print(f"| {start} to {min(start + STRETCH, len(tokens) - 1)} | {' | '.join(cells)} |")
    name = "4 sinks + 252"
    kinds = sorted(sizes[name])
    print(f"\nCache of {name}: {' and '.join(f'{size:,}' for size in kinds)} bytes throughout.")
    ratios = step_ratios(params, every, runs[name][0], args.rounds)
    print(f"A decoding step behind {SEEN[0]:,} tokens takes 1; behind", end=" ")
    print(", ".join(f"{seen:,} {ratio:.2f}" for seen, ratio in list(ratios.items())[1:]))
    if args.plot:
        draw(args.plot, curves, trained)


def draw(path: pathlib.Path, curves: dict[str, np.ndarray], trained: int) -> None:
    """Perplexity along the stream."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        ends = np.arange(STRETCH // 4, len(curve) + 1, STRETCH // 4)
        axes.plot(ends, [np.exp(curve[end - STRETCH // 4 : end].mean()) for end in ends], label=name)
    axes.axvline(trained, color="grey", linestyle="--", linewidth=1)
    axes.text(trained, axes.get_ylim()[1], " trained length", va="top", color="grey")
    axes.set(yscale="log", xlabel="tokens read", ylabel="perplexity of 500 tokens", title="SmolLM2, cache of 256 slots")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
