"""How much faster a decoding step should be than with the full cache, by the bytes that it moves; nothing is run.

uv run python benchmarks/expected_speed.py [--share 8]
"""

import argparse
import dataclasses
from collections.abc import Iterator

import kvjax
import kvjax_models
from kvjax import memory

MODELS = ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b", "llama-3-70b")
DEVICES = ("v5e", "h200")
CONTEXTS = (8192, 32_768, 131_072)
BATCHES = (1, 8, 32)


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, default=8, help="one of so many tokens is kept")
    share = parser.parse_args().share
    names = list(policies(1024, kvjax_models.model_spec(kvjax_models.KNOWN_MODELS[MODELS[0]], "bfloat16")))
    print(f"| model | chips | context | rows | {names[0]}, tokens/s | {' | '.join(names[1:])} |")
    print("|---" * (4 + len(names)) + "|")
    for model in MODELS:
        for device in DEVICES:
            for row in table(model, device, share=share):
                print(f"| {' | '.join(row)} |")


def policies(budget: int, model: kvjax.ModelSpec) -> dict[str, kvjax.Policy]:
    # How many heads stream is what counts, not which.
    pattern = kvjax.HeadPattern.of([[0.0] * model.num_kv_heads] * model.num_layers)
    return {
        "Full": kvjax.Full(),
        "StreamingLLM": kvjax.StreamingLLM(budget=budget),
        "H2O": kvjax.H2O(budget=budget),
        "SnapKV": kvjax.SnapKV(budget=budget),
        "PyramidKV": kvjax.PyramidKV(budget=budget),
        "AdaKV": kvjax.AdaKV(budget=budget),
        "DuoAttention": kvjax.DuoAttention(pattern=pattern, sparsity=0.5),
    }


def table(name: str, device: str, *, share: int) -> Iterator[list[str]]:
    """Rows of one model on as many chips as hold its weights and one full cache of the longest context."""
    config = kvjax_models.KNOWN_MODELS[name]
    longest = memory.Deployment(
        model=kvjax_models.model_spec(config, "bfloat16"),
        size=kvjax_models.model_size(config, "bfloat16"),
        accelerator=memory.ACCELERATORS[device],
        context=CONTEXTS[-1],
    )
    chips = memory.fewest_devices(kvjax.Full(), longest)
    assert chips is not None
    for context in CONTEXTS:
        for batch in BATCHES:
            asked = dataclasses.replace(longest, context=context, batch=batch, devices=chips)
            full, *others = memory.plan(list(policies(context // share, asked.model).values()), asked)
            if not any(entry.fits for entry in others):
                continue
            speed = f"{full.tokens_per_second():,.0f}" if full.fits else "does not fit"
            ratios = [speed_up(entry, full) for entry in others]
            yield [name, f"{chips} x {device}", f"{context:,}", str(batch), speed, *ratios]


def speed_up(entry: memory.PolicyPlan, full: memory.PolicyPlan) -> str:
    """In brackets where the full cache does not fit: against what it would take if it did."""
    if not entry.fits:
        return ""
    ratio = f"{full.step_seconds() / entry.step_seconds():.2f}"
    return ratio if full.fits else f"({ratio})"


if __name__ == "__main__":
    main()
