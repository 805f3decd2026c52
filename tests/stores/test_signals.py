"""One sentence and one exit code, whenever a signal arrives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
SAID = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}


def ran(script: str) -> tuple[int, str]:
    """Run Python code that has sent itself signals. Returns its exit code and stderr."""
    script = f"import os, signal, sys, time\nfrom spectrain.stores.signals import SIGNALS\n{script}"
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize(("number", "after_s"), [(signal.SIGINT, 0.3), (signal.SIGTERM, 0.6)])
def test_a_signal_while_a_command_is_imported_is_one_sentence(tmp_path, number, after_s):
    command = [sys.executable, "-m", "spectrain.generate", "prompt=a"]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    time.sleep(after_s)
    process.send_signal(number)
    code, what = SAID[number]
    assert process.communicate(timeout=60)[1] == f"{what}; run the same command again\n"
    assert process.returncode == code


def test_handlers_are_given_back():
    code, err = ran(
        """
        with SIGNALS.answered():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
    """.replace("\n        ", "\n")
    )
    assert (code, err) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("number", SAID)
def test_a_second_signal_does_not_wait_for_the_first(number):
    code, err = ran(
        f"""
        with SIGNALS.answered():
            try:
                os.kill(os.getpid(), {int(number)})
            finally:
                os.kill(os.getpid(), {int(number)})  # the same once more, as terminals send it
                time.sleep(1.1)
                os.kill(os.getpid(), signal.SIGINT)
                print("was not reached", file=sys.stderr)
    """.replace("\n        ", "\n")
    )
    assert (code, err) == (SAID[number][0], f"{SAID[number][1]}; run the same command again\n")


def test_a_signal_in_a_place_that_raises_nothing_ends_the_command():
    code, err = ran(
        """
        class Held:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
        with SIGNALS.answered():
            Held()
            print("was not reached", file=sys.stderr)
    """.replace("\n        ", "\n")
    )
    assert (code, err) == (143, "terminated; run the same command again\n")


def test_a_signal_while_python_clears_up_leaves_the_exit_code():
    code, err = ran(
        """
        sys.argv, sys.orig_argv = ["-m"], [sys.executable, "-m", "spectrain.generate"]
        SIGNALS.answer_while_importing()
        class Held:
            def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
                kill(pid, number)
        held = Held()
    """.replace("\n        ", "\n")
    )
    assert (code, err) == (0, "")
