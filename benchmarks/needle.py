"""Which policies still find a needle? SmolLM2, 1,000 and 2,000 tokens, ten depths, three budgets.

    uv run python benchmarks/needle.py [--out results.jsonl] [--budgets 512 256 128]

The question stands at the end of the prompt that is compressed. A hit is an answer that contains the five digits.
Results are appended to `--out` as they come, and what is there is not run again. `kvpress_comparison.py` asks kvpress
the same.
"""

import argparse
import itertools
import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from kvpress_settings import with_kvpress_settings

import kvjax
import kvjax_models
from kvjax.evaluation import needle, shared_prefill

LENGTHS, BUDGETS, DEPTHS, NEW_TOKENS = (1000, 2000), (512, 256, 128), 10, 28
POLICIES: dict[str, Callable[[int], kvjax.Policy]] = {
    "StreamingLLM": lambda b: kvjax.StreamingLLM(budget=b),
    "H2O": lambda b: kvjax.H2O(budget=b),
    "SnapKV": lambda b: kvjax.SnapKV(budget=b),
    "PyramidKV": lambda b: kvjax.PyramidKV(budget=b),
    "AdaKV": lambda b: kvjax.AdaKV(budget=b),
    "TOVA": lambda b: kvjax.TOVA(budget=b),
    "Knorm": lambda b: kvjax.Knorm(budget=b),
    "ExpectedAttention": lambda b: kvjax.ExpectedAttention(budget=b),
    "SnapKV, kvpress settings": lambda b: with_kvpress_settings("SnapKV", b),
    "AdaKV, kvpress settings": lambda b: with_kvpress_settings("AdaKV", b),
    "TOVA, kvpress settings": lambda b: with_kvpress_settings("TOVA", b),
    "Knorm, kvpress settings": lambda b: with_kvpress_settings("Knorm", b),
    "PyramidKV, kvpress window": lambda b: kvjax.PyramidKV(
        budget=b, window=64, kernel=5, pooling="avg", group_order="after_pooling", sinks=0
    ),
}


def prompts_of(tokenizer: kvjax_models.Tokenizer, length: int) -> tuple[list[list[int]], list[str]]:
    """Token ids of ten chats, the needle at ten depths, and the answers."""
    ids, answers = [], []
    for index in range(DEPTHS):
        task = needle(tokenizer, tokens=length, depth=index / (DEPTHS - 1), seed=1000 + index)
        text = tokenizer.apply_chat_template([{"role": "user", "content": task.prompt}])
        ids.append(tokenizer.encode(text, add_special_tokens=False))
        answers.append(task.answer)
    return ids, answers


def answers_of(params: kvjax_models.Llama, logits: jax.Array, cache: kvjax.Cache) -> list[list[int]]:
    """Greedy answers behind a cache, up to where they stop."""
    steps = []
    for _ in range(NEW_TOKENS):
        steps.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
        logits, cache = kvjax.decode(params, cache, steps[-1])
    tokens = np.stack(steps, axis=1)
    stops = [np.flatnonzero(np.isin(row, params.spec.stop_tokens)) for row in tokens]
    return [row[: stop[0] if len(stop) else None].tolist() for row, stop in zip(tokens, stops, strict=True)]


def main() -> None:
    """Runs what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("needle.jsonl"))
    parser.add_argument("--budgets", type=int, nargs="*", default=BUDGETS)
    args = parser.parse_args()
    loaded = kvjax_models.load(kvjax_models.embedded_model())
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    tasks = {length: prompts_of(tokenizer, length) for length in LENGTHS}
    results = read(args.out)
    # One prefill serves all policies of a budget; each has a program for every layer shape, and too many programs in
    # one process exhaust the kernel's memory maps.
    for budget, (length, (ids, wanted)) in itertools.product(args.budgets, tasks.items()):
        named = {(name, budget): make(budget) for name, make in POLICIES.items()} | {("Full", 0): kvjax.Full()}
        missing = {key: policy for key, policy in named.items() if (*key, length) not in results}
        if not missing:
            continue
        shared = shared_prefill(loaded.params, ids, policies=list(missing.values()), max_new_tokens=NEW_TOKENS)
        for name, kept in missing:
            tokens = answers_of(loaded.params, shared.logits, shared.caches.pop(0))
            texts = [tokenizer.decode(row) for row in tokens]
            hits = [answer in text for answer, text in zip(wanted, texts, strict=True)]
            results[name, kept, length] = hits
            line = {"policy": name, "budget": kept, "length": length, "hits": hits, "texts": texts}
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(name, kept, length, sum(hits), flush=True)
        jax.clear_caches()
    print(table(results))


def read(path: pathlib.Path) -> dict[tuple[str, int, int], list[bool]]:
    """Hits by policy, budget and length."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["policy"], line["budget"], line["length"]): line["hits"] for line in lines}


def table(results: dict[tuple[str, int, int], list[bool]]) -> str:
    """Hits of ten."""
    columns = [(length, budget) for length in LENGTHS for budget in BUDGETS]
    head = " | ".join(f"{length}, {budget} kept" for length, budget in columns)
    lines = [f"| policy | {head} |", f"|---|{'---|' * len(columns)}"]
    for name in ("Full", *POLICIES):
        keys = [(name, 0 if name == "Full" else budget, length) for length, budget in columns]
        cells = [str(int(np.sum(results[key]))) if key in results else "" for key in keys]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
