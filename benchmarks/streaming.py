"""Does a stream run past the trained context? SmolLM2 reads 20,000 tokens through a cache of 4 + 252 slots.

    uv run python benchmarks/streaming.py [--tokens 20000] [--plot benchmarks/streaming.png]

Text: the topics of Python's own documentation. Perplexity by stretches of 2,000 tokens, for the sinks' window, the
same window without sinks, and the full cache up to the trained length; then the time of a decoding step early and
late in the stream, and the bytes of the cache.
"""

import argparse
import pathlib
import statistics
import time

import jax
import numpy as np

import kvjax
import kvjax_models

STRETCH, CHUNK = 2000, 250


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


def step_seconds(params: kvjax_models.Llama, tokens: np.ndarray, policy: kvjax.Policy, stretch: int) -> list[float]:
    """The median time of a decoding step in each of four stretches of a stream."""
    _, cache = kvjax.prefill(params, tokens[:300], policy=policy, max_new_tokens=1)
    logits, cache = kvjax.decode(params, cache, tokens[300:301])
    medians = []
    for part in range(4):
        times = []
        for index in range(stretch):
            start = time.perf_counter()
            logits, cache = kvjax.decode(params, cache, tokens[None, 301 + part * stretch + index])
            logits.block_until_ready()
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times))
    return medians


def main() -> None:
    """Prints the tables, and draws them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=400, help="decoding steps timed in each of four stretches")
    parser.add_argument("--plot", type=pathlib.Path)
    args = parser.parse_args()
    loaded = kvjax_models.load(kvjax_models.embedded_model())
    params, tokenizer = loaded.params, loaded.tokenizer
    assert tokenizer is not None
    tokens = np.asarray(tokenizer.encode(plain_text())[: args.tokens + 1])
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
    medians = step_seconds(params, tokens, runs[name][0], args.steps)
    print(
        f"Decoding step over the first stretch of {args.steps}: {', '.join(f'{m / medians[0]:.2f}' for m in medians)}"
    )
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
