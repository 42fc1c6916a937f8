"""What is a decoding step's time made of, and a prefill's? SmolLM2, each part as a program of its own.

    uv run python benchmarks/step_parts.py [--tokens 4096] [--rows 1] [--rounds 9] [--prefill]

Parts, for all layers: the projections around attention, the MLP, attention with the writing of the new token (in a
prefill attention, then the choice and the packing of what is kept), and the logits. "Rest" is the whole less its parts:
RoPE in a prefill, the embedding, the loop. Beside each part stand the bytes that it has to read, or a prefill's
floating-point operations; and under all a plain read of memory, the sum of an array as large as the weights. A decoding
step's parts run in a compiled loop, as steps do. Programs take turns; medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from step_times import loop_seconds, random_cache

import kvjax
import kvjax_models
from kvjax.attention import Asked
from kvjax.policies.base import prompt_rows
from kvjax.state import LayerSpec, LayerState

POLICIES = {"Full": kvjax.Full(), "SnapKV at 1/8": kvjax.SnapKV(budget=0.125), "H2O at 1/8": kvjax.H2O(budget=0.125)}
STEPS = 16


class Part(NamedTuple):
    """A piece of work.

    Attributes:
        run: does it, and gives the seconds that it took.
        work: bytes that it reads, or operations.
    """

    run: Callable[[], float]
    work: int


def timed(function: Callable[..., object], *arrays: object) -> Callable[[], float]:
    """Runs a compiled function on arrays, and tells how long it took."""
    jax.block_until_ready(function(*arrays))

    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        return time.perf_counter() - started

    return run


def projections(params: kvjax_models.Llama, x: jax.Array) -> jax.Array:
    """The four products around attention, layer after layer, with the norm before them."""
    for layer in params.layers:
        h = layer.input_norm(x)
        projected = jax.lax.optimization_barrier((layer.q_proj(h), layer.k_proj(h), layer.v_proj(h)))
        # Keys and values are used, so that they are computed.
        x = x + layer.o_proj(projected[0]) + 1e-9 * (projected[1].sum() + projected[2].sum())
    return x


def mlp(params: kvjax_models.Llama, x: jax.Array) -> jax.Array:
    """The MLPs, with the norms before them."""
    for layer in params.layers:
        h = layer.post_attention_norm(x)
        x = x + layer.down_proj(jax.nn.silu(layer.gate_proj(h)) * layer.up_proj(h))
    return x


def logits(params: kvjax_models.Llama, x: jax.Array) -> jax.Array:
    """The output matrix, and hidden states that depend on what it gives."""
    return x + 1e-9 * params.logits(x[:, -1]).max()


def looped(part: Callable[[kvjax_models.Llama, jax.Array], jax.Array], params: kvjax_models.Llama, x: jax.Array):
    """Seconds of one turn of a compiled loop over a part, as decoding runs in one."""

    @jax.jit
    def loop(params: kvjax_models.Llama, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, STEPS, lambda _, x: part(params, x), x)

    run = timed(loop, params, x)
    return lambda: run() / STEPS


def weights_of(params: kvjax_models.Llama) -> tuple[int, int, int]:
    """Numbers in the projections, the MLPs, and the output matrix."""
    around = sum(
        one.kernel[...].size
        for layer in params.layers
        for one in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)
    )
    inside = sum(
        one.kernel[...].size for layer in params.layers for one in (layer.gate_proj, layer.up_proj, layer.down_proj)
    )
    return around, inside, params.embedding[...].size


def decode_parts(params: kvjax_models.Llama, policy: kvjax.Policy, tokens: int, rows: int) -> dict[str, Part]:
    """The parts of a decoding step behind `tokens` tokens, and the whole."""
    model = params.spec
    around, inside, output = (4 * size for size in weights_of(params))
    cache = random_cache(model, policy, tokens, room=STEPS, rows=rows)
    scores = jnp.zeros((rows, model.vocab_size), jnp.float32)
    hidden = jnp.ones((rows, 1, params.config.hidden_size), jnp.float32)
    query, key, value = (
        jnp.ones((rows, heads, model.head_dim), jnp.float32)
        for heads in (model.num_query_heads, model.num_kv_heads, model.num_kv_heads)
    )
    positions = cache.next_position

    def attention(
        _: object, carry: tuple[tuple[LayerState, ...], jax.Array]
    ) -> tuple[tuple[LayerState, ...], jax.Array]:
        states, query = carry
        after = []
        for spec, state in zip(cache.specs, states, strict=True):
            output, state = policy.decode(spec, state, query, key, value, positions, model.rope)
            query = query + 1e-3 * output
            after.append(state)
        return tuple(after), query

    attend = jax.jit(lambda *carry: jax.lax.fori_loop(0, STEPS, attention, carry), donate_argnums=0)

    def attend_steps() -> float:
        states = jax.block_until_ready(jax.tree.map(jnp.copy, cache.layers))
        started = time.perf_counter()
        jax.block_until_ready(attend(states, query))
        return (time.perf_counter() - started) / STEPS

    attend_steps()
    cached = kvjax.cache_bytes(cache)

    def step() -> float:
        return loop_seconds(params, scores, cache, steps=STEPS) / STEPS

    step()
    return {
        "projections": Part(looped(projections, params, hidden), around),
        "attention": Part(attend_steps, cached),
        "MLP": Part(looped(mlp, params, hidden), inside),
        "logits": Part(looped(logits, params, hidden), output),
        "whole": Part(step, around + inside + output + cached),
    }


def prefill_parts(params: kvjax_models.Llama, policy: kvjax.Policy, tokens: int, rows: int) -> dict[str, Part]:
    """The parts of a prefill, and the whole; work in operations, none where they do not matter."""
    model = params.spec
    around, inside, output = (2 * size for size in weights_of(params))
    hidden = jnp.ones((rows, tokens, params.config.hidden_size), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[None], (rows, tokens))
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.standard_normal((rows, tokens, heads, model.head_dim)), jnp.float32)
        for heads in (model.num_query_heads, model.num_kv_heads, model.num_kv_heads)
    )
    prompt = rng.integers(0, model.vocab_size, (rows, tokens))
    specs = kvjax.prefill(params, prompt, policy=policy, max_new_tokens=STEPS)[1].specs

    @jax.jit
    def attention(query: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        sums = None
        for spec in specs:
            asked = Asked(query, query, positions, None, model.rope)
            result, sums = policy.attend_prompt(asked, key, value, layer=spec.layer)
            query = query + 1e-3 * result
        return query, sums

    def kept(spec: LayerSpec, sums: jax.Array | None) -> LayerState:
        return policy.keep(spec, prompt_rows(key, value, positions), Asked(query, query, positions, sums, model.rope))

    keep = jax.jit(kept, static_argnums=0)
    _, sums = attention(query)

    def keep_all() -> float:
        started = time.perf_counter()
        jax.block_until_ready([keep(spec, sums) for spec in specs])
        return time.perf_counter() - started

    keep_all()

    def whole() -> float:
        started = time.perf_counter()
        jax.block_until_ready(kvjax.prefill(params, prompt, policy=policy, max_new_tokens=STEPS))
        return time.perf_counter() - started

    count = rows * tokens
    seen = 2 * model.num_layers * count * tokens * model.num_query_heads * model.head_dim
    return {
        "projections": Part(timed(jax.jit(projections), params, hidden), around * count),
        "attention": Part(timed(attention, query), seen),
        "choice and packing": Part(keep_all, 0),
        "MLP": Part(timed(jax.jit(mlp), params, hidden), inside * count),
        "logits": Part(timed(jax.jit(logits), params, hidden), output * rows),
        "whole": Part(whole, (around + inside) * count + output * rows + seen),
    }


def report(name: str, parts: dict[str, Part], read: Part, *, rounds: int, unit: str) -> None:
    """Runs all parts in turn and prints a row for each."""
    seconds: dict[str, list[float]] = {part: [] for part in [*parts, "read"]}
    for _ in range(rounds):
        for part, (run, _) in {**parts, "read": read}.items():
            seconds[part].append(run())
    medians = {part: statistics.median(times) for part, times in seconds.items()}
    rest = 2 * medians["whole"] - sum(medians[part] for part in parts)
    for part, (_, work) in parts.items():
        rate = f"{work / medians[part] / 1e9:.0f}" if work else ""
        print(f"| {name} | {part} | {medians[part] * 1e3:.1f} | {work / 1e6:.0f} | {rate} |")
    print(f"| {name} | rest | {rest * 1e3:.1f} | | |")
    speed = read.work / medians["read"]
    print(f"| {name} | plain read | {medians['read'] * 1e3:.1f} | {read.work / 1e6:.0f} | {speed / 1e9:.0f} |")
    if unit == "GB/s":
        share = parts["whole"].work / medians["whole"] / speed
        print(f"| {name} | whole over plain read | | | {share:.2f} |", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prefill", action="store_true", help="a prefill instead of a decoding step")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=POLICIES)
    args = parser.parse_args()
    if min(args.tokens, args.rows, args.rounds) < 1:
        parser.error(f"--tokens, --rows and --rounds must be 1 or more, got {args.tokens}, {args.rows}, {args.rounds}.")
    params = kvjax_models.load(kvjax_models.embedded_model()).params
    as_large = jnp.ones(sum(weights_of(params)), jnp.float32)
    read = Part(timed(jax.jit(jnp.sum), as_large), as_large.nbytes)
    unit, make = ("GFLOP/s", prefill_parts) if args.prefill else ("GB/s", decode_parts)
    what = "Mflop" if args.prefill else "MB"
    print(f"| policy | part | ms | {what} | {unit} |\n|---|---|---|---|---|")
    for name in args.policies:
        report(name, make(params, POLICIES[name], args.tokens, args.rows), read, rounds=args.rounds, unit=unit)


if __name__ == "__main__":
    main()
