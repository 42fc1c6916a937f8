"""What a policy's choice adds to the prefill, on SmolLM2: its time over the full cache's, side by side in one run.

uv run python benchmarks/prefill_cost.py [--tokens 4096] [--rounds 5] [--only H2O SnapKV]
"""

import argparse
import statistics
import time

import numpy as np

import kvjax
import kvjax_models


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="names of policies beside Full; all by default")
    args = parser.parse_args()
    params = kvjax_models.load(kvjax_models.embedded_model()).params
    prompt = np.random.default_rng(0).integers(0, params.spec.vocab_size, args.tokens)
    budget = args.tokens // 8
    policies = {
        "Full": kvjax.Full(),
        "StreamingLLM": kvjax.StreamingLLM(budget=budget),
        "StreamingLLM, streaming mask": kvjax.StreamingLLM(budget=budget, prefill_mask="streaming"),
        "SnapKV": kvjax.SnapKV(budget=budget),
        "PyramidKV": kvjax.PyramidKV(budget=budget),
        "AdaKV": kvjax.AdaKV(budget=budget),
        "H2O": kvjax.H2O(budget=budget),
        "TOVA": kvjax.TOVA(budget=budget),
        "Knorm": kvjax.Knorm(budget=budget),
        "ExpectedAttention": kvjax.ExpectedAttention(budget=budget),
    }

    if args.only:
        policies = {name: policies[name] for name in ("Full", *args.only)}

    def seconds(policy: kvjax.Policy) -> float:
        start = time.perf_counter()
        logits, cache = kvjax.prefill(params, prompt, policy=policy, max_new_tokens=64)
        logits.block_until_ready()
        del cache
        return time.perf_counter() - start

    for policy in policies.values():
        seconds(policy)
    # Interleaved: a slow spell of the machine falls on all of them.
    times: dict[str, list[float]] = {name: [] for name in policies}
    for _ in range(args.rounds):
        for name, policy in policies.items():
            times[name].append(seconds(policy))
    print(f"| policy, {args.tokens} tokens, budget {budget} | seconds, median | over Full, median |\n|---|---|---|")
    for name, values in times.items():
        ratios = [value / full for value, full in zip(values, times["Full"], strict=True)]
        print(f"| {name} | {statistics.median(values):.2f} | {statistics.median(ratios):.2f} |")


if __name__ == "__main__":
    main()
