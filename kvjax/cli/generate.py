"""`kvjax generate`: answers a prompt, or talks."""

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from kvjax.cli.chat import chat
from kvjax.cli.conversation import Answer, Conversation
from kvjax.cli.errors import UserError
from kvjax.cli.help_texts import EXAMPLES, Formatter
from kvjax.cli.interrupt import abandons_work_after_ctrl_c
from kvjax.cli.loading import load_model, model_name
from kvjax.cli.options import SPELLINGS, add_model_arguments, add_policy_arguments, add_sampling_arguments
from kvjax.cli.policies import make_policy
from kvjax.cli.prompt_source import add_prompt_arguments, check_sources, hide_needle, prompt_text
from kvjax.cli.report import json_report, stats_line
from kvjax_kernels.dispatch import IMPLEMENTATIONS

if TYPE_CHECKING:
    import kvjax_models
    from kvjax.evaluation.needle import Needle


def add_subcommand(subcommands: Any) -> None:
    """Adds `generate` to the command."""
    parser = subcommands.add_parser(
        "generate",
        help="Answers a prompt, or talks, with a compressed cache.",
        description="Answers a prompt with a compressed KV cache. The answer goes to stdout as it comes, "
        "everything else\nto stderr. A model with a chat template gets the prompt as a chat.",
        epilog=EXAMPLES["generate"],
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    add_prompt_arguments(parser)
    parser.add_argument(
        "--chat",
        action="store_true",
        help="Talks: each line of stdin is a turn, and all go into one cache. Ends with Ctrl-D or /exit. "
        "A prompt is the first turn.",
    )
    parser.add_argument("--raw", action="store_true", help="Gives the model the plain prompt: no chat template.")
    parser.add_argument("--system", metavar="TEXT", help="The chat's system message.")
    parser.add_argument(
        "--json", action="store_true", help="Prints one JSON object instead of the text, once it is complete."
    )
    parser.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        help="Which kernels run. The default is the platform's where they can do what is asked, else xla.",
    )
    add_model_arguments(parser)
    add_policy_arguments(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(run=run, spellings=SPELLINGS)


def run(args: argparse.Namespace) -> int:
    """Runs `kvjax generate`."""
    _check(args)
    policy = make_policy(args.policy, budget=args.budget, settings=args.settings)
    prompt = prompt_text(args)
    settings = _settings(args)
    loaded = load_model(args.model, dtype=args.dtype)
    conversation = Conversation(loaded, policy=policy, system=args.system, raw=args.raw, settings=settings, note=_note)
    if args.chat and conversation.plain:
        raise UserError("--chat needs a model with a chat template, and the checkpoint has none.")
    hidden = None
    if args.needle is not None:
        assert loaded.tokenizer is not None
        hidden = hide_needle(args, loaded.tokenizer, note=_note)
        prompt = hidden.prompt
    if args.chat:
        return _talk(conversation, prompt, hidden)
    assert prompt is not None
    return _answer_once(conversation, prompt, hidden, args=args, loaded=loaded)


def _check(args: argparse.Namespace) -> None:
    check_sources(args)
    if args.raw and args.chat:
        raise UserError("--chat needs the chat template that --raw leaves out; give one of them.")
    if args.raw and args.system is not None:
        raise UserError("--system needs the chat template that --raw leaves out; give one of them.")
    if args.json and args.chat:
        raise UserError("--json is for one answer, --chat for many; give one of them.")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `kvjax.generate`, checked as far as can be before a model is loaded."""
    from kvjax.prompts import check_new_tokens
    from kvjax.sampling import Sampling

    if args.max_new_tokens is None:
        # A needle's answer is short, and room for more would hide how small the cache is.
        args.max_new_tokens = 256 if args.needle is None or args.chat else 32
    if "" in args.stop:
        raise ValueError("`stop_strings` must not be empty.")
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p)
    return {
        **dataclasses.asdict(sampling),
        "max_new_tokens": check_new_tokens(args.max_new_tokens),
        "seed": args.seed,
        "stop_strings": args.stop,
        "cache_dtype": args.cache_dtype,
        "implementation": args.implementation,
    }


def _answer_once(
    conversation: Conversation,
    prompt: str,
    hidden: "Needle | None",
    *,
    args: argparse.Namespace,
    loaded: "kvjax_models.Loaded",
) -> int:
    with abandons_work_after_ctrl_c():
        if not args.json:
            answer = _answer_aloud(conversation, prompt)
        else:
            answer = conversation.answer(prompt, show=lambda piece: None)
            found = {} if hidden is None else {"needle": {"number": hidden.answer, "found": _found(hidden, answer)}}
            name = model_name(args.model)
            print(json_report(answer, model_name=name, loaded=loaded, policy_name=args.policy, **found))
            _say(stats_line(answer))
    _tell_needle(hidden, answer)
    return 0


def _talk(conversation: Conversation, prompt: str | None, hidden: "Needle | None") -> int:
    """Chats; the first turn may be a needle's."""
    waiting = [hidden]

    def answer(turn: str) -> Answer:
        answered = _answer_aloud(conversation, turn)
        _tell_needle(waiting.pop() if waiting else None, answered)
        return answered

    return chat(prompt, answer, note=_note)


def _answer_aloud(conversation: Conversation, prompt: str) -> Answer:
    answer = conversation.answer(prompt, show=lambda piece: print(piece, end="", flush=True))
    print(flush=True)
    _say(stats_line(answer))
    return answer


def _tell_needle(hidden: "Needle | None", answer: Answer) -> None:
    if hidden is not None:
        _note(f"the answer {'has' if _found(hidden, answer) else 'does not have'} the number {hidden.answer}")


def _found(hidden: "Needle", answer: Answer) -> bool:
    assert answer.result.texts is not None
    return hidden.answer in answer.result.texts[0]


def _note(text: str) -> None:
    _say(f"kvjax: {text}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
