"""What `kvjax plan` has computed, as a table and as JSON."""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import kvjax
from kvjax.cli.report import policy_settings
from kvjax.cli.retention import percent

if TYPE_CHECKING:
    from kvjax.memory import Deployment, PolicyPlan, Recommendation

_HEADINGS = ("policy", "keeps", "cache", "of full", "rows", "at once", "a token", "tokens/s")
_WIDTH = 110


def text_plan(
    plans: "Mapping[str, PolicyPlan]", recommendations: "Sequence[Recommendation]", *, model: str
) -> Iterator[str]:
    """Lines to read: the deployment, a row a policy, what the columns are, and what to choose.

    Args:
        plans: by what the user calls the policy.
        recommendations: out of these plans.
        model: what the user calls it.
    """
    deployment = next(iter(plans.values())).deployment
    yield from _deployment_lines(deployment, model=model)
    yield ""
    table = [_HEADINGS, *(_cells(name, entry) for name, entry in plans.items())]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, *numbers in table:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        yield "  ".join([name.ljust(widths[0]), *cells])
    yield ""
    yield "keeps: tokens a KV head. rows: that fit beside the weights, their prompts going in one after another."
    yield "at once: that fit where all prompts go in together, as in `kvjax.generate`. a token: bytes moved for each"
    yield "decoded one. tokens/s: of all rows, if only the memory's bandwidth took time."
    if not all(entry.fits for entry in plans.values()):
        yield "* does not fit."
    yield ""
    if all(entry.chosen is None for entry in recommendations):
        yield from _wrapped(recommendations[0].reason)
        return
    for entry in recommendations:
        yield from _wrapped(f"{entry.work}: {_choice(entry, plans)}")


def _deployment_lines(deployment: "Deployment", *, model: str) -> Iterator[str]:
    size, device, count = deployment.size, deployment.accelerator, deployment.devices
    yield f"{model} in {deployment.model.dtype}: {_size(size.weight_bytes)} of weights"
    rows = f"{deployment.batch} row{'s' if deployment.batch > 1 else ''} of {deployment.context:,} tokens"
    each = f" ({_size(deployment.full_bytes // deployment.batch)} a row)" if deployment.batch > 1 else ""
    dtype = deployment.cache_dtype or deployment.model.dtype
    yield f"{rows}: keys and values of all are {_size(deployment.full_bytes)} in {dtype}{each}, 2 B L n K D P"
    together = f"{_size(count * device.memory_bytes)}, {_size(count * device.bandwidth)}/s"
    workspace = f"a prompt on its way takes {_size(deployment.workspace_bytes)} of each"
    yield f"{count} x {device.name}: {together}; {workspace}"


def _cells(name: str, entry: "PolicyPlan") -> tuple[str, ...]:
    deployment = entry.deployment
    speed = entry.tokens_per_second()
    return (
        name,
        _kept(entry.policy),
        _size(entry.cache_bytes),
        percent(entry.share),
        f"{entry.largest_batch:,}",
        f"{entry.largest_prefill:,}",
        _size(entry.step_bytes() / deployment.batch),
        (f"{speed:,.0f}" if speed >= 1000 else f"{speed:.4g}") + ("" if entry.fits else "*"),
    )


def _kept(policy: "kvjax.Policy") -> str:
    if isinstance(policy, kvjax.DuoAttention):
        return f"sparsity {policy.sparsity:g}"
    budget = getattr(policy, "budget", None)
    if budget is None:
        return "all"
    return f"{budget:,}" if isinstance(budget, int) else percent(budget)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="    ")


def _choice(entry: "Recommendation", plans: "Mapping[str, PolicyPlan]") -> str:
    names = {id(plan): name for name, plan in plans.items()}
    return entry.reason if entry.chosen is None else f"{names[id(entry.chosen)]}: {entry.reason}"


def _size(count: float) -> str:
    """Bytes to four digits."""
    for unit, name in ((1e12, "TB"), (1e9, "GB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count / 1e6:.4g} MB"


def json_plan(plans: "Mapping[str, PolicyPlan]", recommendations: "Sequence[Recommendation]", *, model: str) -> str:
    """One JSON object; see `text_plan`."""
    deployment = next(iter(plans.values())).deployment
    names = {id(plan): name for name, plan in plans.items()}
    report = {
        "model": {"name": model, "dtype": deployment.model.dtype, **deployment.size._asdict()},
        "device": {
            "name": deployment.accelerator.name,
            "count": deployment.devices,
            "memory_bytes": deployment.accelerator.memory_bytes,
            "bandwidth": deployment.accelerator.bandwidth,
            "workspace_bytes": deployment.workspace_bytes,
        },
        "context": deployment.context,
        "batch": deployment.batch,
        "max_new_tokens": deployment.max_new_tokens,
        "cache_dtype": deployment.cache_dtype or deployment.model.dtype,
        "full_cache_bytes": deployment.full_bytes,
        "policies": [
            {
                "name": name,
                **{key: value for key, value in policy_settings(entry.policy).items() if key != "pattern"},
                "cache_bytes": entry.cache_bytes,
                "share": entry.share,
                "largest_batch": entry.largest_batch,
                "largest_prefill": entry.largest_prefill,
                "fits": entry.fits,
                "step_bytes": entry.step_bytes(),
                "tokens_per_second": entry.tokens_per_second(),
            }
            for name, entry in plans.items()
        ],
        "recommendations": [
            {
                "work": entry.work,
                "policy": None if entry.chosen is None else names[id(entry.chosen)],
                "reason": entry.reason,
            }
            for entry in recommendations
        ],
    }
    return json.dumps(report, ensure_ascii=False)
