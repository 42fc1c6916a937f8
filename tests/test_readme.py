"""README's code runs as it stands there."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.rope import Rope

README = pathlib.Path(__file__).parents[1] / "README.md"


def block(containing: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (found,) = [text for text in blocks if containing in text]
    return found


@pytest.mark.smollm2
def test_the_first_lines_answer(capsys):
    exec(block("kvjax_models.load"), {})
    assert "Paris" in capsys.readouterr().out


def test_a_new_policy_is_under_30_lines_and_works(tiny):
    text = block("class LoudValues")
    assert len(text.splitlines()) < 30
    names: dict = {"__name__": "readme"}
    exec(text, names)
    policy = names["LoudValues"](budget=40)
    prompt = np.random.default_rng(0).integers(0, 512, 90)
    _, cache = kvjax.prefill(tiny, prompt, policy=policy, max_new_tokens=4)
    for layer in kvjax.kept_positions(cache):
        for positions in layer[0]:
            assert len(positions) == 40
            assert {*range(4), *range(74, 90)} <= set(positions.tolist())
    both = names["LoudValues"](budget=40, allocation=kvjax.Adaptive(layers=kvjax.Pyramid()))
    result = kvjax.generate(tiny, [prompt, prompt[:50]], policy=both, max_new_tokens=4, stop_tokens=())
    assert result.lengths.tolist() == [4, 4]


def test_a_foreign_attention_calls_a_policy():
    names: dict = {}
    exec(block("def attention("), names)
    rope = Rope(head_dim=16)
    model = kvjax.ModelSpec(
        num_layers=1,
        num_query_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=8,
        max_positions=64,
        dtype="float32",
        rope=rope,
    )
    policy = kvjax.SnapKV(budget=16, window=4)
    (spec,) = policy.layer_specs(model, 32, 2)
    keys = iter(jax.random.split(jax.random.key(0), 6))
    positions = jnp.arange(32, dtype=jnp.int32)[None]
    shapes = [(1, 32, heads, 16) for heads in (4, 2, 2)]
    output, state = names["attention"](
        policy, spec, *(jax.random.normal(next(keys), s) for s in shapes), positions, None, rope
    )
    assert output.shape == (1, 32, 4, 16)
    token = [jax.random.normal(next(keys), (1, 1, *shape[2:])) for shape in shapes]
    output, state = names["attention"](policy, spec, *token, jnp.asarray([[32]], jnp.int32), state, rope)
    assert output.shape == (1, 1, 4, 16)
    assert state.lengths.tolist() == [[17, 17]]
