"""`kvjax duo`: learns and shows which heads of a model retrieve, for --policy duo."""

from typing import Any

from kvjax.cli import duo_identify, duo_show
from kvjax.cli.help_texts import EXAMPLES, Formatter


def add_subcommand(subcommands: Any) -> None:
    """Adds `duo` to the command, with its own subcommands."""
    parser = subcommands.add_parser(
        "duo",
        help="Learns and shows which heads retrieve, for --policy duo.",
        description="DuoAttention gives the full cache to heads that retrieve, and sinks and recent tokens to the "
        "others.\nWhich head does what is learned once for a model.",
        epilog=EXAMPLES["duo"],
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    own = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
    duo_identify.add_subcommand(own)
    duo_show.add_subcommand(own)
