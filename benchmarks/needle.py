"""Which policies still find a needle? SmolLM2, 1,000 and 2,000 tokens, ten depths, three budgets.

    uv run python benchmarks/needle.py [--out results.jsonl] [--prompts prompts.json] [--kvpress kvpress.jsonl]

The question stands at the end of the prompt that is compressed. A hit is an answer that contains the five digits.
Results are appended to `--out` as they come, and what is there is not run again. `--prompts` writes the token ids,
for `needle_kvpress.py`, whose results `--kvpress` adds to the table.
"""

import argparse
import itertools
import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

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
    "SnapKV, kvpress settings": lambda b: kvjax.SnapKV(
        budget=b, window=64, kernel=5, pooling="avg", group_order="after_pooling", sinks=0
    ),
    "AdaKV, kvpress settings": lambda b: kvjax.AdaKV(
        budget=b, window=64, kernel=5, pooling="avg", group_order="after_pooling", sinks=0
    ),
    "TOVA, kvpress settings": lambda b: kvjax.TOVA(budget=b, sinks=0, recent_tokens=1, heads="all", evict="prompt"),
    "Knorm, kvpress settings": lambda b: kvjax.Knorm(budget=b, sinks=0, recent_tokens=0),
    "PyramidKV, kvpress window": lambda b: kvjax.PyramidKV(
        budget=b, window=64, kernel=5, pooling="avg", group_order="after_pooling", sinks=0
    ),
}


def prompts(tokenizer: kvjax_models.Tokenizer, length: int) -> tuple[list[list[int]], list[str]]:
    """Token ids of ten chats, the needle at ten depths, and the answers."""
    ids, answers = [], []
    for index in range(DEPTHS):
        task = needle(tokenizer, tokens=length, depth=index / (DEPTHS - 1), seed=1000 + index)
        text = tokenizer.apply_chat_template([{"role": "user", "content": task.prompt}])
        ids.append(tokenizer.encode(text, add_special_tokens=False))
        answers.append(task.answer)
    return ids, answers


def answers_of(loaded: kvjax_models.Loaded, logits: jax.Array, cache: kvjax.Cache) -> list[str]:
    """Greedy answers behind a cache."""
    assert loaded.tokenizer is not None
    tokens = []
    for _ in range(NEW_TOKENS):
        tokens.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
        logits, cache = kvjax.decode(loaded.params, cache, tokens[-1])
    texts = []
    for row in np.stack(tokens, axis=1):
        stops = np.flatnonzero(np.isin(row, loaded.params.spec.stop_tokens))
        texts.append(loaded.tokenizer.decode(row[: stops[0] if len(stops) else None].tolist()))
    return texts


def main() -> None:
    """Runs what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("needle.jsonl"))
    parser.add_argument("--budgets", type=int, nargs="*", default=BUDGETS)
    parser.add_argument("--prompts", type=pathlib.Path)
    parser.add_argument("--kvpress", type=pathlib.Path)
    args = parser.parse_args()
    loaded = kvjax_models.load(kvjax_models.embedded_model())
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    tasks = {length: prompts(tokenizer, length) for length in LENGTHS}
    if args.prompts:
        args.prompts.write_text(json.dumps(tasks))
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
            texts = answers_of(loaded, shared.logits, shared.caches.pop(0))
            hits = [answer in text for answer, text in zip(wanted, texts, strict=True)]
            results[name, kept, length] = hits
            line = {"policy": name, "budget": kept, "length": length, "hits": hits, "texts": texts}
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(name, kept, length, sum(hits), flush=True)
        jax.clear_caches()
    peers = read(args.kvpress) if args.kvpress else {}
    print(table(results, peers))


def read(path: pathlib.Path) -> dict[tuple[str, int, int], list[bool]]:
    """Hits by policy, budget and length."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["policy"], line["budget"], line["length"]): line["hits"] for line in lines}


def table(results: dict[tuple[str, int, int], list[bool]], peers: dict[tuple[str, int, int], list[bool]]) -> str:
    """Hits of ten, with kvpress's behind a stroke where it has the same method."""
    columns = [(length, budget) for length in LENGTHS for budget in BUDGETS]
    head = " | ".join(f"{length}, {budget} kept" for length, budget in columns)
    lines = [f"| policy | {head} |", f"|---|{'---|' * len(columns)}"]
    for name in ("Full", *POLICIES):
        cells = []
        for length, budget in columns:
            key = (name, 0 if name == "Full" else budget, length)
            cell = str(int(np.sum(results[key]))) if key in results else ""
            if key in peers:
                cell += f" / {int(np.sum(peers[key]))}"
            cells.append(cell)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
