"""What each policy costs in a deployment: bytes, rows that fit, and the speed that bandwidth allows."""

import dataclasses
from collections.abc import Sequence

from kvjax.memory.cache_bytes import prompt_specs, state_bytes, step_bytes
from kvjax.memory.deployment import Deployment, device_counts
from kvjax.policies import Policy
from kvjax.prompts import check_policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyPlan:
    """What one policy costs in a deployment.

    Attributes:
        policy: the policy.
        deployment: the deployment.
        row_bytes: of one row's cache: every array, empty slots and positions included.
        row_step_bytes: moved for one row by a decoding step, see `step_bytes`.
        grows: whether a longer answer needs a larger cache.
    """

    policy: Policy
    deployment: Deployment
    row_bytes: int
    row_step_bytes: int
    grows: bool

    @property
    def cache_bytes(self) -> int:
        """Of all rows."""
        return self.deployment.batch * self.row_bytes

    @property
    def share(self) -> float:
        """Of the formula's bytes. Over 1 for `Full`: prompts are padded, the answer has room, slots have positions."""
        return self.cache_bytes / self.deployment.full_bytes

    @property
    def largest_batch(self) -> int:
        """Rows that fit beside the weights and the workspace of one prompt.

        Prompts go in one after another then, and `jax.tree.map` joins their caches.
        """
        free = self._memory - self.deployment.workspace_bytes
        return max(0, int(free * self.deployment.shards // self.row_bytes))

    @property
    def largest_prefill(self) -> int:
        """Rows whose prompts can go in together, as in `kvjax.generate`, each with a workspace of its own."""
        return max(0, int(self._memory // (self.row_bytes / self.deployment.shards + self.deployment.workspace_bytes)))

    @property
    def fits(self) -> bool:
        """Whether the deployment's batch does, its prompts going in one after another."""
        return self.largest_batch >= self.deployment.batch

    @property
    def _memory(self) -> int:
        """Of one device, beside the weights."""
        return self.deployment.accelerator.memory_bytes - self.deployment.weight_bytes

    def step_bytes(self, batch: int | None = None) -> int:
        """Bytes that a decoding step moves, of so many rows or of the deployment's: weights and caches."""
        return self.deployment.size.step_bytes + self._rows(batch) * self.row_step_bytes

    def step_seconds(self, batch: int | None = None) -> float:
        """The least time of a step: the bytes that one device moves by its bandwidth."""
        deployment = self.deployment
        weights = deployment.size.step_bytes / deployment.devices
        caches = self._rows(batch) * self.row_step_bytes / deployment.shards
        return (weights + caches) / deployment.accelerator.bandwidth

    def tokens_per_second(self, batch: int | None = None) -> float:
        """The most tokens a second that the bandwidth allows, all rows together."""
        return self._rows(batch) / self.step_seconds(batch)

    def _rows(self, batch: int | None) -> int:
        return self.deployment.batch if batch is None else batch


def plan(policies: Sequence[Policy], deployment: Deployment) -> tuple[PolicyPlan, ...]:
    """What each policy costs in a deployment; nothing is computed, and no device started.

    Raises:
        ValueError: a budget above the context, or what a policy cannot have there.
    """
    return tuple(_plan(check_policy(policy), deployment) for policy in policies)


def fewest_devices(policy: Policy, deployment: Deployment) -> int | None:
    """The fewest devices that hold the deployment's batch under a policy; None where no number does."""
    # The bytes of a row are the same however many share them.
    planned = _plan(policy, deployment)
    for count in device_counts(deployment.model):
        if dataclasses.replace(planned, deployment=dataclasses.replace(deployment, devices=count)).fits:
            return count
    return None


def _plan(policy: Policy, deployment: Deployment) -> PolicyPlan:
    model, context, dtype = deployment.model, deployment.context, deployment.cache_dtype
    budget, room = getattr(policy, "budget", None), deployment.max_new_tokens
    if isinstance(budget, int) and budget > context:
        raise ValueError(f"`budget` must not exceed the `context` of {context} tokens, got {budget}.")
    slots = [
        [spec.slots for spec in prompt_specs(policy, model, [context], max_new_tokens=new)] for new in (room, room + 1)
    ]
    return PolicyPlan(
        policy=policy,
        deployment=deployment,
        row_bytes=state_bytes(policy, model, [context], max_new_tokens=room, dtype=dtype),
        row_step_bytes=step_bytes(
            policy,
            model,
            context,
            backend=deployment.accelerator.backend,
            max_new_tokens=room,
            batch=deployment.batch,
            dtype=dtype,
        ),
        grows=slots[0] != slots[1],
    )
