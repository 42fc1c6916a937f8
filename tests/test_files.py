"""Foreign files are read within bounds; files of kvjax's own are written whole or not at all."""

import contextlib
import os
import re
import resource
import stat

import pytest

from kvjax.files import new_folder, parse_json, read_bytes, read_json, read_text, reading, write_bytes, write_json


@contextlib.contextmanager
def full_disk(room):
    """No file of more than `room` bytes can be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_is_written_is_read_back(tmp_path):
    value = {"text": "U+2028: \u2028, a lone surrogate: \ud800", "list": [1, 2.5, None]}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert (tmp_path / "a.json").read_bytes().isascii()
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    file = tmp_path / "a"
    write_bytes(file, b"before")
    with full_disk(400), pytest.raises(OSError, match="too large"):
        write_bytes(file, bytes(1000))

    def killed(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(file, b"after")
    assert file.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["a"]


def test_a_written_file_has_the_permissions_that_others_would_have(tmp_path):
    plain, shown = tmp_path / "plain", tmp_path / "shown"
    plain.write_bytes(b"")
    write_bytes(shown, b"x")
    assert shown.stat().st_mode == plain.stat().st_mode
    shown.chmod(0o600)
    write_bytes(shown, b"y")
    assert stat.S_IMODE(shown.stat().st_mode) == 0o600


def test_a_link_stays_one_and_long_names_can_be_written(tmp_path):
    target, link, long = tmp_path / "target", tmp_path / "link", tmp_path / ("\u00e4" * 127)
    link.symlink_to(target)
    write_bytes(link, b"x")
    assert link.is_symlink()
    assert target.read_bytes() == b"x"
    write_bytes(long, b"y")
    assert long.read_bytes() == b"y"


def test_a_folder_is_whole_or_not_there(tmp_path):
    with new_folder(tmp_path / "in" / "a", argument="path") as part:
        (part / "x").mkdir()
        write_bytes(part / "x" / "y", b"1")
        assert not (tmp_path / "in" / "a").exists()
    assert (tmp_path / "in" / "a" / "x" / "y").read_bytes() == b"1"

    def fill(folder):
        with full_disk(400), new_folder(folder, argument="path") as part:
            (part / "x").write_bytes(bytes(300))
            (part / "y").write_bytes(bytes(1000))

    with pytest.raises(OSError, match="too large"):
        fill(tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["in"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with new_folder(tmp_path / "link", argument="path") as part:
        write_bytes(part / "z", b"")
    assert os.listdir(tmp_path / "empty") == ["z"]
    with pytest.raises(ValueError, match=r"`path` must be a new or empty folder, got .*empty, which holds something"):
        new_folder(tmp_path / "empty", argument="path").__enter__()


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, message in {
        tmp_path / "pipe": "it is no regular file",
        tmp_path: "it is no regular file",
        "/dev/zero": "it is no regular file",
        tmp_path / "nothing": "No such file or directory",
        tmp_path / "a\0b": "embedded null",
        "/proc/self/status": "it grew while it was read",
    }.items():
        with pytest.raises(ValueError, match=rf"is not a file that can be read: {message}"):
            read_bytes(path)
    handles = len(os.listdir("/proc/self/fd"))
    with contextlib.suppress(ValueError):
        read_bytes(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == handles


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ab\xff", "is not UTF-8 text: byte 2 is not UTF-8"),
        (b"[" * 100_000, "is not JSON: it is nested too deeply"),
        (b"{", "is not JSON: Expecting property name"),
        (b"", "is not JSON: Expecting value"),
        (b"9" * 5000, "is not JSON: Exceeds the limit"),
        (b"[]", "must hold a JSON object, got list"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "is a git-lfs pointer .*`git lfs pull`",
        ),
    ],
)
def test_what_is_no_json_object_is_named(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a.json .*{message}" if "git-lfs" in message else rf"a.json {message}"):
        read_json(tmp_path / "a.json")


def test_a_file_over_the_limit_is_not_read(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_text(tmp_path / "a", limit=5) == "12345"
    with pytest.raises(ValueError, match=r"a is not a file .*: it has 5 bytes, over the limit of 4"):
        read_text(tmp_path / "a", limit=4)
    with pytest.raises(ValueError, match="a: 1 is not JSON"):
        parse_json("{", source="a: 1")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RecursionError(), "file.x is not a thing: it is nested too deeply."),
        (KeyError("name"), "file.x is not a thing: 'name' is missing."),
        (TypeError("two\nlines"), "file.x is not a thing: two lines."),
        (AssertionError(), "file.x is not a thing: AssertionError."),
        (ValueError("no file.xyz"), "file.x is not a thing: no file.xyz."),
        (ValueError("file.x: `a` must be 1."), "file.x: `a` must be 1."),
        (ValueError("y" * 1000), f"file.x is not a thing: {'y' * 297}..."),
        (type("PanicException", (BaseException,), {})("rust"), "file.x is not a thing: rust."),
    ],
)
def test_whatever_goes_wrong_names_the_file(error, message):
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"), reading("file.x", what="a thing"):
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, ImportError, NotImplementedError, SystemExit])
def test_what_is_not_the_files_fault_stays_as_it_is(error):
    with pytest.raises(error), reading("file.x", what="a thing"):
        raise error
