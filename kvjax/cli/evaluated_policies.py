"""The policies that `kvjax evaluate` compares, from what the user calls them."""

import dataclasses
from collections.abc import Callable, Sequence

import kvjax
from kvjax.cli.errors import UserError
from kvjax.cli.policies import POLICIES, make_policy


@dataclasses.dataclass(frozen=True)
class PolicyWithSettings:
    """Makes a policy for a budget.

    Attributes:
        name: one of `POLICIES`.
        settings: each "NAME=VALUE".
    """

    name: str
    settings: tuple[str, ...]

    def __call__(self, *, budget: int | float) -> kvjax.Policy:
        """The policy at a budget."""
        return make_policy(self.name, budget=budget, settings=self.settings)


def policies_by_name(names: Sequence[str]) -> dict[str, kvjax.Policy | Callable[..., kvjax.Policy]]:
    """What `kvjax.evaluation.contenders` takes, by what the user wrote: "snapkv" or "snapkv:window=16,kernel=5".

    Raises:
        UserError: an unknown name or setting.
        ValueError: the policy's own objections.
    """
    return {text: _policy(text) for text in names}


def _policy(text: str) -> kvjax.Policy | Callable[..., kvjax.Policy]:
    name, _, settings = text.partition(":")
    if name not in POLICIES:
        raise UserError(f"--policies must be among {', '.join(POLICIES)}; got {name!r}.")
    given = tuple(settings.split(",")) if settings else ()
    kind = getattr(kvjax, POLICIES[name])
    if kind is kvjax.DuoAttention and not given:
        return kind
    if any(field.name == "budget" for field in dataclasses.fields(kind)):
        return PolicyWithSettings(name, given)
    return make_policy(name, budget=None, settings=given)
