"""Renders chat templates in a process of its own, started by `template_process`, so that no template can harm ours.

Run as a script, with the folders of jinja2 and markupsafe as arguments; it imports nothing of kvjax. The environment
is that of transformers 5.24: the same extensions, filters and functions give the same text.
"""

import datetime
import functools
import json
import pickle
import signal
import struct
import sys
from typing import Any, NoReturn

DONE, REFUSED, TOO_LONG, NO_MEMORY = range(4)
#: Bytes of the template and its variables, and the bounds: seconds, characters, bytes of memory.
REQUEST = struct.Struct("<QdQQ")
#: One of the above, and bytes of the text.
ANSWER = struct.Struct("<BQ")


def main() -> None:
    """Answers requests on standard input until it ends."""
    sys.path.extend(sys.argv[1:])
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401  # Before the first request, whose time is bounded.

    own = _address_space()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while header := requests.read(REQUEST.size):
        size, seconds, characters, memory = REQUEST.unpack(header)
        template, variables = pickle.loads(requests.read(size))
        _limit_memory(own + memory if own else None)
        _limit_time(seconds)
        status, text = _answer(template, variables, characters)
        _limit_time(0)
        _limit_memory(None)
        # A template's own lone surrogates get through; what encodes the text refuses them.
        content = text.encode("utf-8", "surrogatepass")
        answers.write(ANSWER.pack(status, len(content)) + content)
        answers.flush()


def _answer(template: str, variables: dict[str, Any], characters: int) -> tuple[int, str]:
    try:
        parts, length = [], 0
        for part in _compiled(template).generate(variables):
            parts.append(part)
            length += len(part)
            if length > characters:
                return TOO_LONG, ""
        return DONE, "".join(parts)
    except MemoryError:
        return NO_MEMORY, ""
    except RecursionError:
        return REFUSED, "it recurses too deeply."
    except Exception as error:
        return REFUSED, f"{type(error).__name__}: {error}"[:1000]


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_namespace()
    )
    return environment.from_string(template)


def _generation() -> type:
    """The extension for `{% generation %}`, which marks an assistant's words for training and writes them as is."""
    from jinja2 import ext, nodes

    class Generation(ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

        def _written(self, caller: Any) -> str:
            return caller()

    return Generation


def _namespace() -> type:
    """Jinja's `namespace`, without names that begin with an underscore."""
    from jinja2 import exceptions, utils

    class Namespace(utils.Namespace):
        def __init__(*args: Any, **values: Any) -> None:  # `self` may be a name in it.
            values = dict(*args[1:], **values)
            for name in values:
                _check(name)
            utils.Namespace.__init__(args[0], values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check(name)
            super().__setitem__(name, value)

    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise exceptions.SecurityError(f"a namespace's name must not begin with an underscore, got {name!r}.")

    return Namespace


class _Dict:
    """Makes dictionaries, without the type's own attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _limit_time(seconds: float) -> None:
    """Has the system end this process after `seconds` of its processor's time; 0 for never."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory(size: int | None) -> None:
    """Has allocations fail that would take this process over `size` bytes of addresses."""
    try:
        import resource
    except ImportError:  # Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = hard if size is None else size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int | None:
    """The bytes of addresses that this process has; None where the system does not tell."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return None


if __name__ == "__main__":
    main()
