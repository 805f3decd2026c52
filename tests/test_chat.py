"""`spectrain.chat` as it is typed: by a pipe, and in a terminal with Tab, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spectrain import LLM, load_target
from spectrain.data.prompts import read_prompts

STATUS = re.compile(r"\d+ tokens \(\w+\), \d+ tokens/s, tau \d\.\d\d(, \d+ of \d+ drafted tokens accepted)?")


@pytest.fixture
def say(run, monkeypatch, chatty):
    """Says lines to the tiny target by a pipe; returns exit code, stdout, stderr."""

    def call(*lines: str, options: tuple[str, ...] = (), target: Path = chatty) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run("chat", "method=pld", "max_new_tokens=12", *options, target=target)

    return call


def answers(out: str) -> list[str]:
    """What stands before each status line."""
    *found, _ = STATUS.sub("\0", out.partition("leaves.\n")[2]).split("\0")
    return [answer.strip() for answer in found]


def test_turns_are_answered_as_llm_answers_them_with_a_status_line_each(say, chatty):
    code, out, err = say("def f", "another\\", "line", options=("system=be short",))
    assert (code, err) == (0, "")
    with LLM(chatty, "autoregressive") as llm:
        turns = [{"role": "user", "content": "def f"}]
        first = llm.chat(turns, system="be short", max_new_tokens=12).text
        turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "another\nline"}]
        second = llm.chat(turns, system="be short", max_new_tokens=12).text
    assert answers(out) == [first.strip(), second.strip()]
    assert "\x1b" not in out  # no terminal
    assert "x plain decoding" not in out


def test_commands_change_what_comes_next_and_wrong_ones_are_a_sentence(say):
    wrong = {
        "/metod pld": "error: /metod is no command; did you mean /method?",
        "/method magic": "error: method magic is unknown",
        "/temperature hot": "error: temperature=hot must be a number",
        "/temperature -1": "error: temperature=-1 must be a number",
        "/compare": "error: there is no answer to compare yet",
        "/save a.json": "error: there is nothing to save yet",
        "x " * 2000: "error: the prompt has ",
    }
    code, out, err = say(*wrong, "/help", "def f", "/method autoregressive", "def f", "/compare", "/quit", "def g")
    assert (code, err) == (0, "")
    assert [sentence for sentence in wrong.values() if sentence not in out] == []
    assert "/temperature X: draw tokens at this temperature" in " ".join(out.split())
    assert re.search(r"\d+ tokens/s, \d+\.\d\dx plain decoding \(\d+ tokens/s\), the same text", out)
    plain = STATUS.findall(out)
    assert len(plain) == 2  # nothing behind /quit is answered
    assert plain[1] == ""


def test_temperature_and_system_and_new_take_effect(say):
    def said(*lines: str) -> list[str]:
        return answers(say(*lines)[1])

    greedy, again = said("def f", "/new", "def f")
    assert greedy == again
    assert said("/temperature 1.5", "def f") != [greedy]
    assert said("/temperature 1.5", "/temperature 0", "def f") == [greedy]
    assert said("/system write very long lines", "def f") != [greedy]


def test_a_saved_conversation_is_a_corpus_and_files_of_others_stay(say):
    Path("taken.json").write_text("mine")
    lines = [
        "/system be short",
        "def f",
        "/save chat.json",
        "def g",
        "/save chat.json",
        "/save taken.json",
        "/save a/b",
    ]
    code, out, err = say(*lines)
    assert (code, err) == (0, "")
    assert Path("taken.json").read_text() == "mine"
    assert "error: taken.json is no new file" in out
    assert "error: a/b cannot be written" in out
    ((row,),) = [json.loads(Path("chat.json").read_text())]
    assert [message["role"] for message in row["messages"]] == ["system", *["user", "assistant"] * 2]
    (question,) = read_prompts("chat.json")
    assert (question.turns, question.system) == (("def f", "def g"), "be short")


def test_a_chat_longer_than_the_context_goes_on_without_its_first_turns(say):
    code, out, err = say(*(f"def f{i}(path): {'return path ' * 8}" for i in range(8)))
    assert (code, err, len(STATUS.findall(out))) == (0, "", 8)
    assert re.search(r"The context holds 256 tokens: the first \d+ turns are left out from now on", out)


def test_without_a_chat_template_text_is_continued(say, shared):
    code, out, err = say("def read_config", "(path)", target=shared / "target")
    assert (code, err) == (0, "")
    assert "This target has no chat template" in out
    target = load_target(shared / "target")
    with LLM(target, "autoregressive") as llm:
        first = llm.generate("def read_config", max_new_tokens=12).text
        second = llm.generate(f"def read_config\n{first}\n(path)", max_new_tokens=12).text
    assert f"{first}\n" in out
    assert f"{second}\n" in out


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, *command: str, cwd: Path) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[1])}
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(command, **streams, cwd=cwd, env=environment, start_new_session=True)
        os.close(slave)
        self.seen = ""

    def has(self, text: str, seconds: float) -> bool:
        """Read until a text is printed, and return whether it was."""
        end_s = time.monotonic() + seconds
        while text not in self.seen and time.monotonic() < end_s:
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
        return text in self.seen

    def until(self, text: str) -> str:
        """Read until a text is printed, and return what was printed behind the last one."""
        self.has(text, seconds=120)
        before, found, self.seen = self.seen.partition(text)
        assert found, before
        return before

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


@pytest.mark.slow
def test_in_a_terminal_ctrl_c_stops_an_answer_tab_completes_and_ctrl_d_leaves(tmp_path):
    options = ["target=pystdlib-8l", "method=pld", "max_new_tokens=900"]
    terminal = Terminal(sys.executable, "-m", "spectrain.chat", *options, cwd=tmp_path)
    try:
        terminal.until("> ")
        terminal.type("forgotten")
        terminal.until("forgotten")
        for _ in range(60):  # a signal between two keys waits in readline for the next one
            terminal.interrupt()
            if terminal.has("> ", seconds=2):
                break
        terminal.until("> ")
        terminal.type("/temp\t0.5\n")
        terminal.until("/temperature 0.5")
        terminal.until("> ")
        for _ in range(2):  # the second one is answered as the first one was
            terminal.type("def read_config(path):\n")
            terminal.until("path):")
            terminal.until("\x1b[33m")  # a token from the text so far has its colour
            terminal.interrupt()
            assert "(cancelled)" in terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.process.kill()
