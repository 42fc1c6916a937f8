"""The lines that a comparison appends to its file: one for each work, contestant and round."""

import collections
import json
import pathlib
from typing import Any

#: Records by work and contestant, rounds in order.
Records = dict[tuple[str, str], list[dict[str, Any]]]


def append(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Adds a line."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(path: pathlib.Path) -> Records:
    """All lines of the file; none where there is no file."""
    records: Records = collections.defaultdict(list)
    if path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            records[record["work"], record["who"]].append(record)
    return records
