"""A Python that starts at once: what it is asked to run goes on in a fork of a process that has imported the libraries.

A process of a command imports for eight seconds, and tests start some sixty: ranks, machines, sections. `write_python`
writes an executable that takes `-m module ...` or `file ...` and ends as that ends, by a signal, too. Signals and its
own death reach what it has started. The first call starts the process that forks. It lives as long as the tests do.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path

PYTHON = "FORKING_PYTHON"  # the variable that names the executable
IMPORTED = (
    *(f"spectrain.{name}" for name in ("train", "generate", "bench", "export", "report")),
    *(f"data_prep.{name}" for name in ("responses", "activations", "acceptance", "datastore", "target")),
    *("deepspeed", "pytest", "torch.distributed.run", "torch.distributed.fsdp"),
    *("transformers.models.llama.modeling_llama", "PIL.Image", "filelock"),
)


def write_python(folder: Path) -> str:
    """Write the executable; it serves while this process lives."""
    file, given = folder / "python", (str(Path(__file__).parent), str(folder / "socket"), os.getpid())
    code = "import sys\nsys.path.append({!r})\nimport forks\nforks.ask({!r}, {})\n".format(*given)
    file.write_text(f"#!{sys.executable} -IS\n{code}")
    file.chmod(0o755)
    return str(file)


def ask(address: str, tests: int) -> None:
    """Have run what this process was called with, and end as it ends."""
    server = connected(address, tests)
    asked = {
        "argv": [one for one in sys.argv[1:] if one != "-u"],
        "cwd": os.getcwd(),
        "environ": dict(os.environ),
        "python": sys.argv[0],
    }
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
    code = int(server.recv(9))
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def connected(address: str, tests: int) -> socket.socket:
    """Connect to the server; start it if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with open(f"{address}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if connection.connect_ex(address):
            root, home = Path(__file__).parents[2], Path(address).with_name("hub")
            command = [sys.executable, "-m", "tests.support.forks", address, str(tests)]
            own = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "HF_HOME": str(home)}
            started = subprocess.run(
                command, cwd=root, env=os.environ | own, stdin=subprocess.DEVNULL, capture_output=True
            )
            if started.returncode:
                sys.exit(started.stderr.decode())
            connection.connect(address)
    return connection


def serve(address: str, tests: int) -> None:
    """Import, then fork for each that asks, while the process of the tests lives."""
    for name in IMPORTED:
        importlib.import_module(name)
    load_compiled()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    alive = os.pidfd_open(tests)
    if os.fork():  # it is ready, and no child of whoever asked first
        os._exit(0)
    os.setsid()
    for place in (1, 2):  # which others wait to be closed
        os.dup2(0, place)
    gc.collect()
    gc.freeze()  # or a collection in a fork would copy all pages
    while alive not in select.select([listener, alive], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            os.close(alive)
            listener.close()
            start(connection)
        connection.close()


def load_compiled() -> None:
    """Load what numba has compiled for each step, which takes a process a second."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from spectrain.decoding import Sampling, generate
    from spectrain.methods.speculative import Speculative
    from spectrain.target import TargetModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes)).requires_grad_(False)
    generate(TargetModel(model), Speculative(TargetModel(model), 3), [[4, 5, 6]], 6, Sampling(temperature=1.0, top_k=5))


def start(connection: socket.socket) -> None:
    """Run what was asked in one more fork, pass signals on to it, and tell its exit code."""
    asked, fds, *_ = socket.recv_fds(connection, 1 << 20, 3)
    for place, fd in enumerate(fds):
        os.dup2(fd, place)
        os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    if child := os.fork():
        ended = os.pidfd_open(child)
        while ended not in select.select([connection, ended], [], [])[0]:
            if told := connection.recv(1):
                os.kill(child, told[0])
            else:  # whoever asked is dead
                os.killpg(0, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.send(str(code).encode())
        os._exit(0)
    connection.close()
    become(**json.loads(asked))


def become(argv: list[str], cwd: str, environ: dict[str, str], python: str) -> None:
    """Run a module or a file in this process, and end it. Libraries are not taken down, which would take seconds."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    sys.executable, is_module, code = python, argv[0] == "-m", 0
    sys.argv = argv[is_module:]
    lightning = importlib.import_module("lightning.fabric.utilities.rank_zero")
    lightning.rank_zero_only.rank = lightning._get_rank() or 0  # which it reads when it is imported
    sys.path[:1] = [cwd if is_module else str(Path(argv[0]).parent), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        if is_module:
            sys.modules.pop(argv[1], None)
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with suppress(OSError, ValueError):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
    os._exit(0)
