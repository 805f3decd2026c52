"""Stream one continuation and say what speculation gained.

    python -m spectrain.generate method=spire prompt="def read_config(path):"
    python -m spectrain.generate method=auto target=smollm2 prompt="Explain what a draft model is."

Tokens that were drafted and accepted are coloured by where they came from; the target drew the others itself.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("spectrain.generate")

import sys
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.text import Text

from spectrain.cli import open_target
from spectrain.config.commands import Generate
from spectrain.data.prompts import conversation_ids
from spectrain.data.turns import clean
from spectrain.decoding import Sampling, stream
from spectrain.decoding.text import Pieces, Reply
from spectrain.errors import UserError
from spectrain.measure.results import shares_of
from spectrain.measure.statistics import decode_s
from spectrain.methods.auto import why_plain
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.registry import build_configured
from spectrain.serving.colours import coloured, summary
from spectrain.stores.environment import OtherWork, is_disturbed
from spectrain.target import Source
from spectrain.terminal import say_next, stage

TIMED_RUNS = 3


def main(options: Generate) -> None:
    prompt = prompt_text(options.prompt)
    sampling = Sampling(**vars(options.sampling))
    target = open_target(options.target, all_ranks=True)
    with stage("opening the method"):
        drafter = build_configured(options, target, sampling, options.verification)
    decode = partial(
        stream,
        target,
        prompts=[conversation_ids(target.tokenizer, [prompt], [], options.chat)],
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        seed=options.seed,
        verification=options.verification,
        max_length=options.max_length,
        stop=tuple(options.stop),
    )
    console = Console(highlight=False, soft_wrap=True, quiet=not target.leads)
    pieces = Pieces(target.tokenizer, target.eos_ids, options.stop)
    steps = decode(drafter)
    with stage("reading the prompt"):
        first = next(steps)  # before anything is printed: a prompt that is refused is one sentence
    is_chat = options.chat is not False and target.tokenizer.chat_template is not None
    console.print(Text(prompt, style="dim"), end="\n\n" if is_chat else "")
    for step in chain([first], steps):
        for token, source in zip(step.tokens, step.sources, strict=True):
            if text := pieces.add(token):
                console.print(coloured(text, source), end="")
    console.print(coloured(pieces.end(), Source.ROOT), end="\n\n")
    console.print(summary(Reply("", step.generation)))
    if ran := shares_of(step.generation.choices):
        shares = (f"{name} {100 * one['share']:.0f} %" for name, one in ran.items())
        console.print(f"steps: {', '.join(shares)}", style="dim")
    if options.baseline:
        # The median of runs without streaming. The two take turns, so that a drifting machine hurts both.
        rates: dict[str, list[float]] = {"ours": [], "plain": []}
        others = OtherWork()
        with stage("the same without streaming, beside plain decoding", 2 * TIMED_RUNS) as advance:
            for name, one in [("ours", drafter), ("plain", Autoregressive())] * TIMED_RUNS:
                *_, last = decode(one)
                rates[name].append(len(last.generation.tokens) / decode_s(last.generation))
                advance()
        ours, plain = (median(values) for values in rates.values())
        console.print(f"{ours:.0f} tokens/s, {ours / plain:.2f}x autoregressive decoding ({plain:.0f} tokens/s)")
        if is_disturbed(share := others.share()):
            console.print(f"timed beside other work, which took {share:.0%} of the processor's time", style="yellow")
    if (why := why_plain(drafter)) is not None:
        console.print(why)
    if target.leads:
        made_of = {name: getattr(options, name) for name in ("drafter", "head", "datastore")}
        say_next("bench", {"methods": "all", "target": options.target.path, **made_of, "limit": 8})


def prompt_text(given: str | None) -> str:
    """Return the prompt as it was typed, or that of a file or of stdin, without its last line break.

    Raises:
        UserError: there is none, or it is no text.
    """
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    try:
        if given == "-" or (given is None and is_piped):
            given = sys.stdin.buffer.read().decode().removesuffix("\n")
        elif given is not None and given.startswith("@"):
            given = Path(given[1:]).expanduser().read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise UserError(f"prompt={given or '-'} is no UTF-8 text; give one") from None
    if not (given or "").strip():
        raise UserError('prompt is empty; give prompt="some text", prompt=@<file>, or a text by a pipe')
    return clean(given)
