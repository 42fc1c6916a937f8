"""What kvjax and kvpress are compared at, and the ratio of their times that kvjax aims for."""

import dataclasses
from typing import Literal

#: Decoding steps in a round, and the room for them.
STEPS = 32
#: The share of the prompt that is kept, and the same for kvpress, which names what it removes.
KEPT = 1 / 8
LENGTHS, BUDGETS = (1000, 2000), (256, KEPT)
FLOAT32 = ("kvjax float32", "kvpress float32")
#: Bfloat16 is faster for kvpress wherever weights are most of the work.
ALL = (*FLOAT32, "kvpress bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A row of a table.

    Attributes:
        kind: what is measured.
        subject: the policy, or what is attempted.
        tokens: of a prompt.
        rows: prompts at once.
        budget: tokens kept a head, or their share of the prompt.
        aim: kvjax over kvpress at its best.
    """

    kind: Literal["decode", "prefill", "memory", "needles", "attempt"]
    subject: str
    tokens: int = 0
    rows: int = 1
    budget: int | float = KEPT
    aim: float | None = None

    @property
    def name(self) -> str:
        """What `--work` and the records call it."""
        if self.kind == "attempt":
            return f"attempt/{self.subject}"
        if self.kind == "needles":
            return f"needles/{self.subject}/{self.tokens}/{self.budget:g}"
        return f"{self.kind}/{self.subject}/{self.rows}x{self.tokens}"

    @property
    def repeats(self) -> bool:
        """Whether rounds differ."""
        return self.kind in ("decode", "prefill")

    @property
    def contestants(self) -> tuple[str, ...]:
        """Who does it; answers are compared in one dtype."""
        return FLOAT32 if self.kind in ("needles", "attempt") else ALL


#: Methods with equal settings on both sides, kvpress's.
METHODS = (
    "Full", "StreamingLLM", "H2O", "SnapKV", "PyramidKV", "AdaKV", "TOVA", "Knorm", "ExpectedAttention",
)  # fmt: skip
ATTEMPTS = {
    "ragged batch": "SnapKV, a batch of a long and a short prompt: does each row answer as alone?",
    "pyramid's second turn": "PyramidKV, 2,048 tokens, then a second turn of 20",
    "second turn": "SnapKV, a second turn of 512 tokens: what is kept of 2,048 + 512 at 1/8",
    "evicting h2o": "H2O that evicts while decoding, by accumulated attention",
    "h2o without n x n": "H2O without the matrix of all attention",
    "short prompt": "SnapKV, a prompt of 40 tokens",
    "adakv bytes": "AdaKV at 1/8: bytes of the cache over the full one's",
}
WORK = (
    *(Work(kind="decode", subject="Full", tokens=n, aim=0.8) for n in (4096, 7680)),
    *(Work(kind="decode", subject=s, tokens=n, aim=0.7) for n in (4096, 7680) for s in ("SnapKV", "PyramidKV")),
    Work(kind="decode", subject="H2O", tokens=4096, aim=0.8),
    *(Work(kind="decode", subject=s, tokens=2048, rows=8, aim=0.75) for s in ("Full", "SnapKV")),
    *(Work(kind="prefill", subject=s, tokens=4096, aim=1.0) for s in ("Full", "SnapKV", "PyramidKV")),
    Work(kind="prefill", subject="H2O", tokens=4096, aim=0.25),
    Work(kind="memory", subject="SnapKV", tokens=7680, aim=1.0),
    *(Work(kind="needles", subject="Full", tokens=n, budget=1.0) for n in LENGTHS),
    *(Work(kind="needles", subject=s, tokens=n, budget=b) for s in METHODS[1:] for n in LENGTHS for b in BUDGETS),
    *(Work(kind="attempt", subject=s) for s in ATTEMPTS),
)
