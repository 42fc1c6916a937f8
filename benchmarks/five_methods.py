"""What do the five methods cost, and what do they find? SmolLM2, all that their papers claim measured side by side.

    uv run python benchmarks/five_methods.py [--out five_methods] [--plots benchmarks] [--rounds 7]

Every method runs twice: keeping as much as its paper keeps, with the paper's settings, and keeping 256 of 2,000 tokens
with kvjax's defaults ("equal"). Needles: `kvjax.evaluation`'s single needle, and two needles asked for one after the
other, in 2,000 tokens, with the question in the compressed prompt and behind it. Steps: the compiled loop of
`kvjax.generate`, all methods in turn, at 2,000 and 7,680 cached tokens, against the full cache at that length and
against a full cache whose prompt and room for the answer together are the method's mean slots. Everything is kept in
`--out`: a rerun does what is missing, and `--only report` measures nothing.
"""

import argparse
import pathlib

from five_methods_report import found_against_bytes, step_against_retention, tables
from five_methods_settings import needle_experiment
from five_methods_steps import read, run_rounds

import kvjax_models
from kvjax.evaluation import Progress, evaluate, read_records, summarised

MODEL = "SmolLM2-135M-Instruct"


def main() -> None:
    """Does what is missing, and writes the tables and the plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("five_methods"))
    parser.add_argument("--plots", type=pathlib.Path, help="a folder; --out by default")
    parser.add_argument("--samples", type=int, default=8, help="examples at each of five depths")
    parser.add_argument("--rounds", type=int, default=7, help="of steps")
    parser.add_argument("--only", choices=("needles", "steps", "report"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    needles, steps = args.out / "needles", args.out / "steps.jsonl"
    experiment = needle_experiment(args.samples)
    if args.only != "report":
        loaded = kvjax_models.load(kvjax_models.embedded_model())
        assert loaded.tokenizer is not None
        if args.only in (None, "needles"):
            evaluate(loaded.params, loaded.tokenizer, experiment, out=needles, model_name=MODEL, report=tell)
        if args.only in (None, "steps"):
            run_rounds(loaded.params, steps, rounds=args.rounds)
    results = needles / "results.jsonl"
    summary = summarised(read_records(needles) if results.exists() else [], experiment)
    text = tables(summary, read(steps))
    (args.out / "table.md").write_text(text + "\n")
    print(text)
    folder = args.plots or args.out
    found_against_bytes(summary).savefig(folder / "five_methods_needles.png")
    step_against_retention(read(steps)).savefig(folder / "five_methods_steps.png")


def tell(progress: Progress) -> None:
    """How far the needles are."""
    print(f"{progress.done} of {progress.total} answers, {progress.seconds_left / 60:.1f} minutes left", flush=True)


if __name__ == "__main__":
    main()
