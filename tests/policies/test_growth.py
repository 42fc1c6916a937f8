"""What a policy takes of memory grows with the prompt, not with its square, within what `kvjax.memory` plans."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import memory
from kvjax.policies.h2o import voters
from kvjax.rope import Rope

RATIO: dict[str, Any] = {"compression_ratio": 0.5}
PATTERN = kvjax.HeadPattern.of([[0.1] * 4 + [0.9] * 4])
POLICIES = {
    "full": kvjax.Full(),
    "streaming_llm": kvjax.StreamingLLM(budget=0.25),
    "streaming_llm_kvpress": kvjax.StreamingLLM.kvpress(**RATIO),
    "streaming_llm_masked": kvjax.StreamingLLM(budget=256, prefill_mask="streaming"),
    "h2o": kvjax.H2O(budget=256),
    "h2o_mean": kvjax.H2O(budget=0.25, normalise="mean"),
    "h2o_paper": kvjax.H2O.paper(budget=0.25),
    "h2o_kvpress": kvjax.H2O.kvpress(**RATIO),
    "h2o_pyramid": kvjax.H2O(budget=256, allocation=kvjax.Pyramid()),
    "snapkv": kvjax.SnapKV(budget=256),
    "snapkv_paper": kvjax.SnapKV.paper(budget=0.25),
    "snapkv_authors": kvjax.SnapKV.authors(budget=0.25),
    "snapkv_kvpress": kvjax.SnapKV.kvpress(**RATIO),
    "snapkv_evicting": kvjax.SnapKV(budget=0.25, evict="decode"),
    "pyramidkv": kvjax.PyramidKV(budget=0.25),
    "pyramidkv_paper": kvjax.PyramidKV.paper(budget=256),
    "pyramidkv_authors": kvjax.PyramidKV.authors(budget=0.25),
    "pyramidkv_kvpress": kvjax.PyramidKV.kvpress(**RATIO),
    "tova": kvjax.TOVA(budget=0.25),
    "tova_paper": kvjax.TOVA.paper(budget=256),
    "tova_kvpress": kvjax.TOVA.kvpress(**RATIO),
    "knorm": kvjax.Knorm(budget=0.25),
    "knorm_kvpress": kvjax.Knorm.kvpress(**RATIO),
    "knorm_evicting": kvjax.Knorm(budget=0.25, evict="decode"),
    "expected_attention": kvjax.ExpectedAttention(budget=256),
    "expected_attention_kvpress": kvjax.ExpectedAttention.kvpress(**RATIO),
    "ada_kv": kvjax.AdaKV(budget=0.25),
    "ada_kv_kvpress": kvjax.AdaKV.kvpress(kvjax.SnapKV.kvpress(**RATIO)),
    "ada_h2o": kvjax.AdaKV.over(kvjax.H2O(budget=0.25, evict="prompt")),
    "ada_expected_attention": kvjax.AdaKV.over(kvjax.ExpectedAttention(budget=0.25)),
    "duo": kvjax.DuoAttention(pattern=PATTERN),
    "duo_masked": kvjax.DuoAttention(pattern=PATTERN, prefill_mask="streaming"),
}
# A layer of Llama 3 8B, and what its model takes of memory.
LAYER = kvjax.ModelSpec(
    num_layers=1,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=8,
    max_positions=1 << 20,
    dtype="bfloat16",
    rope=Rope(head_dim=128),
)
HIDDEN, INNER = 4096, 14336
SIZE = memory.ModelSize(
    weight_bytes=0, step_bytes=0, shared_token_bytes=2 * 2 * HIDDEN, split_token_bytes=2 * 2 * INNER
)


def array_bytes(jaxpr: Any) -> int:
    """Of all arrays that a program makes, of a loop's one pass; an upper bound of what it holds at a time."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [program for value in equation.params.values() for program in programs(value)]
        outputs = [] if inner else [variable.aval for variable in equation.outvars]
        total += sum(map(array_bytes, inner))
        total += sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in outputs)
    return total


def programs(value: Any) -> Iterator[Any]:
    """The jaxprs in a parameter of an equation."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from programs(part)
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif hasattr(value, "eqns"):
        yield value


@pytest.mark.parametrize("name", POLICIES)
def test_memory_grows_with_the_prompt_not_its_square(traced, name):
    """Broken by: any array of all tokens by all; a prompt's, a later turn's and a decoded token's."""
    short, long = (
        [array_bytes(program.jaxpr) for program, _ in traced(POLICIES[name], LAYER, length)] for length in (8192, 16384)
    )
    for call, one, two in zip(("prefill", "extend", "decode"), short, long, strict=True):
        assert two <= 2.05 * one, f"{call}: {one:,} bytes for 8,192 tokens and {two:,} for 16,384"


@pytest.mark.parametrize(
    "name", ["h2o_mean", "h2o_kvpress", "snapkv_kvpress", "expected_attention_kvpress", "ada_kv_kvpress", "duo_masked"]
)
def test_a_prefill_stays_within_what_is_planned(name):
    """What one layer's compiled program holds beside its arguments, these, and the residual stream and its norm."""
    length, policy = 4096, POLICIES[name]
    plan = memory.Deployment(model=LAYER, size=SIZE, accelerator=memory.ACCELERATORS["v5e"], context=length)
    spec = policy.layer_specs(LAYER, length, 8)[0]
    heads = (LAYER.num_query_heads, LAYER.num_kv_heads, LAYER.num_kv_heads)
    arrays = [jax.ShapeDtypeStruct((1, length, h, LAYER.head_dim), jnp.bfloat16) for h in heads]
    prefill = jax.jit(lambda *given: policy.prefill(spec, *given, LAYER.rope))
    analysis = prefill.lower(*arrays, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile().memory_analysis()
    assert analysis is not None
    held = analysis.temp_size_in_bytes + analysis.argument_size_in_bytes + length * SIZE.shared_token_bytes
    assert held <= plan.workspace_bytes, f"{held:,} of {plan.workspace_bytes:,} bytes"


def test_voters_are_counted_without_comparing_all_with_all():
    """Of ragged rows, later turns after an eviction, rows that add no token, and pads."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        asked, positions = np.full((3, 14), kvjax.EMPTY), np.full((3, 2, 20), kvjax.EMPTY)
        for row in range(3):
            start, length = int(rng.integers(0, 30)), int(rng.integers(0, 12))
            asked[row, :length] = start + np.arange(length)
            for head in range(2):
                tokens = min(int(rng.integers(0, 20)), start + length)
                positions[row, head, :tokens] = np.sort(rng.choice(start + length, tokens, replace=False))
        seen = (asked[:, None, None] >= positions[..., None]) & (asked >= 0)[:, None, None]
        given = voters(jnp.asarray(asked, jnp.int32), jnp.asarray(positions, jnp.int32))
        np.testing.assert_array_equal(given, seen.sum(-1))
