"""Where a picture goes, judged before there is one."""

import os
import pathlib

from kvjax.cli.errors import UserError
from kvjax.files import check_writable
from kvjax.plots import check_installed

#: What a picture's name may end in.
PICTURES = (".png", ".svg", ".pdf")


def check_picture(out: pathlib.Path) -> None:
    """Raises a UserError or a ValueError unless a picture can be drawn and written there."""
    if out.suffix.lower() not in PICTURES:
        raise UserError(f"--out must end in {', '.join(PICTURES)}, got {str(out)!r}.")
    if not out.parent.is_dir():
        raise UserError(f"--out must lie in a folder that exists, and {out.parent} does not.")
    if out.is_dir() or (out.exists() and not os.access(out, os.W_OK)):
        raise UserError(f"--out must be a file that can be written, and {out} is not.")
    check_writable(out.parent, argument="out")
    check_installed()
