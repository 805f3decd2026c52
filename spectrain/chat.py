"""Talk to the target, and see which tokens were drafted.

    python -m spectrain.chat target=smollm2 method=auto

Accepted tokens are coloured by where they came from; the target drew the others itself. /help lists the commands.
Without a terminal each line of stdin is a turn, and answers are plain text.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("spectrain.chat")

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from spectrain.cli import open_target
from spectrain.config.commands import Chat
from spectrain.data.prompts import conversation_ids
from spectrain.data.turns import clean
from spectrain.decoding import Drafter, Sampling
from spectrain.errors import UserError, nearest
from spectrain.methods.registry import build_configured, load_method, method_names
from spectrain.serving.colours import COLOURS, coloured, summary
from spectrain.serving.llm import LLM, Options
from spectrain.stores.files import write_json
from spectrain.stores.signals import SIGNALS, Terminated
from spectrain.target import TargetModel

COMMANDS = {
    "method": "NAME: go on with another method, or with an exported folder",
    "temperature": "X: draw tokens at this temperature; 0 is greedy",
    "system": "TEXT: what the system says first; no text: nothing",
    "compare": "decode the last prompt once more, with and without the method",
    "save": "FILE: write the conversation as JSON, which corpus=FILE trains on",
    "new": "begin a new conversation",
    "help": "list the commands",
    "quit": "leave, as Ctrl-D does",
}
WARM_TOKENS = 16  # of a first text that nobody sees, so that nothing is compiled while an answer is written


def main(options: Chat) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"loading {options.target.path} ...", style="dim", markup=False)
    target, sampling = open_target(options.target, all_ranks=True), Sampling(**vars(options.sampling))
    conversation = Conversation(console, options, target, build_configured(options, target, sampling))
    for line in lines():
        try:
            if not conversation.take(line):
                break
        except UserError as error:
            console.print(f"error: {error}", style="red", markup=False)
        except KeyboardInterrupt as error:
            go_on(error)
            console.print()
    conversation.llm.close()


def go_on(interrupt: KeyboardInterrupt) -> None:
    """Take no notice of a Ctrl-C. A SIGTERM ends the command."""
    if isinstance(interrupt, Terminated):
        raise interrupt
    SIGNALS.anew()


def lines() -> Iterator[str]:
    """Yield what is typed, until Ctrl-D. A line that ends in a backslash goes on in the next one."""
    is_typed = sys.stdin is not None and sys.stdin.isatty()
    if is_typed:
        with suppress(ImportError):  # readline, which `input` uses then, is not in every Python
            complete_commands()
    while True:
        try:
            line = input("> " if is_typed else "")
            while line.endswith("\\"):
                line = f"{line[:-1]}\n{input('. ' if is_typed else '')}"
        except (EOFError, RuntimeError):  # the latter: stdin is closed
            print(end="\n" if is_typed else "")
            return
        except UnicodeDecodeError:
            print(f"error: this line is no {sys.stdin.encoding} text")
            continue
        except KeyboardInterrupt as error:
            go_on(error)
            print()
            continue
        if line.strip():
            yield clean(line)


def complete_commands() -> None:
    """Let Tab complete commands, and behind /method the names of methods."""
    import readline

    def complete(text: str, state: int) -> str | None:
        begun = readline.get_line_buffer()[: readline.get_begidx()]
        names = {"": [f"/{name}" for name in COMMANDS], "/method ": method_names()}.get(begun, [])
        return next(iter([f"{name} " for name in names if name.startswith(text)][state:]), None)

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")


class Conversation:
    """What was said so far, and how the next answer is decoded."""

    def __init__(self, console: Console, options: Chat, target: TargetModel, drafter: Drafter) -> None:
        self.console, self.target, self.draws = console, target, options.sampling.draws
        self.max_new_tokens = options.max_new_tokens
        self.options: Options = {"seed": options.seed, **Sampling(**vars(options.sampling)).distribution()}
        self.says_first = options.system or ""
        self.new()
        self.llm = self._opened(drafter)
        self.say("/help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves.")
        if target.tokenizer.chat_template is None:
            self.say("This target has no chat template, so it goes on with your text.")

    def say(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)

    def take(self, line: str) -> bool:
        """Answer a turn, or follow a command. Return whether the conversation goes on."""
        if not line.startswith("/"):
            self.answer(line)
            return True
        name, _, argument = line[1:].partition(" ")
        if name not in COMMANDS:
            hint = nearest(f"/{name}", [f"/{one}" for one in COMMANDS])
            raise UserError(f"/{name} is no command{hint or '; /help lists them'}")
        if name != "quit":
            getattr(self, name)(argument.strip())
        return name != "quit"

    def answer(self, turn: str) -> None:
        """Stream the answer to a turn. Ctrl-C stops it, and what was written stays in the conversation."""
        ids = self._ids([*self.turns, turn])
        stream = self.llm.stream(ids, **self._options(ids))
        while stream.reply is None:
            try:
                for piece in stream:
                    self.console.print(coloured(piece, piece.source), end="")
            except KeyboardInterrupt as error:
                go_on(error)
                stream.cancel()
        self.console.print("\n", summary(stream.reply), sep="")
        self.turns, self.replies, self.asked = [*self.turns, turn], [*self.replies, stream.reply.text], ids

    def method(self, name: str) -> None:
        drafter = load_method(name, self.target)
        before, self.llm = self.llm, self._opened(drafter)
        before.close()

    def temperature(self, value: str) -> None:
        try:
            self.options["temperature"] = Sampling(temperature=float(value)).temperature
        except ValueError:
            raise UserError(f"temperature={value} must be a number of at least 0") from None
        self._warm_up(self.llm)

    def system(self, text: str) -> None:
        self.says_first = text

    def compare(self, _: str) -> None:
        if not self.asked:
            raise UserError("there is no answer to compare yet; say something first")
        self.say("decoding the last prompt twice ...")
        plain = self._opened(load_method("autoregressive", self.target))
        replies = [llm.generate(self.asked, **self._options(self.asked)) for llm in (plain, self.llm)]
        plain.close()
        baseline, ours = (reply.tokens_per_s for reply in replies)
        if baseline is None or ours is None:
            raise UserError("the last answer is a single token, which cannot be timed; ask for more")
        same = ", the same text" if replies[0].text == replies[1].text else ""
        self.say(f"{ours:.0f} tokens/s, {ours / baseline:.2f}x plain decoding ({baseline:.0f} tokens/s){same}")

    def save(self, name: str) -> None:
        file = Path(name).expanduser()
        if not self.replies:
            raise UserError("there is nothing to save yet; say something first")
        if not name or (file.exists() and file not in self.files):
            raise UserError(f"{name or '/save'} is no new file; give the name of one, such as /save chat.json")
        messages = [{"role": "system", "content": self.says_first}] if self.says_first else []
        for turn, reply in zip(self.turns, self.replies, strict=True):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": reply}]
        try:
            write_json(file, [{"messages": messages}])
        except OSError as error:
            raise UserError(f"{name} cannot be written ({error.strerror}); give another file") from error
        self.files.add(file)
        self.say(f"saved {len(self.turns)} turns")

    def new(self, _: str = "") -> None:
        self.turns: list[str] = []
        self.replies: list[str] = []
        self.n_forgotten = 0  # turns that the context has no room for any more
        self.asked: list[int] = []  # token ids of the last prompt
        self.files: set[Path] = set()  # in which this conversation was saved

    def help(self, _: str) -> None:
        for name, text in COMMANDS.items():
            self.say(f"/{name} {text}" if text[0].isupper() else f"/{name}: {text}")
        self.say("A backslash at the end of a line continues it. A space before / makes it a turn.")
        colours = [Text(source.name.lower(), style=colour) for source, colour in COLOURS.items()]
        self.console.print("Accepted tokens by their source:", *colours)

    def _opened(self, drafter: Drafter) -> LLM:
        llm = LLM(self.target, drafter, batch_size=1, draws=self.draws)
        self._warm_up(llm)
        return llm

    def _warm_up(self, llm: LLM) -> None:
        llm.generate("Hello", **{**self.options, "max_new_tokens": WARM_TOKENS})

    def _options(self, ids: list[int]) -> Options:
        room = max(1, self.llm.max_length - len(ids))
        return {**self.options, "max_new_tokens": min(self.max_new_tokens, room)}

    def _ids(self, turns: list[str]) -> list[int]:
        """Return the token ids of the conversation. Its first turns are left out where they no longer fit."""
        most, first = self.llm.max_length, self.n_forgotten
        limit = most - min(self.max_new_tokens, most // 4)
        while True:
            ids = conversation_ids(self.target.tokenizer, turns[first:], self.replies[first:], system=self.says_first)
            if len(ids) <= limit or first == len(turns) - 1:
                break
            first, limit = first + 1, most // 2  # so that the next turns fit, whose prompts begin alike
        if first > self.n_forgotten:
            self.say(f"The context holds {most} tokens: the first {first} turns are left out from now on.")
        self.n_forgotten = first
        return ids
