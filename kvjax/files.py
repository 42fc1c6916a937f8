"""Files that others made are read within bounds, and files of kvjax's own are written whole or not at all."""

import contextlib
import json
import os
import pathlib
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

#: Largest text file that is read whole, in bytes: the tokenizers of 260,000 tokens take 35 MB.
TEXT_LIMIT = 256 * 1024 * 1024

#: What git leaves in a large file's place where git-lfs did not run.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@contextlib.contextmanager
def reading(file: str | pathlib.Path, *, what: str) -> Iterator[None]:
    """Turns whatever goes wrong inside, in our own code or a library's, into a ValueError that names the file.

    Args:
        file: what is read.
        what: what it should have been, for the message: "a saved cache", "a chat template".

    Raises:
        ValueError: anything was raised inside; a ValueError that names the file already stays as it is.
    """
    try:
        yield
    except (ImportError, NotImplementedError):
        raise
    except ValueError as error:
        # Not as a part of another word: "a" is in most sentences.
        if re.search(rf"(?<![\w.-]){re.escape(str(file))}(?!\w)", str(error)):
            raise
        raise ValueError(f"{file} is not {what}: {_reason(error)}") from error
    except Exception as error:
        raise ValueError(f"{file} is not {what}: {_reason(error)}") from error
    except BaseException as error:
        # Rust extensions raise panics beside Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{file} is not {what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply."
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}."
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8."
    if isinstance(error, KeyError):
        return f"{error} is missing."
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= 300 else f"{text[:297]}..."
    return text if text.endswith((".", "...")) else f"{text}."


@contextlib.contextmanager
def open_regular(file: str | pathlib.Path) -> Iterator[BinaryIO]:
    """A regular file opened for reading, at its first byte.

    Raises:
        ValueError: no such file, a folder, a pipe or a device, a git-lfs pointer, or a file that cannot be read.
    """
    with contextlib.ExitStack() as stack:
        with reading(file, what="a file that can be read"):
            # A named pipe would wait for a writer for ever.
            handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            stack.callback(os.close, handle)
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ValueError("it is no regular file.")
            stream = stack.enter_context(open(handle, "rb", closefd=False))
            if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ValueError("it is a git-lfs pointer to the file; `git lfs pull` fetches the file itself.")
            stream.seek(0)
        yield stream


def read_bytes(file: str | pathlib.Path, *, limit: int = TEXT_LIMIT) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        ValueError: no such file, a folder, a pipe or a device, a git-lfs pointer, a file over the limit, or one that
            cannot be read.
    """
    with open_regular(file) as stream, reading(file, what="a file that can be read"):
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise ValueError(f"it has {size:,} bytes, over the limit of {limit:,}.")
        content = stream.read(size + 1)
        if len(content) > size:
            raise ValueError("it grew while it was read.")
        return content


def read_text(file: str | pathlib.Path, *, limit: int = TEXT_LIMIT) -> str:
    """The content of a UTF-8 file; see `read_bytes`."""
    content = read_bytes(file, limit=limit)
    with reading(file, what="UTF-8 text"):
        return content.decode("utf-8")


def parse_json(text: str, *, source: str | pathlib.Path) -> Any:
    """The value that a JSON text holds.

    Args:
        text: the JSON.
        source: the file that it comes from, for messages.

    Raises:
        ValueError: the text is no JSON, or nested too deeply.
    """
    with reading(source, what="JSON"):
        return json.loads(text)


def read_json(file: str | pathlib.Path, *, limit: int = TEXT_LIMIT) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: the file cannot be read, or holds no JSON object; the message names it.
    """
    content = parse_json(read_text(file, limit=limit), source=file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(content).__name__}.")
    return content


def write_bytes(file: str | pathlib.Path, content: bytes) -> None:
    """Writes a file whole or not at all: a kill, a full disk or a power loss leaves what was there before.

    A link stays one: what it leads to is replaced. A file that was there keeps its permissions.
    """
    file = pathlib.Path(os.path.realpath(file))
    part = _beside(file)
    try:
        with part.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if file.exists():
            part.chmod(stat.S_IMODE(file.stat().st_mode))
        part.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    flush_folder(file.parent)


def write_text(file: str | pathlib.Path, text: str) -> None:
    """Writes a UTF-8 file whole or not at all; see `write_bytes`."""
    write_bytes(file, text.encode("utf-8"))


def write_json(file: str | pathlib.Path, value: Any) -> None:
    """Writes a JSON file whole or not at all; see `write_bytes`. In ASCII: lines end where all readers think so."""
    write_text(file, json.dumps(value, indent=1) + "\n")


@contextlib.contextmanager
def new_folder(path: str | pathlib.Path, *, argument: str) -> Iterator[pathlib.Path]:
    """A folder beside `path` to be filled, which becomes `path` when the block ends, and goes when it fails.

    Args:
        path: the folder to be; it must be missing or empty.
        argument: the caller's argument that it came from, for messages.

    Raises:
        ValueError: `path` holds something already.
    """
    path = pathlib.Path(os.path.realpath(path))
    check_free(path, argument=argument)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _beside(path)
    try:
        part.mkdir()
        yield part
        _flush_files(part)
        # Over an empty folder; POSIX renames onto one.
        part.replace(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    flush_folder(path.parent)


def check_free(path: str | pathlib.Path, *, argument: str) -> None:
    """Raises a ValueError unless `path` is missing or an empty folder."""
    path = pathlib.Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"`{argument}` must be a new or empty folder, got {path}, which holds something.")


def flush_folder(folder: pathlib.Path) -> None:
    """Has the names in a folder reach the disk, where the system can do that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _flush_files(folder: pathlib.Path) -> None:
    """Has everything in a folder reach the disk: its name must not be there before its files are."""
    for place, _, names in folder.walk():
        for name in names:
            with (place / name).open("rb") as stream:
                os.fsync(stream.fileno())
        flush_folder(place)


def _beside(path: pathlib.Path) -> pathlib.Path:
    """A hidden name in the same folder that nothing has."""
    # A part of the name: the longest one leaves no room for more.
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.part")
