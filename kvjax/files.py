"""Files that others made are read within bounds, and files of kvjax's own are written whole or not at all."""

import contextlib
import json
import os
import pathlib
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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


#: A folder within another, with files that are all whole and on their way there.
_ARRIVING = ".arriving"


def write_together(folder: str | pathlib.Path, texts: Mapping[str, str]) -> None:
    """Writes several UTF-8 files of a folder, all or none: `newest_file` finds the older ones or all of the new ones.

    They are written into a folder within, which gets its name once they are whole; from there they move, each as
    soon as it can. What a kill has left there moves when files are written the next time.

    Args:
        folder: where the files go; made where it is missing.
        texts: by name.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _arrive(folder)
    with new_folder(folder / _ARRIVING, argument="folder") as part:
        for name, text in texts.items():
            write_text(part / name, text)
    _arrive(folder)


def newest_file(folder: str | pathlib.Path, name: str) -> pathlib.Path:
    """Where the newest whole version of a file lies that `write_together` wrote; it may be missing."""
    arriving = pathlib.Path(folder) / _ARRIVING / name
    return arriving if arriving.exists() else pathlib.Path(folder) / name


def _arrive(folder: pathlib.Path) -> None:
    arriving = folder / _ARRIVING
    if not arriving.is_dir():
        return
    for file in arriving.iterdir():
        file.replace(folder / file.name)
    arriving.rmdir()
    flush_folder(folder)


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


def is_free(path: pathlib.Path) -> bool:
    """Whether `path` is missing, or a folder that holds nothing but what a kill has left of files half written."""
    if not path.exists():
        return True
    return path.is_dir() and all(file.name.startswith(".") and file.suffix == ".part" for file in path.iterdir())


def check_writable(path: str | pathlib.Path, *, argument: str) -> None:
    """Raises a ValueError unless a folder could be made at `path`, or holds files already and could take others.

    Tried out, since permissions do not tell of read-only or full disks; what is tried is gone at once.
    """
    path = pathlib.Path(path).absolute()
    try:
        place = next(folder for folder in (path, *path.parents) if folder.exists())
        with tempfile.TemporaryDirectory(dir=place, prefix=".kvjax.", suffix=".part"):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"`{argument}` must be a folder that can be written, and {path} is not: {reason}.") from error


def append_lines(file: pathlib.Path, lines: Sequence[str]) -> None:
    """Appends lines, and has them reach the disk; nothing that is there is changed.

    Lines begin anew even where a kill or a full disk has left half a line.

    Raises:
        OSError: they cannot be written, at least not all; names the file.
    """
    new = not file.exists()
    try:
        with file.open("ab+", buffering=0) as stream:
            content = "".join(f"{line}\n" for line in lines).encode("utf-8")
            if stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                content = content if stream.read(1) == b"\n" else b"\n" + content
            while content:
                content = content[stream.write(content) :]
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error
    if new:
        flush_folder(file.parent)


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
