"""Fills a Llama tensor by tensor from what a checkpoint stores, whatever its format."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from kvjax_models.config import LlamaConfig
from kvjax_models.llama import Llama

#: A parameter's place in the module, for example ("layers", 0, "q_proj", "kernel").
ParameterPath = tuple[str | int, ...]

#: Threads that read; NumPy and JAX work outside of Python's lock.
_READERS = 2

#: So many expected tensors are compared by name, whatever the checkpoint holds, so that a missing one can be named.
_FEW_TENSORS = 2000

#: Bytes that are converted at once.
_PIECE_BYTES = 1 << 18

_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a checkpoint's file, not read yet.

    Attributes:
        name: its name in the file.
        file: the file.
        shape: as stored; matrices are [outputs, inputs].
        dtype: the format's name of its type, for example "BF16" or "Q4_1".
        read: gives its values, in a floating-point type of NumPy or ml_dtypes.
        finite: `read` itself raises a ValueError where a value is not finite.
    """

    name: str
    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]
    finite: bool = False


def parameter_dtype(tensors: Iterable[StoredTensor]) -> DTypeLike:
    """bfloat16 where every matrix is stored so, else float32.

    float16 becomes float32: bfloat16 has fewer bits of mantissa, and would round the weights.
    """
    matrices = [tensor.dtype for tensor in tensors if len(tensor.shape) == 2]
    return jnp.bfloat16 if matrices and set(matrices) == {"BF16"} else jnp.float32


def build_llama(
    config: LlamaConfig,
    tensors: Mapping[str, StoredTensor],
    *,
    names: Mapping[str, str],
    ignored: Callable[[str], bool],
    dtype: DTypeLike,
    source: pathlib.Path,
) -> Llama:
    """Builds the model, holding two tensors beside the parameters at a time.

    Args:
        config: the model's configuration.
        tensors: what the checkpoint stores, by name.
        names: the format's name of each module, for example {"layers.q_proj": "blk.{layer}.attn_q"}.
        ignored: whether a tensor that the model has no place for is harmless.
        dtype: of every parameter.
        source: the checkpoint, for messages.

    Raises:
        ValueError: tensors are missing, surplus, of the wrong shape, or not finite.
    """
    check_layers(config, len(tensors), source=source)
    shapes = parameter_shapes(config, dtype=dtype)
    stored_names = {path: _stored_name(path, names) for path in shapes}
    _check_names(set(stored_names.values()), tensors, ignored=ignored, source=source)
    for path, name in stored_names.items():
        _check_shape(tensors[name], shapes[path].shape[::-1] if _transposed(path) else shapes[path].shape)
    with ThreadPoolExecutor(_READERS) as readers:
        arrays = readers.map(lambda path: _read(tensors[stored_names[path]], path, dtype=dtype), shapes)
        return llama_with(config, dict(zip(shapes, arrays, strict=True)), dtype=dtype)


def parameter_shapes(config: LlamaConfig, *, dtype: DTypeLike) -> dict[ParameterPath, jax.ShapeDtypeStruct]:
    """Every parameter's shape, without making any."""
    return _flatten(_abstract_llama(config, dtype=dtype))


def check_layers(config: LlamaConfig, stored: int, *, source: pathlib.Path) -> None:
    """Raises a ValueError before layers are made that a checkpoint of `stored` tensors cannot hold.

    Each has two norms, attention's four matrices and the MLP's three.
    """
    layers = config.num_hidden_layers
    if 9 * layers > max(stored, _FEW_TENSORS):
        raise ValueError(f"{source} holds {stored} tensors, too few for the {layers} layers of its configuration.")


def parameters(model: Llama) -> dict[ParameterPath, Float[Array, "..."]]:
    """Every parameter's array."""
    return _flatten(model)


def llama_with(config: LlamaConfig, arrays: Mapping[ParameterPath, Float[Array, "..."]], *, dtype: DTypeLike) -> Llama:
    """The model with these parameters."""
    graph, state = nnx.split(_abstract_llama(config, dtype=dtype))
    nnx.replace_by_pure_dict(state, nnx.traversals.unflatten_mapping(dict(arrays)))
    return nnx.merge(graph, state)


def _abstract_llama(config: LlamaConfig, *, dtype: DTypeLike) -> Llama:
    return Llama(config, dtype=dtype, rngs=None)


def _flatten(model: Llama) -> dict:
    return dict(nnx.traversals.flatten_mapping(nnx.to_pure_dict(nnx.state(model))))


def _transposed(path: ParameterPath) -> bool:
    return path[-1] == "kernel"  # Checkpoints store [outputs, inputs], Linear [inputs, outputs].


def _stored_name(path: ParameterPath, names: Mapping[str, str]) -> str:
    *module, leaf = path if path[-1] in _LEAVES else (*path, "scale")
    layer = module[1] if len(module) > 1 else None
    prefix = names[".".join(part for part in module if isinstance(part, str))]
    return f"{prefix.format(layer=layer)}.{_LEAVES[str(leaf)]}"


def _check_names(
    expected: set[str],
    tensors: Mapping[str, StoredTensor],
    *,
    ignored: Callable[[str], bool],
    source: pathlib.Path,
) -> None:
    missing = sorted(expected - tensors.keys())
    if missing:
        raise ValueError(f"{source} lacks {_some(missing)}, which its configuration asks for.")
    surplus = sorted(name for name in tensors.keys() - expected if not ignored(name))
    if surplus:
        files = sorted({str(tensors[name].file) for name in surplus})
        raise ValueError(f"{files[0]} holds {_some(surplus)}, which its configuration has no place for.")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the tensor {names[0]!r}{more}"


def _check_shape(tensor: StoredTensor, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise ValueError(
            f"{tensor.file}: the tensor {tensor.name!r} must be {expected} by the configuration, got {tensor.shape}."
        )


def _read(tensor: StoredTensor, path: ParameterPath, *, dtype: DTypeLike) -> Float[Array, "..."]:
    stored = tensor.read()
    stored = stored.T if _transposed(path) else stored
    # Always a copy: JAX may use the memory of a NumPy array as it is, and this one may be a mapped file.
    values = np.empty(stored.shape, dtype)
    # Piece by piece, so that a piece is still in the processor's cache when it is looked at.
    rows = max(1, _PIECE_BYTES * len(values) // values.nbytes)
    for start in range(0, len(values), rows):
        piece = values[start : start + rows]
        piece[...] = stored[start : start + rows]
        if not tensor.finite:
            check_finite(piece, name=tensor.name, file=tensor.file)
    return jax.device_put(values)


def check_finite(values: Float[np.ndarray, "..."], *, name: str, file: pathlib.Path) -> None:
    """Raises a ValueError where a tensor, as it will be used, holds infinities or what is not a number."""
    bits = 8 * values.dtype.itemsize
    # Infinities and what is no number have all bits of the exponent set, so that no finite number, read as a whole
    # number with the sign's bit or without, is as large. Two maxima are several times as fast as `np.isfinite`.
    infinity = int(np.array(np.inf, values.dtype).view(f"u{bits // 8}"))
    if values.view(f"i{bits // 8}").max() >= infinity or values.view(f"u{bits // 8}").max() >= infinity + (
        1 << bits - 1
    ):
        raise ValueError(f"{file}: the tensor {name!r} must hold finite numbers, got {_first_odd(values)}.")


def _first_odd(values: Float[np.ndarray, "..."]) -> float:
    return float(values[~np.isfinite(values)][0])
