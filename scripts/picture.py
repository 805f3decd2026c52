"""Draw README's picture: one text, written by a method, its accepted draft tokens in colour.

    python scripts/picture.py --method pld --out docs/figures/generate.svg

The speedup is measured: plain decoding and the method take turns, three runs each, and the medians are compared.
"""

from __future__ import annotations

import argparse
from statistics import median

from rich.console import Console
from rich.text import Text

from spectrain import load_method, load_target
from spectrain.decoding import Source, stream
from spectrain.decoding.text import Pieces, Reply, prompt_ids

PROMPT = """class TestList(unittest.TestCase):
    def test_append(self):
        a = [1, 2]
        a.append(3)
        self.assertEqual(a, [1, 2, 3])

    def test_pop(self):
"""
TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pystdlib-8l")
    parser.add_argument("--method", default="pld", help="a name of conf/method/, or an exported folder")
    parser.add_argument("--new", type=int, default=48, help="tokens")
    parser.add_argument("--out", default="docs/figures/generate.svg")
    options = parser.parse_args()
    target = load_target(options.target)
    method, plain = load_method(options.method, target), load_method("autoregressive", target)
    console = Console(record=True, width=88, highlight=False)
    console.print(f'[bold]$ python -m spectrain.generate method={options.method} prompt="..."[/bold]\n')
    console.print(Text(PROMPT, style="dim"), end="")
    pieces = Pieces(target.tokenizer)
    for step in stream(target, method, [prompt_ids(target.tokenizer, PROMPT)], options.new):
        for token, source in zip(step.tokens, step.sources, strict=True):
            console.print(Text(pieces.add(token), style="green" if source != Source.ROOT else ""), end="")
    reply = Reply("", step.generation)
    rates = {name: [] for name in ("method", "plain")}
    for _ in range(TURNS):
        for name, other in (("method", method), ("plain", plain)):
            rates[name].append(tokens_per_s(other.generate(PROMPT, options.new)))
    speedup = median(rates["method"]) / median(rates["plain"])
    console.print(
        f"\n\n[green]green[/green]: {reply.accepted} of {reply.drafted} drafted tokens were accepted; "
        f"acceptance length {reply.acceptance_length:.2f}"
    )
    console.print(f"{median(rates['method']):.0f} tokens/s, {speedup:.2f} times plain decoding, the same text")
    console.save_svg(options.out, title="spectrain", unique_id="spectrain")


def tokens_per_s(reply: Reply) -> float:
    return len(reply.generation.tokens) / (reply.generation.elapsed_s - reply.generation.prefill_s)


if __name__ == "__main__":
    main()
