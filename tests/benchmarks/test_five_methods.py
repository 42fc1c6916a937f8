"""`benchmarks/five_methods.py`: its tables and plots, from recorded lines; nothing is measured."""

import itertools
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "five_methods.py"
SNAPKV, FULL = "SnapKV, equal", "Full"


def answer(policy: str, budget: int | None, *, depth: float, score: float, kept: float, size: int) -> dict:
    case = {"mode": "aware", "task": "needle", "length": 2000, "depth": depth, "sample": 0}
    sizes = {"prompt_tokens": 2000, "kept_tokens": kept, "cache_bytes": size}
    return {"policy": policy, "budget": budget, **case, "score": score, "answer": "", "expected": ["1"], **sizes}


def step(name: str, round_: int, seconds: float, *, slots: float) -> dict:
    return {
        "length": 2000, "round": round_, "name": name, "seconds": seconds, "slots": slots, "kept": slots, "bytes": 1,
    }  # fmt: skip


def report(folder: pathlib.Path, *, answers: Sequence[dict] = (), steps: Sequence[dict] = ()) -> list[list[list[str]]]:
    """The cells of both tables, heads first."""
    needles = folder / "needles"
    needles.mkdir()
    (needles / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in answers))
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    command = [sys.executable, str(SCRIPT), "--only", "report", "--samples", "1", "--out", str(folder)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    rows = [[line.strip("|").split("|") for line in part.splitlines()] for part in printed.split("\n\n")]
    return [[[cell.strip() for cell in row] for row in table if row[0] != "---"] for table in rows]


def row_of(table: list[list[str]], *, name: str, setting: str) -> dict[str, str]:
    heads, *rows = table
    return dict(zip(heads, next(row for row in rows if row[:2] == [name, setting]), strict=True))


@pytest.fixture
def answers() -> list[dict]:
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    lines = [answer(SNAPKV, 256, depth=d, score=float(d < 0.9), kept=250, size=30) for d in depths]
    return lines + [answer(FULL, None, depth=d, score=1.0, kept=2000, size=120) for d in depths]


def test_every_method_stands_in_both_settings_beside_its_claims(tmp_path):
    selection, measured = report(tmp_path)
    names = ["StreamingLLM", "H2O", "SnapKV", "PyramidKV", "DuoAttention"]
    assert [row[0] for row in selection[1:]] == names
    settings = ["paper", "equal", "claimed"]
    wanted = [["Full", ""], *([name, setting] for name, setting in itertools.product(names, settings))]
    assert [row[:2] for row in measured[1:]] == wanted
    assert row_of(measured, name="H2O", setting="claimed")["step over Full, equal slots, 2,000"] == "high"


def test_what_was_kept_found_and_held_is_counted(tmp_path, answers):
    row = row_of(report(tmp_path, answers=answers)[1], name="SnapKV", setting="equal")
    assert row["retention"] == "12.5%"
    # Wilson's interval of 4 of 5.
    assert row["needle, question first"] == "80 % (38 to 96)"
    assert row["bytes over Full's"] == "0.25"
    assert "needle, question later" not in row


def test_shares_of_some_depths_are_not_shown(tmp_path, answers):
    missing = [line for line in answers if line["policy"] != SNAPKV or line["depth"] < 1.0]
    measured = report(tmp_path, answers=missing)[1]
    assert row_of(measured, name="SnapKV", setting="equal")["needle, question first"] == ""
    assert row_of(measured, name="SnapKV", setting="claimed")["needle, question first"] == "85 to 95 %"


def test_steps_are_compared_within_their_round(tmp_path):
    # All of the second round is ten times slower, and the third one's base is disturbed.
    seconds = {SNAPKV: (1.0, 10.0, 1.0), FULL: (2.0, 20.0, 20.0), "Full of 272 slots": (1.25, 12.5, 1.25)}
    slots = {SNAPKV: 272.0, FULL: 2016.0, "Full of 272 slots": 272.0}
    lines = [
        step(name, round_, value, slots=slots[name])
        for name, values in seconds.items()
        for round_, value in enumerate(values)
    ]
    row = row_of(report(tmp_path, steps=lines)[1], name="SnapKV", setting="equal")
    assert row["step over Full, equal slots, 2,000"] == "0.80"
    assert row["step over Full, all slots, 2,000"] == "0.50"
    assert row["step over Full, all slots, 7,680"] == ""


def test_the_plots_are_written(tmp_path, answers):
    report(tmp_path, answers=answers, steps=[step(FULL, 0, 1.0, slots=2016.0)])
    for name in ("five_methods_needles.png", "five_methods_steps.png"):
        assert (tmp_path / name).stat().st_size > 10_000
