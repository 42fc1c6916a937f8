"""What an answer took, as a line and as JSON."""

import dataclasses
import json
import types
from typing import TYPE_CHECKING, Any

import kvjax
from kvjax.cli.conversation import Answer

if TYPE_CHECKING:
    import kvjax_models


def stats_line(answer: Answer) -> str:
    """Times and bytes of an answer, on one line."""
    stats = answer.result.stats
    parts = [f"prefill {stats.prefill_seconds:.1f} s", f"first token {answer.first_token_seconds:.1f} s"]
    if stats.compile_seconds >= 0.05:
        parts.append(f"compiled {stats.compile_seconds:.1f} s")
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    if isinstance(answer.result.cache.policy, kvjax.Full):
        parts.append(f"cache {megabytes(stats.cache_bytes)} (full)")
    else:
        parts.append(f"cache {sizes(stats.cache_bytes, stats.full_cache_bytes)}")
    return " · ".join(parts)


def sizes(cache: int, full: int) -> str:
    """The bytes of a cache beside a full one's; a cache of fixed size is the larger one as long as little is in it."""
    if cache > full:
        return f"{megabytes(cache)}, of fixed size; a full one would have {megabytes(full)} so far"
    return f"{megabytes(cache)} of {megabytes(full)} full ({cache / full * 100:.0f} %)"


def json_report(
    answer: Answer, *, model_name: str, loaded: "kvjax_models.Loaded", policy_name: str, **more: Any
) -> str:
    """One JSON object about an answer.

    Args:
        answer: the answer.
        model_name: what the user calls the model.
        loaded: the model.
        policy_name: what the user calls the policy.
        more: further entries.
    """
    result, spec = answer.result, loaded.params.spec
    length = int(result.lengths[0])
    assert result.texts is not None
    stats = dataclasses.asdict(result.stats)
    # One row: plain numbers.
    stats |= {name: stats[name][0] for name in ("prompt_tokens", "new_tokens")}
    report = {
        "text": result.texts[0],
        "tokens": result.tokens[0, :length].tolist(),
        "length": length,
        "finish_reason": result.finish_reasons[0],
        "stats": {
            **stats,
            "first_token_seconds": answer.first_token_seconds,
            "tokens_per_second": answer.tokens_per_second,
        },
        "policy": {"name": policy_name, **policy_settings(result.cache.policy)},
        "model": {
            "name": model_name,
            "dtype": spec.dtype,
            "cache_dtype": result.cache.specs[0].dtype,
            "layers": spec.num_layers,
            "query_heads": spec.num_query_heads,
            "kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "context": spec.max_positions,
        },
        **more,
    }
    return json.dumps(report, ensure_ascii=False)


def policy_settings(policy: Any) -> dict[str, Any]:
    """A policy's settings; those that are no plain values as Python writes them."""
    settings = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    plain = (int, float, str, types.NoneType)
    return {name: value if isinstance(value, plain) else repr(value) for name, value in settings.items()}


def megabytes(size: int) -> str:
    """Bytes in millions, to three digits."""
    return f"{size / 1e6:.3g} MB" if size < 1e9 else f"{size / 1e9:.3g} GB"
