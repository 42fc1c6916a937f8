"""Errors that the user can mend, each shown as one sentence."""

import argparse
import re
from collections.abc import Mapping
from typing import NoReturn

#: What other modules raise where the user got something wrong, or lacks something.
MENDABLE = (ValueError, OSError, ImportError, NotImplementedError, FloatingPointError)


class UserError(Exception):
    """Something that the user got wrong; its text is the sentence to show."""


class Parser(argparse.ArgumentParser):
    """Raises a `UserError` where argparse would print its usage and leave."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`."""
        raise UserError(f"{message}; see `{self.prog} --help`.")


def sentence(error: Exception, spellings: Mapping[str, str]) -> str:
    """What to show for an error, on one line.

    Args:
        error: a `UserError` or one of `MENDABLE`.
        spellings: the option for each argument that a message may name in backticks.
    """
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}."
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"`(\w+)`", lambda match: f"`{spellings.get(match[1], match[1])}`", text)
