"""What `kvjax inspect` has found, as text and as JSON."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import kvjax
from kvjax.cli.report import policy_settings, sizes
from kvjax.cli.retention import layer_lines, percent, span_lines, span_with, spans, token_lines
from kvjax.plots import short_name
from kvjax.statistics import full_cache_bytes

if TYPE_CHECKING:
    import numpy as np

    from kvjax.inspection import AttentionMass, TokenRetention


class Findings(NamedTuple):
    """What there is to tell.

    Attributes:
        cache: of the whole prompt.
        table: the prompt's tokens.
        counts: [L, K], tokens that each head keeps.
        mass: what the policy holds of the attention of the prompt's last tokens.
        queries: so many.
        number: what the prompt hides, or None.
    """

    cache: "kvjax.Cache"
    table: "list[TokenRetention]"
    counts: "np.ndarray"
    mass: "AttentionMass"
    queries: int
    number: str | None

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        return self.counts.size


def text_findings(findings: Findings, *, every_token: bool) -> Iterator[str]:
    """Lines to read: the whole, by layer, and by token or by span."""
    cache, table, heads, mass = findings.cache, findings.table, findings.heads, findings.mass
    share = float(findings.counts.mean()) / len(table)
    size, full = _sizes(findings)
    name = short_name(cache.policy)
    yield f"{name} keeps {percent(share)} of {len(table)} tokens, {sizes(size, full)}"
    held, best = percent(float(mass.kept.mean())), percent(float(mass.oracle.mean()))
    yield f"of the last {findings.queries} tokens' attention to those before: {held} held, {best} at best"
    if findings.number is not None:
        kept = percent(span_with(table, findings.number, heads=heads).share)
        yield f"the number {findings.number} is kept by {kept} of the {heads} heads"
    yield ""
    yield from layer_lines(findings.counts, mass)
    yield ""
    yield from token_lines(table, heads=heads) if every_token else span_lines(spans(table, heads=heads))


def json_findings(findings: Findings, *, model: str, policy: str, picture: str) -> str:
    """One JSON object.

    Args:
        findings: what to tell.
        model: what the user calls it.
        policy: what the user calls it.
        picture: its path.
    """
    size, full = _sizes(findings)
    mass = findings.mass
    report = {
        "policy": {"name": policy, **policy_settings(findings.cache.policy)},
        "model": model,
        "cache_bytes": size,
        "full_cache_bytes": full,
        "heads": findings.heads,
        "kept_tokens": findings.counts.tolist(),
        "attention": {
            "queries": findings.queries,
            "kept": mass.kept[:, 0].tolist(),
            "oracle": mass.oracle[:, 0].tolist(),
        },
        "tokens": [entry._asdict() for entry in findings.table],
        "picture": picture,
    }
    if findings.number is not None:
        report["needle"] = {
            "number": findings.number,
            "heads_share": span_with(findings.table, findings.number, heads=findings.heads).share,
        }
    return json.dumps(report, ensure_ascii=False)


def _sizes(findings: Findings) -> tuple[int, int]:
    """Bytes of the cache, and of the keys and values of a full one with the same room."""
    cache = findings.cache
    return kvjax.cache_bytes(cache), full_cache_bytes(cache, len(findings.table) + cache.room)
