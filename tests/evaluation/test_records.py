"""A run's folder loses no record that was whole, whatever stops it, and says what it leaves out."""

import importlib.util
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys

import pytest

import kvjax.files
from kvjax.evaluation.records import (
    MANIFEST,
    RESULTS,
    DamagedRecordsWarning,
    Folder,
    Record,
    check_folder,
    read_records,
)

ABOUT = {"model": "small", "experiment": {"seed": 0, "text": "e\u2028f"}}


def record(sample, answer="Paris"):
    return Record("h2o", 64, "aware", "needle", 200, 0.5, sample, 1.0, answer, ("Paris",), 190, 64.0, 4096)


@pytest.fixture
def folder(tmp_path):
    made = Folder(tmp_path / "run", ABOUT)
    made.write_manifest(finished=False)
    return made


def again(folder):
    return sorted(Folder(folder.path, ABOUT).records.values())


def test_answers_survive_with_every_character(folder):
    answers = ["a\u2028b\u2029c", "\x0b\x0c\x1c\x85", "line\nend\r\n", "\ud800 alone", "日本 \N{GRINNING FACE}", "\0"]
    records = [record(sample, answer) for sample, answer in enumerate(answers)]
    folder.add(records)
    assert again(folder) == read_records(folder.path) == records
    assert (folder.path / RESULTS).read_bytes().isascii()
    assert (folder.path / MANIFEST).read_bytes().isascii()


def test_what_a_kill_or_a_power_loss_leaves_is_left_out_counted_and_never_edited(folder):
    folder.add([record(0)])
    file = folder.path / RESULTS
    line = file.read_bytes()
    damage = [b'{"policy": "sna\n', b"\n", b"\0" * 600 + b"\n", b"\xff\xfe\n", b"[]\n", b"[" * 100_000 + b"\n"]
    damage += [line.replace(b'"score": 1.0', b'"score": "x"'), line.replace(b"score", b"scora")]
    damage += [line.replace(b'"length": 200', b'"length": ' + b"9" * 5000), b"\0\0" + line, b'{"policy": "sna']
    file.write_bytes(line + b"".join(damage))
    before = file.read_bytes()
    with pytest.warns(DamagedRecordsWarning, match=rf"{file}: 8 of 12 lines are no records .* line 3"):
        resumed = Folder(folder.path, ABOUT)
    assert sorted(resumed.records.values()) == [record(0)]
    assert file.read_bytes() == before
    resumed.add([record(1)])
    resumed.add([record(2)])
    assert file.read_bytes().startswith(before + b"\n{")
    with pytest.warns(DamagedRecordsWarning, match="8 of 14"):
        assert again(folder) == [record(0), record(1), record(2)]


def test_a_last_line_that_lacks_only_its_end_is_whole(folder):
    folder.add([record(0)])
    file = folder.path / RESULTS
    file.write_bytes(file.read_bytes()[:-1])
    resumed = Folder(folder.path, ABOUT)
    resumed.add([record(1)])
    assert again(folder) == [record(0), record(1)]


def test_a_full_disk_loses_nothing_that_was_whole_and_the_run_goes_on(folder):
    folder.add([record(sample) for sample in range(5)])
    file = folder.path / RESULTS
    before, limit = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limit[1]))
    try:
        for sample in (5, 6):
            with pytest.raises(OSError, match="File too large") as raised:
                folder.add([record(sample)])
            assert raised.value.filename == str(file)
        with pytest.raises(OSError, match="File too large"):
            folder.write_manifest(finished=True, more="x" * 9999)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert 5 not in [key[-1] for key in folder.records]
    assert file.read_bytes()[: len(before)] == before
    assert json.loads((folder.path / MANIFEST).read_text())["finished"] is False
    folder.add([record(7)])
    assert [r.sample for r in again(folder)] == [0, 1, 2, 3, 4, 7]


def test_a_first_manifest_that_failed_lets_the_same_command_go_on(tmp_path, monkeypatch):
    folder = Folder(tmp_path / "run", ABOUT)
    monkeypatch.setattr(kvjax.files.os, "fsync", _fail)
    with pytest.raises(OSError, match="no room"):
        folder.write_manifest()
    assert not list(folder.path.iterdir())
    # Killed before it could tidy up.
    (folder.path / f".{MANIFEST}.abc.part").write_text("{")
    monkeypatch.undo()
    Folder(tmp_path / "run", ABOUT).write_manifest()
    check_folder(tmp_path / "run", ABOUT)


def _fail(handle):
    raise OSError(28, "no room")


_APPENDING = """
import importlib.util, json, os, sys
found = importlib.util.spec_from_file_location("files", sys.argv[1])
files = importlib.util.module_from_spec(found)
found.loader.exec_module(files)
file = files.pathlib.Path(sys.argv[2])
whole = 0
for line in file.read_bytes().split(b"\\n") if file.exists() else []:
    try:
        whole = max(whole, json.loads(line)["number"] + 1)
    except ValueError:
        pass
while True:
    files.append_lines(file, [json.dumps({"number": whole, "text": "x" * 5000})] * 3)
    os.write(1, b"%d\\n" % whole)
    whole += 1
"""


def test_a_run_that_is_killed_three_times_in_a_row_loses_nothing(tmp_path):
    module = importlib.util.find_spec("kvjax.files")
    assert module is not None
    assert module.origin is not None
    file, rng = tmp_path / RESULTS, random.Random(0)
    for _ in range(3):
        command = [sys.executable, "-S", "-c", _APPENDING, module.origin, str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            told = [process.stdout.readline() for _ in range(1 + rng.randrange(20))]
            process.send_signal(signal.SIGKILL)
            told += process.stdout.readlines()
        assert process.returncode == -signal.SIGKILL
        last = int(told[-1])
        # Torn, as a kill within the kernel's writing leaves it.
        with file.open("ab") as stream:
            stream.write(b'{"number": 99999999, "te')
        numbers = []
        for line in file.read_bytes().split(b"\n"):
            try:
                numbers.append(json.loads(line)["number"])
            except ValueError:
                continue
        assert sorted(set(numbers)) == list(range(max(numbers) + 1))
        assert max(numbers) >= last


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"experiment": []}', '{"experiment": null}', "[" * 100_000, "\udcff", "3"]
)
def test_a_damaged_manifest_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / MANIFEST).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=str(tmp_path / MANIFEST)):
        check_folder(tmp_path, ABOUT)


def test_what_is_no_file_is_an_error_that_names_it(folder, tmp_path):
    (folder.path / RESULTS).mkdir()
    with pytest.raises(ValueError, match=rf"{RESULTS} .*no regular file"):
        Folder(folder.path, ABOUT)
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(ValueError, match=rf"{MANIFEST} .*no regular file"):
        check_folder(tmp_path, ABOUT)
    with pytest.raises(ValueError, match=rf"{RESULTS} .*No such file"):
        read_records(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file" / "run", pathlib.Path("/proc/kvjax/run"), tmp_path / ("x" * 300), tmp_path / "file"):
        with pytest.raises(ValueError, match=r"`out` must be a folder that can be written, and .* is not"):
            check_folder(out, ABOUT)
    check_folder(tmp_path / "new" / "run", ABOUT)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
