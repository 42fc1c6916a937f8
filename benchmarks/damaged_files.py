"""Does any damage to a file that others made hang kvjax, fill its memory, or end in an error that names no file?

    uv run python benchmarks/damaged_files.py [--inputs 2000] [--seed 0] [--formats GGUF config.json]

For every format in `tests/models/damage.py`: files with bytes changed, numbers replaced by extremes, parts cut, left
out, inserted, repeated and nested. One table: how many inputs loaded and how many were refused by a ValueError that
names the file, the slowest, and the most memory that one took. Inputs that did neither are printed below it.
"""

import argparse
import collections
import pathlib
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "models"))
import damage  # pyright: ignore[reportMissingImports]

SECONDS, MEGABYTES = 2.0, 500.0
#: A process that asks for so much more than it has is stopped, before the machine is.
_ROOM = 8 << 30


class Outcome(NamedTuple):
    """What reading one input came to: "loaded", "refused" or a reason; seconds; megabytes above what was held."""

    result: str
    seconds: float
    megabytes: float


def held_megabytes(name: str) -> float:
    """A line of Linux's account of this process, such as VmHWM."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024


def outcome(read: Callable[[], object], refusals: tuple[type[Exception], ...], folder: str) -> Outcome:
    """Reads one input; ten times the time that is allowed ends it."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before, start = held_megabytes("VmRSS"), time.perf_counter()
    signal.alarm(round(10 * SECONDS))
    try:
        read()
        result = "loaded"
    except refusals as error:
        named = folder in str(error) and "\n" not in str(error)
        result = "refused" if named else f"names no file: {str(error)[:100]!r}"
        if isinstance(error.__cause__, MemoryError):
            result = "out of memory"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        result = f"{type(error).__name__}: {str(error)[:100]!r}"
    finally:
        signal.alarm(0)
    seconds, megabytes = time.perf_counter() - start, held_megabytes("VmHWM") - before
    if result in ("loaded", "refused") and (seconds > SECONDS or megabytes > MEGABYTES):
        result = f"took {seconds:.1f} s, {megabytes:.0f} MB"
    return Outcome(result, seconds, megabytes)


def measure(kind: Any, inputs: int, seed: int) -> list[tuple[Outcome, bytes]]:
    """The outcomes of that many damaged files of one format."""
    outcomes: list[tuple[Outcome, bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        kind.write(path)
        file = path / kind.file
        whole = file.read_bytes()
        kind.read(path)

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=inputs,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
        )
        @hypothesis.given(kind.damaged(whole))
        def each(content: bytes) -> None:
            file.write_bytes(content)
            outcomes.append((outcome(lambda: kind.read(path), kind.refusals, folder), content))

        each()
    return outcomes


def row(name: str, outcomes: list[Outcome]) -> str:
    """A line of the table."""
    count = collections.Counter(entry.result for entry in outcomes)
    other = len(outcomes) - count["loaded"] - count["refused"]
    slowest, largest = max(entry.seconds for entry in outcomes), max(entry.megabytes for entry in outcomes)
    cells = (name, len(outcomes), count["loaded"], count["refused"], other, f"{slowest:.2f}", f"{largest:.0f}")
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> int:
    """Runs the script; 1 where an input did neither load nor get refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2000, help="of all formats together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", nargs="+", choices=[kind.name for kind in damage.FORMATS])
    args = parser.parse_args()

    def too_slow(number: int, frame: Any) -> None:
        raise TimeoutError("stopped")

    signal.signal(signal.SIGALRM, too_slow)
    room = round(held_megabytes("VmSize") * 1024 * 1024) + _ROOM
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    kinds = [kind for kind in damage.FORMATS if args.formats is None or kind.name in args.formats]
    print("| format | inputs | loaded | refused | neither | slowest, s | most memory, MB |")
    print("|---|---|---|---|---|---|---|")
    odd = []
    for kind in kinds:
        outcomes = measure(kind, -(-args.inputs // len(kinds)), args.seed)
        print(row(kind.name, [entry for entry, _ in outcomes]), flush=True)
        odd += [(kind.name, *pair) for pair in outcomes if pair[0].result not in ("loaded", "refused")]
    for name, entry, content in odd:
        print(f"\n{name}: {entry.result}\n{content[:600]!r}")
    return 1 if odd else 0


if __name__ == "__main__":
    sys.exit(main())
