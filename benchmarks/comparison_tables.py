"""The tables of a comparison, from its records."""

import statistics
from collections.abc import Sequence

from comparison_records import Records
from comparison_work import ALL, ATTEMPTS, BUDGETS, FLOAT32, LENGTHS, METHODS, Work

#: Other processes had this share of the machine, or less, in a round that counts as quiet.
QUIET = 0.1


def cost_table(records: Records, work: Sequence[Work]) -> str:
    """Times and memory: medians of the rounds, kvjax over kvpress in the same dtype and at its best, and the aims."""
    kvjax, *kvpress = ALL
    lines = [
        f"| | {' | '.join(ALL)} | over float32 | over the best | aim | | quiet rounds | kept |",
        f"|---|{'---|' * (len(ALL) + 6)}",
    ]
    for row in (row for row in work if row.kind in ("decode", "prefill", "memory")):
        found = {who: records[row.name, who] for who in ALL if records.get((row.name, who))}
        if not found:
            continue
        values = {who: _median(lines) for who, lines in found.items()}
        cells = [_cell(row, found.get(who, []), values.get(who)) for who in ALL]
        best = min((value for who in kvpress if (value := values.get(who))), default=None)
        ratios = [_ratio(values.get(kvjax), base) for base in (values.get(kvpress[0]), best)]
        verdict = "" if ratios[1] is None or row.aim is None else ("met" if ratios[1] <= row.aim else "missed")
        rounds = "" if row.kind == "memory" else _rounds([line for lines in found.values() for line in lines])
        kept = sorted({f"{line['kept']:,.0f}" for lines in found.values() for line in lines if "kept" in line})
        ends = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        ends += ["" if row.aim is None else f"{row.aim:g}", verdict, rounds, " / ".join(kept)]
        lines.append(f"| {_label(row)} | {' | '.join(cells + ends)} |")
    return "\n".join(lines)


def hits_table(records: Records) -> str:
    """Needles found of ten, kvjax / kvpress, and how many of the ten answers are the same text."""
    heads = [f"{n:,} tokens, {'1/8' if b < 1 else b} kept" for n in LENGTHS for b in BUDGETS]
    lines = [f"| method | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for method in METHODS:
        cells = []
        for n in LENGTHS:
            for b in (1.0, 1.0) if method == "Full" else BUDGETS:
                name = Work(kind="needles", subject=method, tokens=n, budget=b).name
                cells.append(_hits([records.get((name, who), []) for who in FLOAT32]))
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def attempts_table(records: Records) -> str:
    """What each makes of what a user may try."""
    lines = [f"| | {' | '.join(who.split()[0] for who in FLOAT32)} |", "|---|---|---|"]
    for attempt, text in ATTEMPTS.items():
        found = [records.get((f"attempt/{attempt}", who), []) for who in FLOAT32]
        if any(found):
            cells = [one[-1].get("outcome", one[-1].get("error", "")) if one else "" for one in found]
            lines.append(f"| {text} | {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def _median(lines: Sequence[dict]) -> float | None:
    """The median of the quiet rounds, or of all where none is."""
    good = [line for line in lines if "value" in line]
    quiet = [line["value"] for line in good if line["others"] <= QUIET]
    values = quiet or [line["value"] for line in good]
    return statistics.median(values) if values else None


def _rounds(lines: Sequence[dict]) -> str:
    return f"{sum(line['others'] <= QUIET for line in lines)} of {len(lines)}"


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value / base


def _label(row: Work) -> str:
    what = {"decode": "decoding step", "prefill": "prefill", "memory": "peak memory"}[row.kind]
    batch = "" if row.rows == 1 else f"{row.rows} x "
    return f"{what}, {row.subject}, {batch}{row.tokens:,}"


def _cell(row: Work, lines: Sequence[dict], value: float | None) -> str:
    if value is None:
        return lines[-1].get("error", "") if lines else ""
    if row.kind == "memory":
        return f"{value / 1e9:.2f} GB"
    text = f"{value:.2f} s" if row.kind == "prefill" else f"{value * 1e3:.1f} ms"
    calls = [line["call_seconds"] for line in lines if "call_seconds" in line]
    return text + (f" (calls {statistics.median(calls) * 1e3:.1f})" if calls else "")


def _hits(found: Sequence[Sequence[dict]]) -> str:
    counts = [str(sum(lines[-1]["hits"])) if lines and "hits" in lines[-1] else "" for lines in found]
    if not all(counts):
        return " / ".join(counts) if any(counts) else ""
    kvjax, kvpress = (lines[-1]["texts"] for lines in found)
    same = sum(a == b for a, b in zip(kvjax, kvpress, strict=True))
    return f"{' / '.join(counts)} ({same} same)"
