"""Does the learned head pattern tell which heads find a needle? SmolLM2, 1,000 and 2,000 tokens, ten depths.

    uv run python benchmarks/duo_needles.py [--keys 20] [--out duo.jsonl] [--plot benchmarks/duo_needles.png]

Needles found by DuoAttention (64 sinks, 256 recent) at four sparsities, with the shipped pattern, with its inverse, and
with three random ones. The prompt ends with the beginning of the answer, and a needle is found if the number follows
digit by digit. A prompt is read once, in bfloat16, for all patterns, which differ only in what they then drop; the
number is decoded in float32. Results are appended to `--out` as they come, and what is there is not run again.
"""

import argparse
import functools
import json
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
import kvjax_models
from kvjax.attention import Asked
from kvjax.evaluation import needle
from kvjax.policies.base import prompt_rows
from kvjax.prompts import batch_of
from kvjax.shipped_patterns import shipped_pattern
from kvjax.state import Rows, for_platform
from kvjax_kernels import prefill_attention

LENGTHS, SPARSITIES, DEPTHS, ROOM, TOGETHER = (1000, 2000), (0.25, 0.5, 0.75), 10, 8, 5


class Read(NamedTuple):
    """Prompts that have been read, before anything is dropped.

    Attributes:
        rows: the tokens of every layer.
        asked: the queries of every layer.
        lengths: [B].
        logits: [B, V], of what follows.
    """

    rows: list[Rows]
    asked: list[Asked]
    lengths: np.ndarray
    logits: jax.Array


def patterns(model: kvjax.ModelSpec) -> dict[str, kvjax.HeadPattern]:
    """The learned pattern, its inverse, and random ones."""
    learned = shipped_pattern(model)
    scores = np.asarray(learned.scores)
    named = {"learned": learned, "inverted": kvjax.HeadPattern.of(1.0 - scores)}
    for seed in range(3):
        named[f"random {seed}"] = kvjax.HeadPattern.of(np.random.default_rng(seed).random(scores.shape))
    return named


