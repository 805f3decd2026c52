"""What a terminal shows of an answer: each token in the colour of its source, and what the answer cost."""

from __future__ import annotations

from rich.text import Text

from spectrain.decoding.text import Reply
from spectrain.target import Source

COLOURS = {
    Source.FORWARD: "cyan",
    Source.BACKWARD: "magenta",
    Source.INPUT: "yellow",
    Source.DATASTORE: "blue",
    Source.LOGITS: "red",
    Source.DRAFT: "green",
}


def coloured(text: str, source: int) -> Text:
    """Return text in the colour of its source. What the target drew itself has none."""
    return Text(text, style=COLOURS.get(Source(source), ""))


def summary(reply: Reply) -> Text:
    """Say how many tokens were written, how fast, at which acceptance length, and how many drafted ones were kept."""
    parts = [f"{len(reply.generation.tokens)} tokens ({reply.finish_reason})"]
    if reply.tokens_per_s is not None:
        parts.append(f"{reply.tokens_per_s:.0f} tokens/s")
    if reply.acceptance_length is not None:
        parts.append(f"tau {reply.acceptance_length:.2f}")
    if reply.drafted:
        parts.append(f"{reply.accepted} of {reply.drafted} drafted tokens accepted")
    return Text(", ".join(parts), style="dim")
