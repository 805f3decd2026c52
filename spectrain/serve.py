"""Answer requests of OpenAI's API, and show a page to chat on at http://127.0.0.1:8000.

    python -m spectrain.serve target=smollm2

docs/serving.md lists the fields of requests, the limits and the metrics.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("spectrain.serve")

import errno
import gc
import logging
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn

from spectrain.cli import open_target
from spectrain.config import plain
from spectrain.config.commands import Serve
from spectrain.decoding import Drafter, Sampling
from spectrain.errors import UserError
from spectrain.methods.options import given_artifacts
from spectrain.methods.registry import build_methods, load_method, method_config, method_names
from spectrain.serving.access import Access
from spectrain.serving.connection import Connection
from spectrain.serving.request_log import TrafficLog
from spectrain.serving.server import make_app
from spectrain.serving.service import Limits, Service
from spectrain.serving.worker import open_worker
from spectrain.stores.environment import free_files
from spectrain.stores.folder import locked
from spectrain.stores.rows import ResponseManifest
from spectrain.stores.signals import SAID, SIGNALS, Terminated
from spectrain.target import TargetModel, fingerprint, tokenizer_fingerprint

log = logging.getLogger(__name__)

KEY_VARIABLE = "SPECTRAIN_KEY"
BACKLOG = 1024  # connections that wait to be accepted
ACCEPTED = 32  # of them at a time
KEEP_ALIVE_S = 30  # of a connection until the headers of a request are complete
MOST_CONNECTIONS = 1024
KEPT_FILES = ACCEPTED + 32  # for connections that are accepted before others are closed, and for files
ENDING_S = 3.0  # beyond `timeout_s`, for an answer to say that it took too long


def main(options: Serve) -> None:
    key = options.api_key or os.environ.get(KEY_VARIABLE) or None
    access = Access(key, tuple(options.allow_hosts), tuple(options.allow_origins))
    if key is not None and not key.isascii():
        raise UserError("the server's key must be of ASCII characters, as headers are; give another api_key")
    body_bytes = int(options.max_body_mib * 2**20)
    limits = Limits(body_bytes, options.max_waiting, options.max_new_tokens, options.timeout_s)
    with ExitStack() as stack:
        listener = stack.enter_context(bound(options.host, options.port))  # before minutes of loading
        if options.log_responses is not None:
            stack.enter_context(locked(Path(options.log_responses)))
        log.info("loading %s", options.target.path)
        target = open_target(options.target, all_ranks=True)
        if target.tokenizer.chat_template is None:
            log.warning("the target has no chat template: a conversation is one text to it")
        names = options.methods if isinstance(options.methods, list) else [options.methods]
        if len({Path(name).name for name in names}) < len(names):
            raise UserError(f"methods={names} have one name twice, by which requests could not choose; rename a folder")
        methods = opened(options, names, target)
        traffic = traffic_log(options, target) if options.log_responses is not None else None
        worker = open_worker(target, methods, options.batch_size, memory=options.memory, max_length=options.max_length)
        log.info("warming up: %s", ", ".join(methods))
        worker.warm_up()
        gc.collect()
        gc.freeze()  # so that no later collection, in which everybody waits, looks at what loading has made
        stack.callback(gc.unfreeze)  # else libraries say at exit that objects were leaked
        stack.callback(worker.close)  # not before: an interrupted warm-up may time the machine for a while
        sampling = Sampling(**vars(options.sampling))
        name = options.name or Path(options.target.path).name
        service = Service(worker, target, name, sampling, limits, traffic)
        listen(listener, options.port)
        address = "http://{}:{}".format(f"[{options.host}]" if ":" in options.host else options.host, port_of(listener))
        print(
            f"{name} answers at {address}/v1, with a page at {address} (methods: {', '.join(methods)}). "
            f"Ctrl-C finishes what runs.\nnext: curl {address}/v1/models",
            flush=True,
        )
        Server(service, access).run([listener])
        if traffic is not None:
            traffic.close()
    raise Terminated if SIGNALS.first == signal.SIGTERM else KeyboardInterrupt


def opened(options: Serve, names: Sequence[str], target: TargetModel) -> dict[str, Drafter]:
    """Open the methods, with the folders that the user gave, by the names by which requests choose."""
    known = {name: method_config(name) for name in names if name in method_names()}
    built, _ = build_methods(known, given_artifacts(options.drafter, options.head, options.datastore), target, False)
    return {Path(name).name: built[name] if name in built else load_method(name, target) for name in names}


def traffic_log(options: Serve, target: TargetModel) -> TrafficLog:
    """Open the store that answers are appended to."""
    manifest = ResponseManifest(
        target=options.target.path,
        target_fingerprint=fingerprint(target.model, target.tokenizer),
        tokenizer_fingerprint=tokenizer_fingerprint(target.tokenizer),
        sampling=Sampling(**vars(options.sampling)).distribution(),
        max_new_tokens=options.max_new_tokens,
        config={"kind": "responses", "source": "serve", "target": plain(options.target)},
        counts={"failed": 0},
    )
    return TrafficLog(Path(options.log_responses), manifest)


class Server(uvicorn.Server):
    """Finishes running requests at the first signal, and ends at once at a second one."""

    def __init__(self, service: Service, access: Access) -> None:
        quiet = {"log_config": None, "log_level": "error", "access_log": False, "server_header": False}
        times = {"timeout_keep_alive": KEEP_ALIVE_S, "timeout_graceful_shutdown": service.limits.timeout_s + ENDING_S}
        most = max(1, min(MOST_CONNECTIONS, free_files() - KEPT_FILES))
        http = partial(Connection, request_s=service.limits.timeout_s + ENDING_S, most=most)
        app = make_app(service, access)
        super().__init__(uvicorn.Config(app, http=http, ws="none", lifespan="off", backlog=ACCEPTED, **times, **quiet))
        self.service = service
        SIGNALS.anew()
        self._ignored = [number for number in SAID if signal.getsignal(number) is signal.SIG_IGN]  # see `Signals`

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # uvicorn's `backlog` is also how many it accepts at a time

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig in self._ignored:
            return
        if SIGNALS.asked_again(sig):
            os._exit(SIGNALS.say())
        if not self.should_exit:
            n_open = self.service.n_open
            os.write(2, f"finishing {n_open} requests; a second signal ends them\n".encode() if n_open else b"")
        self.should_exit = self.service.is_closing = True


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that has an address, at which nobody is heard yet. Raises UserError where it is taken."""
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise not_listening(host, port, error) from error
    return listener


def listen(listener: socket.socket, port: int) -> None:
    try:
        listener.listen(BACKLOG)
    except OSError as error:  # another process was faster
        raise not_listening(listener.getsockname()[0], port, error) from error


def not_listening(host: str, port: int, error: OSError) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(f"port={port} is in use by another process; give another port")
    return UserError(f"host={host} port={port} cannot be listened at ({error.strerror}); give others")


def port_of(listener: socket.socket) -> int:
    return listener.getsockname()[1]
