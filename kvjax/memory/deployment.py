"""A model on devices, and what it is to do there."""

import dataclasses
from typing import NamedTuple

from kvjax.allocation import bucket, check_count
from kvjax.memory.accelerators import Accelerator
from kvjax.memory.cache_bytes import full_cache_bytes, itemsize
from kvjax.prompts import check_new_tokens
from kvjax.state import ModelSpec
from kvjax.steps import dtype_name

#: The largest int32.
MOST_POSITIONS = 2**31 - 1


class ModelSize(NamedTuple):
    """What a model takes beside its cache; `kvjax_models.model_size` tells it of a configuration.

    Attributes:
        weight_bytes: of all parameters.
        step_bytes: of the parameters that a decoding step reads: all, but for an embedding that is only looked up.
        shared_token_bytes: activations of a prompt's token that every device has: the residual stream.
        split_token_bytes: the others, where a layer is widest; devices share them.
    """

    weight_bytes: int
    step_bytes: int
    shared_token_bytes: int
    split_token_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model on devices, and what it is to do there.

    Several devices split the KV heads (tensor parallelism), and with them the query heads, the MLP and the cache.
    Every device has the residual stream, the norms' scales and the rows' next positions; the last two are too small
    to count. Where there are more devices than KV heads, several hold the same one. Heads that keep different numbers
    of tokens are taken to be spread evenly.

    Attributes:
        model: its sizes, and the dtype that it computes in.
        size: what it takes beside its cache.
        accelerator: one device.
        context: tokens of each row's prompt.
        devices: how many there are.
        batch: rows.
        max_new_tokens: room for the answer.
        cache_dtype: of cached keys and values; None is the model's.
    """

    model: ModelSpec
    size: ModelSize
    accelerator: Accelerator
    context: int
    devices: int = 1
    batch: int = 1
    max_new_tokens: int = 256
    cache_dtype: str | None = None

    def __post_init__(self) -> None:
        check_count("context", self.context, at_least=1)
        check_count("batch", self.batch, at_least=1, unit="row")
        check_new_tokens(self.max_new_tokens)
        if self.context + self.max_new_tokens > MOST_POSITIONS:
            raise ValueError(
                f"`context` + `max_new_tokens` must not exceed {MOST_POSITIONS:,}, since positions are 32-bit "
                f"integers, got {self.context} + {self.max_new_tokens}."
            )
        if self.batch > MOST_POSITIONS:
            raise ValueError(f"`batch` must not exceed {MOST_POSITIONS:,} rows, got {self.batch}.")
        dtype_name(self.cache_dtype)
        if self.devices not in device_counts(self.model):
            raise ValueError(
                f"`devices` must divide the model's {self.model.num_query_heads} query heads, and its "
                f"{self.model.num_kv_heads} KV heads or be a multiple of them, got {self.devices}."
            )

    @property
    def shards(self) -> int:
        """Into how many parts the cache is split."""
        return min(self.devices, self.model.num_kv_heads)

    @property
    def full_bytes(self) -> int:
        """Keys and values of all tokens of the prompts, by the formula."""
        return full_cache_bytes(self.model, batch=self.batch, length=self.context, dtype=self.cache_dtype)

    @property
    def weight_bytes(self) -> int:
        """Of one device's part of the weights."""
        return -(-self.size.weight_bytes // self.devices)

    @property
    def workspace_bytes(self) -> int:
        """What one row's prompt takes of a device on its way through the layers, beside the cache that is left.

        The whole prompt goes through a layer at once: there is one layer's keys and values of all its tokens, padding
        included, and their activations. Programs compiled for TPU v5e took 2 % more than this, and a quarter more
        where H2O sums its scores in plain JAX.
        """
        kv = 2 * self.model.num_kv_heads * self.model.head_dim * itemsize(self.model.dtype)
        split = self.size.split_token_bytes / self.devices + kv / self.shards
        return round(bucket(self.context) * (self.size.shared_token_bytes + split))


def device_counts(model: ModelSpec) -> list[int]:
    """Over how many devices the model's heads can be split."""
    query_heads, kv_heads = model.num_query_heads, model.num_kv_heads
    return [
        count
        for count in range(1, query_heads + 1)
        if query_heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)
    ]
