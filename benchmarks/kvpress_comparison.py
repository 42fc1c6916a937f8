"""How does kvjax compare with kvpress on the same machine? Times, memory, needles found, and what either cannot do.

    uv run python benchmarks/kvpress_comparison.py [--work 'decode/*' ...] [--rounds 5] [--out comparison.jsonl]

Both run SmolLM2-135M-Instruct from the same GGUF file on the same token ids, kvjax in float32, kvpress (0.5.5 with
torch on CPU, in an environment of its own that uv makes) in float32 and bfloat16. Each has its processes; rounds
alternate between them, and only one works at a time. Compilation and a first run are not timed. Every round is a line
of `--out` with the share of the machine that other processes had; a rerun does only the rounds that are missing.
`--table` prints the tables of what is there. Settings: `kvjax_worker.py` and `kvpress_worker.py` say which.
"""

import argparse
import fnmatch
import pathlib
from collections.abc import Iterable
from typing import Any

from comparison_records import Records, append, read
from comparison_tables import attempts_table, cost_table, hits_table
from comparison_work import ALL, STEPS, WORK, Work
from worker_client import WorkerClient, WorkerError


class Comparison:
    """Workers, started when they are needed, and the file of their rounds."""

    def __init__(self, out: pathlib.Path, rounds: int, only: Iterable[str]):
        import kvjax_models

        self._out, self._rounds, self._only = out, rounds, tuple(only)
        self._model = kvjax_models.embedded_model()
        self._workers: dict[str, WorkerClient] = {}
        self._records = read(out)

    def run(self, work: Work) -> None:
        """Does the rounds that are missing."""
        goal = self._rounds if work.repeats else 1
        missing = {who: goal - self._done(work, who, goal) for who in work.contestants if who in self._only}
        missing = {who: count for who, count in missing.items() if count > 0}
        if not missing:
            return
        prompts = self._prompts(work)
        missing = {who: count for who, count in missing.items() if self._prepare(work, who, prompts)}
        for round_ in range(max(missing.values(), default=0)):
            for who in [who for who, count in missing.items() if round_ < count]:
                self._measure(work, who, prompts)
        if work.repeats:
            for who in missing:
                self._worker(who).ask("release")

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._workers.values():
            worker.close()

    def _done(self, work: Work, who: str, goal: int) -> int:
        lines = self._records.get((work.name, who), [])
        # What cannot be done is not tried again.
        return goal if any("error" in line for line in lines) else len(lines)

    def _worker(self, who: str) -> WorkerClient:
        if who not in self._workers:
            self._workers[who] = WorkerClient(who, self._model)
        return self._workers[who]

    def _prompts(self, work: Work) -> Any:
        reader = self._worker(ALL[0])
        if work.kind == "needles":
            return reader.ask("needles", tokens=work.tokens).done
        if work.kind == "attempt":
            return [reader.ask("needles", tokens=n).done[0][5] for n in (1000, 600)] + reader.ask(
                "text", tokens=2048 + 512, rows=1
            ).done
        return reader.ask("text", tokens=work.tokens, rows=work.rows).done

    def _prepare(self, work: Work, who: str, prompts: Any) -> bool:
        if not work.repeats:
            return True
        try:
            self._worker(who).ask(f"prepare_{work.kind}", policy=work.subject, prompts=prompts, steps=STEPS)
        except WorkerError as error:
            self._record(work, who, {"error": _few_words(error), "others": 0.0})
            return False
        return True

    def _measure(self, work: Work, who: str, prompts: Any) -> None:
        try:
            self._record(work, who, self._result(work, who, prompts))
        except WorkerError as error:
            self._record(work, who, {"error": _few_words(error), "others": 0.0})

    def _result(self, work: Work, who: str, prompts: Any) -> dict[str, Any]:
        if work.repeats:
            done, others = self._worker(who).ask(f"measure_{work.kind}")
            return {**done, "others": others}
        if work.kind == "attempt":
            outcome = self._worker(who).ask("attempt", name=work.subject, prompts=prompts).done
            return {"outcome": outcome}
        if work.kind == "needles":
            ids, wanted = prompts
            tokens, others = self._worker(who).ask("answers", policy=work.subject, budget=work.budget, prompts=ids)
            texts = self._worker(ALL[0]).ask("texts", tokens=tokens).done
            hits = [answer in text for answer, text in zip(wanted, texts, strict=True)]
            return {"hits": hits, "texts": texts, "others": others}
        fresh = WorkerClient(who, self._model)
        try:
            done, others = fresh.ask("peak_of_one_answer", policy=work.subject, prompts=prompts, steps=STEPS)
            return {**done, "others": others}
        finally:
            fresh.close()

    def _record(self, work: Work, who: str, result: dict[str, Any]) -> None:
        record = {"work": work.name, "who": who, **result}
        append(self._out, record)
        print(*(f"{key}={value}" for key, value in record.items() if key != "texts"), flush=True)


def main() -> None:
    """Does what is missing, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("comparison.jsonl"))
    parser.add_argument(
        "--work", nargs="*", default=["*"], help="patterns of names: " + ", ".join(w.name for w in WORK)
    )
    parser.add_argument("--who", nargs="*", default=ALL, choices=(*ALL, "kvjax bfloat16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    chosen = [work for work in WORK if any(fnmatch.fnmatchcase(work.name, pattern) for pattern in args.work)]
    if not chosen:
        parser.error(f"--work must name a piece of work, got {' '.join(args.work)}.")
    if not args.table:
        comparison = Comparison(args.out, args.rounds, args.who)
        try:
            for work in chosen:
                comparison.run(work)
        finally:
            comparison.close()
    print(tables(read(args.out)))


def tables(records: Records) -> str:
    """All tables that have a row."""
    found = [cost_table(records, WORK), hits_table(records), attempts_table(records)]
    return "\n\n".join(table for table in found if table.count("\n") > 1)


def _few_words(error: Exception) -> str:
    first = str(error).strip().splitlines()[0]
    return first if len(first) <= 120 else f"{first[:117]}..."


if __name__ == "__main__":
    main()
