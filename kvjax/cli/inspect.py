"""`kvjax inspect`: what a policy keeps of a prompt, as a picture and as text."""

import argparse
import pathlib
import sys
from typing import TYPE_CHECKING, Any

import kvjax
from kvjax.allocation import check_count
from kvjax.cli.conversation import prompt_ids, takes_plain_text
from kvjax.cli.errors import UserError
from kvjax.cli.findings import Findings, json_findings, text_findings
from kvjax.cli.help_texts import EXAMPLES, Formatter
from kvjax.cli.interrupt import abandons_work_after_ctrl_c
from kvjax.cli.loading import load_model, model_name
from kvjax.cli.options import SPELLINGS, add_model_arguments, add_policy_arguments
from kvjax.cli.pictures import PICTURES, check_picture
from kvjax.cli.policies import make_policy
from kvjax.cli.progress import activity
from kvjax.cli.prompt_source import add_prompt_arguments, check_sources, hide_needle, prompt_text
from kvjax.cli.retention import span_with
from kvjax.inspection import attention_mass, kept_mask, retention_table
from kvjax.plots import retention_map

if TYPE_CHECKING:
    import kvjax_models

_QUERIES = 32


def add_subcommand(subcommands: Any) -> None:
    """Adds `inspect` to the command."""
    parser = subcommands.add_parser(
        "inspect",
        help="Shows which tokens of a prompt a policy keeps.",
        description="Compresses a prompt's cache and shows what is kept: a map of heads and positions as a picture, "
        "and tables on\nstdout. Attention held: the prompt without its last tokens is compressed too, and these "
        "tokens tell how much\nof their attention goes to what was kept, and how much could, with as many tokens.",
        epilog=EXAMPLES["inspect"],
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    add_prompt_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="The seed of --needle. The default is 0.")
    parser.add_argument("--raw", action="store_true", help="Takes the plain prompt: no chat template.")
    parser.add_argument("--system", metavar="TEXT", help="The chat's system message.")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("retention.png"),
        metavar="PATH",
        help=f"Where the picture goes: {', '.join(PICTURES)}. The default is retention.png.",
    )
    parser.add_argument(
        "--queries",
        type=int,
        metavar="N",
        help=f"The last tokens, whose attention judges the policy. The default is {_QUERIES}, or half of a short "
        "prompt.",
    )
    parser.add_argument("--all", action="store_true", help="Lists every token, not only spans.")
    parser.add_argument("--json", action="store_true", help="Prints one JSON object instead of the tables.")
    add_model_arguments(parser)
    add_policy_arguments(parser)
    parser.set_defaults(run=run, spellings={**SPELLINGS, "out": "--out"})


def run(args: argparse.Namespace) -> int:
    """Runs `kvjax inspect`."""
    check_sources(args)
    if args.raw and args.system is not None:
        raise UserError("--system needs the chat template that --raw leaves out; give one of them.")
    check_picture(args.out)
    if args.queries is not None:
        check_count("queries", args.queries, at_least=1)
    policy = make_policy(args.policy, budget=args.budget, settings=args.settings)
    prompt = prompt_text(args)
    loaded = load_model(args.model, dtype=args.dtype)
    plain = takes_plain_text(loaded, raw=args.raw, system=args.system)
    assert loaded.tokenizer is not None
    number = None
    if args.needle is not None:
        hidden = hide_needle(args, loaded.tokenizer, note=_note)
        prompt, number = hidden.prompt, hidden.answer
    assert prompt is not None
    tokens = prompt_ids(loaded, prompt, plain=plain, system=args.system)
    with abandons_work_after_ctrl_c(), activity(f"Reading {len(tokens)} tokens"):
        findings = _findings(loaded, tokens, policy=policy, args=args, number=number)
        _draw(findings, args.out)
    if args.json:
        print(json_findings(findings, model=model_name(args.model), policy=args.policy, picture=str(args.out)))
    else:
        print("\n".join(text_findings(findings, every_token=args.all)))
    _note(f"wrote {args.out}")
    return 0


def _findings(
    loaded: "kvjax_models.Loaded",
    tokens: list[int],
    *,
    policy: "kvjax.Policy",
    args: argparse.Namespace,
    number: str | None,
) -> Findings:
    assert loaded.tokenizer is not None
    queries = max(min(_QUERIES, len(tokens) // 2), 1) if args.queries is None else args.queries
    # It objects to more than the prefill does.
    mass = attention_mass(loaded.params, tokens, policy=policy, queries=queries)
    _, cache = kvjax.prefill(loaded.params, tokens, policy=policy, max_new_tokens=1, cache_dtype=args.cache_dtype)
    return Findings(
        cache=cache,
        table=retention_table(cache, tokens, loaded.tokenizer),
        counts=kept_mask(cache).sum(-1),
        mass=mass,
        queries=queries,
        number=number,
    )


def _draw(findings: Findings, out: pathlib.Path) -> None:
    marks = {}
    if findings.number is not None:
        span = span_with(findings.table, findings.number, heads=findings.heads)
        marks[findings.number] = (span.first, span.last)
    retention_map(findings.cache, marks=marks).savefig(out)


def _note(text: str) -> None:
    print(f"kvjax: {text}", file=sys.stderr, flush=True)