def tasks(
    tokenizer: kvjax_models.Tokenizer, length: int, depth: int, part: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that end in the beginning of the answer, and the tokens that are to follow."""
    prompts, wanted = [], []
    for key in range(part * TOGETHER, (part + 1) * TOGETHER):
        task = needle(tokenizer, tokens=length, depth=depth / (DEPTHS - 1), seed=5000 + 100 * key + depth)
        chat = tokenizer.apply_chat_template([{"role": "user", "content": task.prompt}])
        beginning = task.question.rpartition("? ")[2]
        prompts.append(tokenizer.encode(f"{chat}{beginning}:", add_special_tokens=False))
        wanted.append(tokenizer.encode(f" {task.answer}", add_special_tokens=False))
    return prompts, wanted


def read(params: kvjax_models.Llama, prompts: list[list[int]]) -> Read:
    """Full attention over the prompts."""
    batch = batch_of([np.asarray(prompt, np.int32) for prompt in prompts])
    offset = np.arange(batch.tokens.shape[1])[None]
    positions = jnp.asarray(np.where(offset < batch.lengths[:, None], offset, kvjax.EMPTY), jnp.int32)
    rope = params.spec.rope
    rows, asked = [], []

    def attend(layer, query, key, value):
        del layer
        output, kept, queries = attend_prompt(query, key, value, positions, rope)
        rows.append(kept)
        asked.append(Asked(queries, query, positions, None, rope))
        return output

    hidden = params(jnp.asarray(batch.tokens), attend)
    last = jnp.take_along_axis(hidden, jnp.asarray(batch.lengths - 1)[:, None, None], axis=1)[:, 0]
    return Read(rows, asked, batch.lengths, params.logits(last))


@functools.partial(jax.jit, static_argnames="rope")
def attend_prompt(query, key, value, positions, rope):
    """One layer's attention, and its tokens in float32."""
    query, key = rope.rotate(query, positions), rope.rotate(key, positions)
    output, _ = prefill_attention(query, key, value)
    return output, prompt_rows(key.astype(jnp.float32), value.astype(jnp.float32), positions), query


def compressed(model: kvjax.ModelSpec, prompts: Read, policy: kvjax.Policy) -> kvjax.Cache:
    """What a policy keeps of the prompts."""
    length = prompts.rows[0].positions.shape[-1]
    specs = policy.layer_specs(model, length, ROOM, shortest=int(prompts.lengths.min()), dtype="float32")
    specs = for_platform(specs, None)
    # Layers with the same heads streaming share a compiled choice.
    alike = {spec.slots: spec for spec in reversed(specs)}
    states = [
        keep(policy, alike[spec.slots], rows, asked._replace(rope=None), model.rope)
        for spec, rows, asked in zip(specs, prompts.rows, prompts.asked, strict=True)
    ]
    return kvjax.Cache(tuple(states), jnp.asarray(prompts.lengths), policy=policy, specs=specs, room=ROOM)


@functools.partial(jax.jit, static_argnames=("policy", "spec", "rope"))
def keep(policy, spec, rows, asked, rope):
    """One layer's state."""
    return policy.keep(spec, rows, asked._replace(rope=rope))


def found(params: kvjax_models.Llama, logits: jax.Array, cache: kvjax.Cache, wanted: list[list[int]]) -> list[bool]:
    """Whether the greedy answer is what is wanted."""
    tokens = []
    for step in range(max(map(len, wanted))):
        if step:
            logits, cache = kvjax.decode(params, cache, tokens[-1])
        tokens.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
    answers = np.stack(tokens, axis=1)
    return [answer[: len(ids)].tolist() == ids for answer, ids in zip(answers, wanted, strict=True)]


def expected_bytes(model: kvjax.ModelSpec, policy: kvjax.Policy, rows: int, slots: int) -> int:
    """The formula: n + m slots for a head that retrieves, sinks + recent for one that streams."""
    total = slots * model.num_layers * model.num_kv_heads
    if isinstance(policy, kvjax.DuoAttention):
        streaming = int(np.sum([policy.streaming(layer) for layer in range(model.num_layers)]))
        total -= streaming * (slots - policy.sinks - policy.recent)
    # A slot is a key and a value in float32, and a position; a head has a count, a row its next position.
    return rows * (total * (2 * model.head_dim * 4 + 4) + model.num_layers * model.num_kv_heads * 4 + 4)


def main() -> None:
    """Runs what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=20, help=f"needles at each depth, a multiple of {TOGETHER}")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("duo.jsonl"))
    parser.add_argument("--plot", type=pathlib.Path)
    args = parser.parse_args()
    if args.keys < TOGETHER or args.keys % TOGETHER:
        parser.error(f"--keys must be a multiple of {TOGETHER}, got {args.keys}.")
    reader = kvjax_models.load(kvjax_models.embedded_model(), "bfloat16")
    decoder = kvjax_models.load(kvjax_models.embedded_model())
    assert reader.tokenizer is not None
    model = decoder.params.spec
    policies: dict[tuple[str, float], kvjax.Policy] = {("full", 0.0): kvjax.Full()}
    for name, pattern in patterns(model).items():
        for sparsity in SPARSITIES:
            policies[name, sparsity] = kvjax.DuoAttention(pattern=pattern, sparsity=sparsity, sinks=64, recent=256)
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    for part in range(args.keys // TOGETHER):
        for length in LENGTHS:
            for depth in range(DEPTHS):
                where = {"length": length, "depth": depth, "part": part}
                done = {(line["pattern"], line["sparsity"]) for line in lines if where.items() <= line.items()}
                missing = {key: policy for key, policy in policies.items() if key not in done}
                if not missing:
                    continue
                prompts, wanted = tasks(reader.tokenizer, length, depth, part)
                whole = read(reader.params, prompts)
                for (name, sparsity), policy in missing.items():
                    cache = compressed(model, whole, policy)
                    slots = whole.rows[0].positions.shape[-1] + ROOM
                    sizes = {
                        "bytes": kvjax.cache_bytes(cache),
                        "formula": expected_bytes(model, policy, TOGETHER, slots),
                    }
                    right = found(decoder.params, whole.logits, cache, wanted)
                    line = {"pattern": name, "sparsity": sparsity, **where, "hits": right, **sizes}
                    lines.append(line)
                    with args.out.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                here = [x for x in lines if where.items() <= x.items()]
                print(where, {f"{x['pattern']} {x['sparsity']}": sum(x["hits"]) for x in here}, flush=True)
    print(table(lines))
    if args.plot:
        plot(lines, args.plot)


def hits(lines: list[dict], length: int, pattern: str, sparsity: float) -> list[bool]:
    """Which needles were found, once all depths are done; at sparsity 0 every pattern is the full cache."""
    key = ("full", 0.0) if sparsity == 0 else (pattern, sparsity)
    mine = [x for x in lines if (x["pattern"], x["sparsity"]) == key and x["length"] == length]
    whole = len({x["depth"] for x in mine}) == DEPTHS
    return [hit for x in mine for hit in x["hits"]] if whole else []


def share(lines: list[dict], length: int, pattern: str, sparsity: float) -> float:
    """The share of needles found; not a number where depths are missing."""
    found_ones = hits(lines, length, pattern, sparsity)
    return float(np.mean(found_ones)) if found_ones else float("nan")


def table(lines: list[dict]) -> str:
    """Shares found, and bytes beside the formula."""
    columns = [(length, sparsity) for length in LENGTHS for sparsity in (0.0, *SPARSITIES)]
    rows = [f"| pattern | {' | '.join(f'{length}, {sparsity:g}' for length, sparsity in columns)} |"]
    rows.append(f"|---|{'---|' * len(columns)}")
    names = ["learned", "inverted", *(f"random {seed}" for seed in range(3))]
    for name in names:
        found_ones = [hits(lines, length, name, sparsity) for length, sparsity in columns]
        cells = [f"{sum(right)} of {len(right)}" if right else "" for right in found_ones]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    sizes = []
    for length, sparsity in columns:
        key = ("full", 0.0) if sparsity == 0 else ("learned", sparsity)
        mine = [x for x in lines if (x["pattern"], x["sparsity"]) == key and x["length"] == length]
        sizes.append(f"{mine[0]['bytes']:,} / {mine[0]['formula']:,}" if mine else "")
    rows.append(f"| bytes / formula | {' | '.join(sizes)} |")
    return "\n".join(rows)


def plot(lines: list[dict], path: pathlib.Path) -> None:
    """Shares found over sparsity, a panel a length."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    sparsities = (0.0, *SPARSITIES)
    for axes, length in zip(figure.subplots(1, len(LENGTHS), sharey=True), LENGTHS, strict=True):
        for name, colour in (("learned", "#1f4e9c"), ("inverted", "#c2410c")):
            axes.plot(sparsities, [share(lines, length, name, s) for s in sparsities], "o-", color=colour, label=name)
        random = np.asarray([[share(lines, length, f"random {seed}", s) for s in sparsities] for seed in range(3)])
        axes.plot(sparsities, random.mean(0), "o-", color="0.5", label="random, mean of three")
        axes.fill_between(sparsities, random.min(0), random.max(0), color="0.5", alpha=0.2)
        axes.set_title(f"{length:,} tokens")
        axes.set_xlabel("sparsity: share of heads with 64 sinks and 256 recent tokens")
        axes.set_xticks(sparsities)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(-0.02, 1.02)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("needles found")
    figure.axes[0].legend(loc="lower left")
    figure.savefig(path)


if __name__ == "__main__":
    main()
