"""`benchmarks/kvpress_comparison.py`: its tables, from recorded lines; no worker is started."""

import json
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "kvpress_comparison.py"


def round_of(work: str, who: str, **result) -> dict:
    return {"work": work, "who": who, "others": 0.0, **result}


def tables(folder: pathlib.Path, *records: dict) -> list[list[list[str]]]:
    """The cells of every printed table, heads first."""
    out = folder / "records.jsonl"
    out.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [sys.executable, str(SCRIPT), "--table", "--out", str(out)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not printed:
        return []
    rows = [[line.strip("|").split("|") for line in part.splitlines()] for part in printed.split("\n\n")]
    return [[[cell.strip() for cell in row] for row in table if row[0] != "---"] for table in rows]


def test_a_file_that_is_not_there_gives_no_table(tmp_path):
    command = [sys.executable, str(SCRIPT), "--table", "--out", str(tmp_path / "none")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == ""


def test_ratios_are_of_medians_in_the_same_dtype_and_against_the_faster(tmp_path):
    work = "decode/SnapKV/1x4096"
    times = {"kvjax float32": (0.03, 0.02, 0.01), "kvpress float32": (0.04,), "kvpress bfloat16": (0.025,)}
    records = [round_of(work, who, value=value, kept=512.0) for who, values in times.items() for value in values]
    [[heads, row]] = tables(tmp_path, *records)
    assert heads[1:6] == ["kvjax float32", "kvpress float32", "kvpress bfloat16", "over float32", "over the best"]
    assert row[:6] == ["decoding step, SnapKV, 4,096", "20.0 ms", "40.0 ms", "25.0 ms", "0.50", "0.80"]
    assert row[6:] == ["0.7", "missed", "5 of 5", "512"]


def test_disturbed_rounds_do_not_count_while_there_are_quiet_ones(tmp_path):
    work = "prefill/Full/1x4096"
    records = [
        round_of(work, "kvjax float32", value=4.0),
        round_of(work, "kvjax float32", value=90.0) | {"others": 0.5},
        round_of(work, "kvpress float32", value=8.0) | {"others": 0.5},
    ]
    [[_, row]] = tables(tmp_path, *records)
    assert row[1:9] == ["4.00 s", "8.00 s", "", "0.50", "0.50", "1", "met", "1 of 3"]


def test_an_error_stands_in_the_cell(tmp_path):
    work = "prefill/H2O/1x4096"
    records = [
        round_of(work, "kvjax float32", value=4.0),
        round_of(work, "kvpress float32", error="RuntimeError: no memory"),
    ]
    [[_, row]] = tables(tmp_path, *records)
    assert row[1:6] == ["4.00 s", "RuntimeError: no memory", "", "", ""]


def test_hits_are_counted_and_answers_compared(tmp_path):
    work = "needles/SnapKV/1000/0.125"
    hits = [True, False]
    records = [
        round_of(work, "kvjax float32", hits=hits, texts=["12345", "x"]),
        round_of(work, "kvpress float32", hits=hits, texts=["12345", "y"]),
    ]
    [[heads, row]] = tables(tmp_path, *records)
    assert row[heads.index("1,000 tokens, 1/8 kept")] == "1 / 1 (1 same)"


def test_attempts_stand_side_by_side(tmp_path):
    work = "attempt/short prompt"
    records = [
        round_of(work, "kvjax float32", outcome="works"),
        round_of(work, "kvpress float32", error="AssertionError"),
    ]
    [[_, row]] = tables(tmp_path, *records)
    assert row == ["SnapKV, a prompt of 40 tokens", "works", "AssertionError"]
