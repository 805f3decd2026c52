"""One sentence and one exit code, whenever a signal arrives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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


def test_a_signal_is_not_lost_where_python_ignores_errors():
    code, err = ran(
        """
        class Dying:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
        with SIGNALS.answered():
            Dying()
            time.sleep(9)
            print("was not reached", file=sys.stderr)
    """.replace("\n        ", "\n")
    )
    assert (code, err) == (143, "terminated; run the same command again\n")


@pytest.mark.parametrize("number", SAID)
@pytest.mark.parametrize("command", ["spectrain", "spectrain.generate", "data_prep.responses"])
def test_a_signal_is_answered_while_the_command_line_is_imported(command, number, tmp_path):
    (tmp_path / "hydra.py").write_text(f"import os; os.kill(os.getpid(), {int(number)})")
    environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-m", command], env=environment, capture_output=True, text=True, timeout=60)
    code, said = SAID[number]
    assert (done.returncode, done.stderr) == (code, f"{said}; run the same command again\n")


def test_an_interrupt_in_code_from_a_text_has_the_same_exit_code(tmp_path):
    lines = ["import os", "from spectrain.stores.signals import SIGNALS", "with SIGNALS.answered():"]
    (tmp_path / "own.py").write_text("\n".join([*lines, "    exec('os.kill(os.getpid(), 2)')"]))
    done = subprocess.run([sys.executable, "-m", "own"], env=ENVIRONMENT, cwd=tmp_path, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, b"interrupted; run the same command again\n")
