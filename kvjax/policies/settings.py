"""What to say where a policy is given settings that it does not have."""

import inspect
from typing import Any


def check_settings(kind: type, settings: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raises a ValueError unless a policy's constructor takes these arguments.

    The message tells the settings that there are, and the classmethod that takes kvpress's names, if one does.
    """
    try:
        inspect.signature(kind.__init__).bind(None, *settings, **named)
    except TypeError as error:
        raise ValueError(_reason(kind, settings, named) or f"{kind.__name__}: {error}.") from error


def _reason(kind: type, settings: tuple[Any, ...], named: dict[str, Any]) -> str | None:
    name, known = kind.__name__, _names(kind.__init__)
    if settings:
        example = f"{next(iter(known), 'setting')}={settings[0]!r}"
        return f"{name} takes its settings by name, such as `{name}({example})`, got {settings[0]!r} without one."
    unknown = [key for key in named if key not in known]
    if unknown:
        has = f"its settings are {', '.join(f'`{key}`' for key in known)}" if known else "it has none"
        return f"{name} has no setting `{unknown[0]}`: {has}.{_kvpress_hint(kind, unknown)}"
    missing = [key for key, needed in known.items() if needed and key not in named]
    return f"{name} needs {' and '.join(f'`{key}`' for key in missing)}." if missing else None


def _kvpress_hint(kind: type, unknown: list[str]) -> str:
    preset = getattr(kind, "kvpress", None)
    theirs = {} if preset is None else _names(preset)
    if not any(key in theirs for key in unknown):
        return ""
    call = f"{kind.__name__}.kvpress({', '.join(f'{key}=...' for key in theirs)})"
    return f" `{call}` takes kvpress's; a `compression_ratio` is what is removed, a `budget` what is kept."


def _names(function: Any) -> dict[str, bool]:
    """A function's keywords, and whether each is needed."""
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name: p.default is p.empty
        for p in parameters
        if p.name not in ("self", "cls") and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
