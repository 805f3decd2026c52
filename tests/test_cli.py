"""`spectrain` itself: the list of commands, their help, what is said meanwhile, and what to type next."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from spectrain import config, doctor, terminal
from spectrain.cli import composed
from spectrain.config import COMMANDS, help, options_of
from spectrain.terminal import say_next, stage

ROOT = Path(__file__).parent.parent


def spectrain(folder: Path, *arguments: str, module: str = "spectrain") -> subprocess.CompletedProcess:
    """Run `spectrain` where torch cannot be imported."""
    (folder / "torch.py").write_text("raise ImportError('torch must not be needed')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "COLUMNS": "100"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)


def test_commands_are_listed_by_what_users_want_without_torch(tmp_path):
    listed = spectrain(tmp_path)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert spectrain(tmp_path, "--help").stdout == listed.stdout
    assert set(re.findall(r"^  (\w+) ", listed.stdout, re.MULTILINE)) == set(COMMANDS)
    assert "other commands" not in listed.stdout
    assert re.fullmatch(r"[\d.]+\n", spectrain(tmp_path, "--version").stdout)


def test_a_command_is_the_same_as_its_module(tmp_path):
    for name, module, options in (
        ("generate", "spectrain.generate", ["max_new_tokens=0", "prompt=a b"]),
        ("responses", "data_prep.responses", ["--help"]),
    ):
        found, same = spectrain(tmp_path, name, *options), spectrain(tmp_path, *options, module=module)
        assert (found.returncode, found.stdout, found.stderr) == (same.returncode, same.stdout, same.stderr)
        assert found.returncode == (0 if options == ["--help"] else 2)
        assert "Traceback" not in found.stderr
    wrong = spectrain(tmp_path, "genrate", "prompt=x")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "unknown command: genrate; did you mean generate?" in wrong.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_and_each_option_with_its_default(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    help.show_options(name, [])
    said = capsys.readouterr().out
    assert f"\nspectrain {name}" in said
    assert "???" not in said
    for option in config.described(COMMANDS[name][0]):
        group = option.name.partition(".")[0]
        if group == option.name or COMMANDS[name][1].get(group, "") is not None:
            assert f"  {option.name}={option.default}" in said


def test_help_shows_the_options_of_what_is_chosen(capsys):
    help.show_options("train", ["+exp=vanilla"])
    said = capsys.readouterr().out
    assert "+exp=specdecpp" in said
    assert "  hidden_size=null" in said
    assert "  optimizer.name=muon" in said  # its own default, and not that of other kinds
    help.show_options("generate", ["method=spire_sssd"])
    said = " ".join(capsys.readouterr().out.split())
    assert "method.lookup=sssd" in said
    assert "method.datastore=auto of the lookup: folder | null: prompt and output alone" in said
    assert "else the newest below checkpoints/ or the one that comes with spectrain" in said  # a second line of it


def test_help_of_a_training_begins_with_what_a_newcomer_chooses(capsys):
    help.show_options("train", ["+exp=eagle3"])
    said, parts = capsys.readouterr().out, ("what is trained", "target:", "corpus:", "data:", "options, with")
    parts += ("  hours=", "  out=", "options of +exp=eagle3", "  max_steps=", "  ttt_steps=", "  optimizer.name=")
    parts += ("trainer:", "select:", "tau:", "logger:")
    places = [said.index(f"\n{part}") for part in parts]
    assert places == sorted(places)


def test_a_stage_is_one_line_of_a_log_and_only_if_it_takes_long(monkeypatch, caplog):
    monkeypatch.setattr(terminal, "LOG_AFTER_S", 0.2)
    monkeypatch.setattr(terminal, "LOG_EVERY_S", 0.5)
    with caplog.at_level(logging.INFO):
        with stage("short"):
            pass
        with stage("long", total=4) as advance, stage("inner"):
            time.sleep(0.6)
            advance(1, "half of a half")
        with stage("hidden", shown=False):
            time.sleep(0.4)
    assert sorted(caplog.messages) == ["inner", "long", "long: 25%, half of a half, 2 s left"]
    caplog.clear()
    with caplog.at_level(logging.WARNING), stage("of another rank"):
        time.sleep(0.4)
    assert caplog.messages == []


def test_a_stage_goes_away_on_a_terminal_and_log_lines_stay():
    code = """
import logging, sys
logging.basicConfig(level="INFO", handlers=[logging._StderrHandler()], format="%(message)s")
from spectrain.terminal import stage
with stage("outer"), stage("inner [/]", total=2) as advance:
    advance()
    logging.info("a line")
print("done", file=sys.stderr)
"""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, env=environment, check=True)
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 4096):
            said += part
    except OSError:  # all is read
        pass
    screen = said.decode()
    assert "outer" in screen
    assert "inner [/]" in screen
    assert re.search(r"\x1b\[2Ka line", screen)  # on a line that was cleared before
    assert screen.endswith("\x1b[2Kdone\r\n")


@pytest.mark.parametrize("out", ["plain", "with a space/x", "it's", "$HOME (1), {a}", 'say "x"'])
def test_the_line_to_type_next_is_right_as_typed(out, capsys):
    say_next(
        "generate", {"method": "pld", "datastore": out, "drafter": None, "target": "pystdlib-8l", "prompt": "a: b"}
    )
    line = capsys.readouterr().out.strip()
    said, program, name, *arguments = shlex.split(line)
    assert (said, program, name, len(arguments)) == ("next:", "spectrain", "generate", 4)
    found = options_of(name, composed(name, *arguments))
    assert (found.datastore, found.prompt) == (out, "a: b")


def findings(capsys) -> str:
    doctor.main(None)
    return " ".join(capsys.readouterr().out.split())


def test_doctor_says_what_is_wrong_and_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "LOAD_S", 0.01)
    monkeypatch.setattr(doctor.OtherWork, "share", lambda one: 0.0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert findings(capsys).endswith("Nothing is wrong.")
    monkeypatch.setattr(doctor.OtherWork, "share", lambda one: 0.4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    monkeypatch.setattr(doctor, "works", lambda dtype: dtype != torch.int8)
    said = findings(capsys)
    assert f"set OMP_NUM_THREADS={len(os.sched_getaffinity(0))}" in said
    assert "take 40% of the processor's time now" in said
    assert "there are none for int8" in said
    assert "Nothing is wrong" not in said


def test_doctor_is_a_command(typed):
    code, out, err = typed("doctor")
    assert (code, "Traceback" in err) == (0, False)
    assert "compiled kernels" in out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", None])
def test_no_output_is_too_poor_for_a_character(run, monkeypatch, encoding):
    """None: a service, or a process behind `>&-`, has no output at all."""
    for name in ("stdout", "stderr"):
        stream = None if encoding is None else io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, name, stream)
    assert run("generate", "method=autoregressive", "max_new_tokens=2", "prompt=é – 中")[0] == 0
    assert run("generate", "method=autoregressive", "prompt=x", "max_new_tokens=–")[0] == 2
    if encoding is not None:
        sys.stderr.flush()
        assert sys.stdout.buffer.getvalue().decode(encoding).startswith("? ? ?" if encoding == "ascii" else "é ? ?")
        assert sys.stderr.buffer.getvalue().decode(encoding).count("max_new_tokens=? cannot be read") == 1


def test_a_locale_without_utf_8_changes_nothing():
    typed = [sys.executable, "-m", "spectrain", "generate", "prompt=x", "max_new_tokens=ů"]
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(typed, env=os.environ | locale, capture_output=True)
    assert (found.returncode, "max_new_tokens=ů cannot be read" in found.stderr.decode()) == (2, True), found.stderr
