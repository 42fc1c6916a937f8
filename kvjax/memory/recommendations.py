"""Which policy suits which kind of work, and why, by what they cost."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvjax.memory.deployment import Deployment
from kvjax.memory.planning import PolicyPlan, fewest_devices, plan
from kvjax.policies import DuoAttention, Full, Policy, PyramidKV, SnapKV, StreamingLLM

# What still finds a needle anywhere in a prompt, by benchmarks/README.md: Full, and these where the question is in
# the prompt that is compressed (AdaKV is a SnapKV). DuoAttention's retrieval heads keep everything.
_CHOOSE_FOR_THE_QUESTION = (SnapKV, PyramidKV)
# A step that is not so many times as fast is not worth what is lost.
_WORTH_IT = 1.25


class Recommendation(NamedTuple):
    """A policy for a kind of work.

    Attributes:
        work: "streaming chat", "long-document questions" or "many tenants".
        chosen: one of the plans; None where none suits.
        reason: a sentence, with the numbers that it rests on.
    """

    work: str
    chosen: PolicyPlan | None
    reason: str


def recommend(plans: Sequence[PolicyPlan]) -> tuple[Recommendation, ...]:
    """A recommendation for each kind of work, out of plans of one deployment.

    Raises:
        ValueError: there are no plans, or plans of several deployments.
    """
    deployments = {entry.deployment for entry in plans}
    if len(deployments) != 1:
        raise ValueError(f"`plans` must be of one deployment, got {len(deployments)}.")
    deployment = plans[0].deployment
    (full,) = plan([Full()], deployment)
    works: dict[str, Callable[[Sequence[PolicyPlan], PolicyPlan], tuple[PolicyPlan | None, str]]] = {
        "streaming chat": _streaming_chat,
        "long-document questions": _long_documents,
        "many tenants": _many_tenants,
    }
    if not any(entry.largest_batch for entry in plans):
        reason = _nothing_fits(min(plans, key=lambda entry: entry.row_bytes).policy, deployment)
        return tuple(Recommendation(work, None, reason) for work in works)
    return tuple(Recommendation(work, *choose(plans, full)) for work, choose in works.items())


def _streaming_chat(plans: Sequence[PolicyPlan], full: PolicyPlan) -> tuple[PolicyPlan | None, str]:
    """What never grows, however long the talk: of such, StreamingLLM, whose positions can stay bounded too."""
    endless = [entry for entry in plans if not entry.grows and entry.fits]
    if not endless:
        return None, "every cache here grows with the talk, or does not fit; StreamingLLM's does not grow."
    chosen = min(endless, key=lambda entry: (not isinstance(entry.policy, StreamingLLM), entry.row_bytes))
    context, limit = chosen.deployment.context, chosen.deployment.model.max_positions
    reason = (
        f"its {_size(chosen.row_bytes)} a row never grow, where a full cache has {_size(full.row_bytes)} after "
        f"{context:,} tokens and goes on growing"
    )
    if not isinstance(chosen.policy, StreamingLLM):
        return chosen, f"{reason}; past the model's {limit:,} positions only StreamingLLM goes on."
    return chosen, f'{reason}; with `prefill_mask="streaming"` it goes on past the model\'s {limit:,} positions.'


def _long_documents(plans: Sequence[PolicyPlan], full: PolicyPlan) -> tuple[PolicyPlan | None, str]:
    """The full cache while it costs little, else what finds things anywhere in the prompt."""
    able = [entry for entry in _retrieving(plans) if entry.fits]
    if not able:
        return None, _none_fits(full, "of what finds things anywhere in a prompt, none fits")
    chosen = max(able, key=lambda entry: entry.tokens_per_second())
    gain = full.step_seconds() / chosen.step_seconds()
    kept_all = [entry for entry in able if isinstance(entry.policy, Full)]
    if kept_all and gain < _WORTH_IT:
        saved = "no other here is faster" if gain <= 1 else f"the fastest other would be {gain:.2f} times as fast"
        return kept_all[0], f"it loses nothing and fits {full.largest_batch:,} rows, and {saved}."
    reason = f"{gain:.1f} times as fast a step as the full cache, with {chosen.share:.0%} of its bytes"
    if not full.fits:
        many = full.deployment.batch
        reason = f"it fits with {_size(chosen.cache_bytes)}, where full caches for {many} would take more than there is"
    if isinstance(chosen.policy, DuoAttention):
        return chosen, f"{reason}; its retrieval heads keep all tokens, so questions may come later."
    others = [entry for entry in able if isinstance(entry.policy, DuoAttention)] or kept_all
    later = f"; for later ones take {type(others[0].policy).__name__}" if others else ""
    return chosen, f"{reason}; the question must be in the prompt that is compressed{later}."


def _many_tenants(plans: Sequence[PolicyPlan], full: PolicyPlan) -> tuple[PolicyPlan | None, str]:
    """The most tokens a second of all rows that fit."""
    able = [entry for entry in _retrieving(plans) if entry.largest_batch]
    able = able or [entry for entry in plans if entry.largest_batch]

    def together(entry: PolicyPlan) -> float:
        return entry.tokens_per_second(entry.largest_batch)

    chosen = max(able, key=together)
    rows = f"{chosen.largest_batch:,} rows fit, together at most {together(chosen):,.0f} tokens/s"
    if isinstance(chosen.policy, Full):
        return chosen, f"{rows}; no other here does more."
    if not full.largest_batch:
        return chosen, f"{rows}, where not one full cache fits."
    return chosen, f"{rows}, where {full.largest_batch:,} full caches fit with {together(full):,.0f} tokens/s."


def _retrieving(plans: Iterable[PolicyPlan]) -> list[PolicyPlan]:
    able = (Full, DuoAttention, *_CHOOSE_FOR_THE_QUESTION)
    return [entry for entry in plans if isinstance(entry.policy, able)]


def _none_fits(full: PolicyPlan, what: str) -> str:
    count = fewest_devices(full.policy, full.deployment)
    return f"{what}; full caches need {_devices(count, full.deployment)}."


def _nothing_fits(smallest: Policy, deployment: Deployment) -> str:
    count = fewest_devices(smallest, deployment)
    taken = f"the weights alone take {_size(deployment.weight_bytes)} of {_size(deployment.accelerator.memory_bytes)}"
    if deployment.weight_bytes < deployment.accelerator.memory_bytes:
        taken = f"{taken}, one prompt on its way {_size(deployment.workspace_bytes)}"
    return f"nothing fits: {taken} a device; the smallest cache needs {_devices(count, deployment)}."


def _devices(count: int | None, deployment: Deployment) -> str:
    if count is None:
        return f"more than {deployment.model.num_query_heads} such devices"
    return f"{count} such device{'s' if count > 1 else ''}"


def _size(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
