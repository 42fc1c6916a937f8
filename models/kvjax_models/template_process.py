"""Asks a process of its own for what a template makes, within bounds of time, memory and length.

Jinja's sandbox keeps a template from reaching out, and leaves it free to loop or to grow for ever: by operators,
methods, filters, macros, or values that hold themselves many times over. To bound each of these in Python is a list
that is never whole, and a single call inside C cannot be interrupted. The system can bound a process in all of it.
One process serves all templates; its start takes 0.1 to 0.3 s, once, and a text through it 0.1 ms.
"""

import atexit
import contextlib
import importlib.util
import os
import pathlib
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from kvjax.extras import extra
from kvjax_models import chat_worker

#: Longest text that a template may make, in characters, beside 16 for each byte that it was given.
CHARACTERS = 16_000_000
#: Processor's time that a template may take, in seconds, beside a second for every 4 MB that it was given.
SECONDS = 0.5
#: Memory that a template may take, in bytes, beside 32 for each byte that it was given.
MEMORY = 256 * 1024 * 1024


class TemplateProcess:
    """A process that renders templates; it starts when it is first asked, and again after one that failed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text that a template makes.

        Args:
            template: the Jinja source.
            variables: by name; dictionaries, lists, tuples, texts, numbers, booleans and None.

        Raises:
            ValueError: the template is no template, refuses, fails, or goes past the bounds.
        """
        given = pickle.dumps((template, dict(variables)))
        size = len(given)
        seconds, characters, memory = SECONDS + size / 4e6, CHARACTERS + 16 * size, MEMORY + 32 * size
        request = chat_worker.REQUEST.pack(size, seconds, characters, memory) + given
        with self._lock:
            status, text = self._ask(request, seconds)
        if status == chat_worker.DONE:
            return text
        if status == chat_worker.REFUSED:
            raise ValueError(text)
        if status == chat_worker.TOO_LONG:
            raise ValueError(f"it makes over {characters:,} characters.")
        if status == chat_worker.NO_MEMORY:
            raise ValueError(f"it takes over {memory:,} bytes of memory.")
        raise ValueError(text or f"it takes over {seconds:g} s.")

    def close(self) -> None:
        """Ends the process, if there is one of ours."""
        process, self._process = self._process, None
        # After a fork the process is the parent's.
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        with contextlib.suppress(OSError):
            process.communicate()

    def _ask(self, request: bytes, seconds: float) -> tuple[int | None, str]:
        """Sends a request; the answer's status, None where the process ended, and text."""
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.close()
            self._process, self._owner = _start(), os.getpid()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        # Processor's time is what counts, where the system can bound it: machines may be busy.
        late = threading.Event()
        wait = threading.Timer(20 * seconds if hasattr(signal, "setitimer") else seconds, _kill, (process, late))
        try:
            wait.start()
            process.stdin.write(request)
            process.stdin.flush()
            status, size = chat_worker.ANSWER.unpack(process.stdout.read(chat_worker.ANSWER.size))
            text = process.stdout.read(size).decode("utf-8", "surrogatepass")
        except (OSError, struct.error):
            code = process.wait()
            self.close()
            if late.is_set() or (hasattr(signal, "SIGPROF") and code == -signal.SIGPROF):
                return None, ""
            return None, f"it ended the process that renders templates, with code {code}."
        except BaseException:
            # An interrupt: the answer that is still to come would be taken for the next one's.
            self.close()
            raise
        finally:
            wait.cancel()
        if status == chat_worker.NO_MEMORY:
            self.close()
        return status, text


def _kill(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


def _start() -> subprocess.Popen[bytes]:
    """Starts the worker, apart from whatever the environment would have Python import."""
    with extra("text", purpose="Rendering a chat template"):
        folders = {_folder("jinja2"), _folder("markupsafe")}
    atexit.register(PROCESS.close)
    # A session of its own: Ctrl-C is ours alone.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", chat_worker.__file__, *folders],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _folder(package: str) -> str:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ImportError(f"No module named {package!r}", name=package)
    return str(pathlib.Path(found.origin).parent.parent)


#: The process that all templates share.
PROCESS = TemplateProcess()
