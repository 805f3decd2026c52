"""Draw README's pictures: a chat, and one answer by plain decoding and by a method, side by side, from recorded times.

    python scripts/picture.py --target smollm2 --method auto --out docs/figures/chat.svg --chat "..." "..." /compare
    python scripts/picture.py --target smollm2 --method spire --prompt "..." --out docs/figures/generate.svg

A chat is shown as the terminal shows it when these lines are typed. Of the two answers:

Both run interleaved, `--turns` times, and the turn with the median time is drawn for each. Each token appears at its
recorded time multiplied by `--slower`, so that the eye can follow; a browser plays it once. Accepted draft tokens are
in colour. The numbers below the panes are those of the turns that are drawn.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

from spectrain import load_method, load_target
from spectrain.chat import Conversation
from spectrain.cli import composed
from spectrain.config import options_of
from spectrain.decoding import Drafter, Sampling, stream
from spectrain.decoding.generation import Generation
from spectrain.decoding.text import Pieces, Reply, prompt_ids
from spectrain.methods.registry import build_configured
from spectrain.target import Source, TargetModel

PROMPT = "What is the difference between weather and climate? Give three examples of each."
COLUMNS, LINES = 62, 30  # characters of a pane
CHARACTER, LINE, MARGIN, TOP = 7.25, 16, 18, 64  # pixels
TERMINAL_COLUMNS = 96
COLOURS = {"ROOT": "#d4d8de", "DRAFT": "#7ee787", "other": "#79c0ff"}


@dataclass(frozen=True)
class Turn:
    """One decoding: pieces of text with their times and sources."""

    pieces: list[tuple[float, str, Source]]  # seconds after the first token
    generation: Generation

    @property
    def seconds(self) -> float:
        """From the first token, which prefill draws, to the last one."""
        return sum(self.generation.time_s.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--method", default="spire", help="a name of conf/method/, or an exported folder")
    parser.add_argument("--prompt", default=PROMPT, help="goes through the chat template, where the target has one")
    parser.add_argument("--new", type=int, default=160, help="tokens")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--slower", type=float, default=4)
    parser.add_argument("--out", default="docs/figures/generate.svg")
    parser.add_argument("--chat", nargs="+", metavar="LINE", help="draw a chat in which these lines are typed")
    options = parser.parse_args()
    if options.chat:
        Path(options.out).write_text(chat(options), encoding="utf-8")
        return
    target = load_target(options.target)
    has_chat = target.tokenizer.chat_template is not None
    prompt = prompt_ids(target.tokenizer, [{"role": "user", "content": options.prompt}] if has_chat else options.prompt)
    methods = {
        "plain decoding": load_method("autoregressive", target),
        options.method: load_method(options.method, target),
    }
    turns: dict[str, list[Turn]] = {name: [] for name in methods}
    for number in range(options.turns + 1):
        for name, method in methods.items():
            turn = recorded(target, method, prompt, options.new)
            if number:  # the first turn warms up
                turns[name].append(turn)
    drawn = {name: sorted(of, key=lambda turn: turn.seconds)[len(of) // 2] for name, of in turns.items()}
    if len({tuple(turn.generation.tokens) for turn in drawn.values()}) > 1:
        raise SystemExit("the two texts differ; greedy texts are equal in float32 only")
    Path(options.out).write_text(picture(drawn, options.prompt, options.slower), encoding="utf-8")
    for name, turn in drawn.items():
        print(f"{name}: {caption(turn)}")


def chat(options: argparse.Namespace) -> str:
    """Return the SVG of a terminal in which a chat was typed."""
    chosen = options_of("chat", composed("chat", f"target={options.target}", f"method={options.method}"))
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system="standard", highlight=False, soft_wrap=True)
    target = load_target(options.target)
    conversation = Conversation(console, chosen, target, build_configured(chosen, target, Sampling()))
    for line in options.chat:
        console.print(f"> {line}", style="bold", markup=False)
        conversation.take(line)
    conversation.llm.close()
    drawing = Console(record=True, width=TERMINAL_COLUMNS, file=io.StringIO())
    drawing.print(Text.from_ansi(shown.getvalue()))
    return drawing.export_svg(title=f"python -m spectrain.chat target={options.target} method={options.method}")


def recorded(target: TargetModel, method: Drafter, prompt: list[int], new: int) -> Turn:
    """Decode once, and note when each piece of text could be printed."""
    pieces, printable, start_s = [], Pieces(target.tokenizer), None
    for step in stream(target, method, [prompt], new):
        start_s = start_s or time.perf_counter()
        now_s = time.perf_counter() - start_s
        for token, source in zip(step.tokens, step.sources, strict=True):
            if token not in target.eos_ids:
                pieces.append((now_s, printable.add(token), Source(source)))
    return Turn(pieces, step.generation)


def caption(turn: Turn) -> str:
    n_tokens, reply = len(turn.generation.tokens) - 1, Reply("", turn.generation)
    text = f"{n_tokens / turn.seconds:.0f} tokens/s"
    return f"{text}, {reply.acceptance_length:.2f} tokens per forward of the target" if reply.drafted else text


def picture(turns: dict[str, Turn], prompt: str, slower: float) -> str:
    """Return the SVG: a pane for each turn, whose pieces appear one after the other."""
    pane = 2 * MARGIN + COLUMNS * CHARACTER
    laid_out = {name: list(laid(turn)) for name, turn in turns.items()}
    n_lines = min(LINES, 1 + max(line for pieces in laid_out.values() for *_, line, _ in pieces))
    width, height = len(turns) * pane, TOP + n_lines * LINE + 3 * LINE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" viewBox="0 0 {width:.0f} {height}" role="img" '
        f'aria-label="{escape(", ".join(f"{name}: {caption(turn)}" for name, turn in turns.items()))}">',
        "<style>text{font:12px ui-monospace,Menlo,Consolas,monospace;white-space:pre;fill:#d4d8de}"
        "@keyframes hidden{from{opacity:0}to{opacity:0}}.p{animation-name:hidden}"  # visible where nothing is animated
        ".h{font-weight:bold}.d{fill:#8b949e}</style>",
        '<rect width="100%" height="100%" rx="8" fill="#161b22"/>',
        f'<text class="d" x="{MARGIN}" y="24">{escape(prompt)}</text>',
    ]
    for number, (name, turn) in enumerate(turns.items()):
        left = number * pane + MARGIN
        parts.append(f'<text class="h" x="{left:.1f}" y="{TOP - 16}">{escape(name)}</text>')
        for seconds, source, column, line, text in laid_out[name]:
            if line < n_lines and text.strip():
                colour = COLOURS.get(source.name, COLOURS["other"])
                parts.append(
                    f'<text class="p" style="animation-duration:{seconds * slower:.2f}s;fill:{colour}" '
                    f'x="{left + column * CHARACTER:.1f}" y="{TOP + line * LINE + 4}" '
                    f'textLength="{len(text) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
                )
        parts.append(f'<text class="h" x="{left:.1f}" y="{height - LINE * 1.6:.1f}">{escape(caption(turn))}</text>')
    sources = {source for pieces in laid_out.values() for _, source, *_ in pieces} - {Source.ROOT}
    kinds = ["the drafter's" if source == Source.DRAFT else "of a lookup" for source in sorted(sources)]
    colours = " and ".join(
        f"{'green' if kind.startswith('the') else 'blue'}: accepted draft tokens, {kind}"
        for kind in dict.fromkeys(kinds)
    )
    parts.append(
        f'<text class="d" x="{MARGIN}" y="{height - LINE * 0.5:.1f}">{escape(colours + "; " if colours else "")}'
        f"both texts are equal; {slower:g} times slower than recorded.</text></svg>"
    )
    return "\n".join(parts) + "\n"


def laid(turn: Turn) -> Iterator[tuple[float, Source, int, int, str]]:
    """Yield (seconds, source, column, line, text) of the runs of characters of each piece, wrapped at `COLUMNS`."""
    column = line = 0
    for seconds, piece, source in turn.pieces:
        run, start = "", column
        for character in piece:
            if character == "\n" or column == COLUMNS:
                if run:
                    yield seconds, source, start, line, run
                run, column, line = "", 0, line + 1
                start = 0
                if character == "\n":
                    continue
            run, column = run + character, column + 1
        if run:
            yield seconds, source, start, line, run


if __name__ == "__main__":
    main()
