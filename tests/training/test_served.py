"""Hidden states from a server: what arrives is what the target says, whoever else asks, whatever is killed."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from random import Random

import pytest
import torch

from data_prep import states_server
from data_prep.states_server import StatesServer, listen_at
from spectrain.errors import UserError
from spectrain.models.pruned_init import new_drafter
from spectrain.models.spire import SpireConfig
from spectrain.target import TargetModel, fingerprint, load_target
from spectrain.target.lean import shape_of
from spectrain.target.loading import open_tables
from spectrain.training import served
from spectrain.training.data import SeededLoader
from spectrain.training.served import KEY, HiddenStates, ServedRows, send_object
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.data_prep.conftest import caller, curve, training_options
from tests.training.test_offline import LAYERS, captured_store

SECRET = b"secret"
ROWS = torch.randint(0, VOCAB_SIZE, (22, 16), generator=torch.Generator().manual_seed(5), dtype=torch.int32)


@contextmanager
def serving(target: TargetModel, address: str = "127.0.0.1:0", batch_tokens: int = 64) -> Iterator[str]:
    """A server in a thread of this process; yields its address."""
    server = StatesServer(target, "tiny", "32-true", batch_tokens, SECRET)
    with listen_at(address) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the system keeps little for who does not read
        threading.Thread(target=server.run, args=[listener], daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def target(shared) -> TargetModel:
    return load_target(shared / "target", device="cpu")


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv(KEY, SECRET.decode())


@torch.no_grad()
def expected(target: TargetModel, tokens: torch.Tensor, starts: torch.Tensor | None = None) -> list[torch.Tensor]:
    found = target.with_capture(LAYERS).features(tokens.long(), starts)
    return [found.captured.bfloat16(), found.final_hidden.bfloat16()]


def same(found, wanted) -> bool:
    return all(map(torch.equal, (found.captured, found.final_hidden), wanted))


def test_answers_are_what_a_store_holds_bit_for_bit(tmp_path, target, monkeypatch):
    monkeypatch.setattr(served, "PIECE_BYTES", 777)  # so that there are several, of an odd size
    store = captured_store(tmp_path / "store", target, "32-true")
    with serving(target, batch_tokens=70) as address:  # batches of four rows, as in the store
        server = HiddenStates(address, SECRET, 5)
        for start, stop in ((0, 8), (8, 14)):
            rows = [store.read(row) for row in range(start, stop)]
            found = server.features(torch.stack([row.tokens for row in rows]).long(), None, LAYERS)
            assert same(
                found, [torch.stack([getattr(row, name) for row in rows]) for name in ("captured", "final_hidden")]
            )
        assert server.features(ROWS[:2]).captured is None
        starts = torch.tensor([[0] * 5 + [5] * 11, [0] * 16])
        assert same(server.features(ROWS[:2].long(), starts, LAYERS), expected(target, ROWS[:2], starts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_without_blocks_is_the_same_to_a_training(tmp_path, target, dtype):
    target.model.to(dtype).save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    whole, found = load_target(tmp_path, device="cpu"), open_tables(tmp_path, "float32", "cpu")
    assert (whole.has_blocks, found.has_blocks) == (True, False)
    assert fingerprint(found.model, found.tokenizer) == fingerprint(whole.model, whole.tokenizer)
    assert (found.eos_ids, found.max_positions, found.dtype) == ((7, 9), whole.max_positions, whole.dtype)
    assert torch.equal(found.unembedding, whole.unembedding)
    config = SpireConfig(shape_of(found.model), LAYERS, input="trained", unembedding="trained")
    of_whole, of_found = (new_drafter(one, config, "pruned").state_dict() for one in (whole, found))
    assert of_whole.keys() == of_found.keys()
    assert all(torch.equal(of_found[name], weight) for name, weight in of_whole.items())
    assert open_tables(tmp_path / "nowhere", "float32", "cpu") is None


@pytest.fixture
def learn(tmp_path, monkeypatch, capfd):
    return caller("spectrain.train", tmp_path, monkeypatch, capfd)


@pytest.mark.parametrize("kind", ["spire", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_losses_are_those_of_online_training(learn, shared, target, kind):
    training = [f"+exp={kind}", *training_options(shared)[1:], "trainer.precision=32-true", "data.document_mask=true"]
    assert learn(*training, "run_dir=online", "out=exported_online")[0] == 0
    with serving(target) as address:
        asks = [*training, "data=served", f"data.address={address}"]
        code, _, err = learn(*asks, "run_dir=served", "out=exported_served")
        assert code == 0, err
    for column in ("train/loss", "eval/loss"):
        assert curve("served", column) == curve("online", column)
    assert len(curve("served", "train/loss")) == 6
    found, wanted = (json.loads(Path(name, "result.json").read_text()) for name in ("served", "online"))
    assert (found["tau"], found["tokens"]) == (wanted["tau"], wanted["tokens"])
    Path("served/result.json").unlink()  # the same run, asked for at another address
    _, _, err = learn(*training, "data=served", "data.address=127.0.0.1:1", "data.timeout_s=0.3", "run_dir=served")
    assert "error: data.address=127.0.0.1:1 has not answered for" in err


@pytest.mark.slow
def test_each_bad_server_is_one_sentence(learn, shared, target, monkeypatch, tmp_path):
    monkeypatch.setattr(served, "CONNECT_S", 1.0)
    training = [*training_options(shared), "data=served"]
    other = TargetModel(tiny_model("llama", vocab_size=300), target.tokenizer)
    nobody = socket.create_server(("127.0.0.1", 0))  # some other service
    threading.Thread(
        target=lambda: nobody.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), daemon=True
    ).start()
    with serving(target) as right, serving(other) as wrong:
        cases = [
            ([f"data.address={wrong}"], SECRET, " has the target tiny ("),
            ([f"data.address={right}"], b"guess", f"the server at {right} has another key; give its {KEY}"),
            ([f"data.address={right}"], b"", f"the environment variable {KEY} is not set; set it to"),
            (
                ["data.address=127.0.0.1:1"],
                SECRET,
                "data.address=127.0.0.1:1 has not answered for",
            ),
            (["data.address=here"], SECRET, "data.address=here is no address; give host:port"),
            ([f"data.address=127.0.0.1:{nobody.getsockname()[1]}"], SECRET, "is no server of spectrain activations"),
            (
                [f"data.address={right}", "memories=final"],
                SECRET,
                "memories=final is an ablation that needs the target",
            ),
        ]
        for arguments, secret, message in cases:
            monkeypatch.setenv(KEY, secret.decode())
            code, _, err = learn(*training, *arguments)
            assert code == 2, err
            assert message in err
            assert sum(line.startswith("error: ") for line in err.splitlines()) == 1
            assert "Traceback" not in err
    assert not any(tmp_path.iterdir())


def test_nonsense_and_slow_readers_stop_nobody(target, monkeypatch):
    monkeypatch.setattr(states_server, "WAIT_S", 1.0)

    def connect(address: str, knows: bool = True) -> Connection:
        host, port = address.split(":")
        connected = socket.socket()
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connected.connect((host, int(port)))
        connection = served.opened(connected, 5)
        if knows:
            answer_challenge(connection, SECRET)
            deliver_challenge(connection, SECRET)
            json.loads(connection.recv_bytes())
        return connection

    with serving(target, batch_tokens=8192) as address:
        server, kept = HiddenStates(address, SECRET, 5), []
        huge = {"shape": [1 << 30, 1 << 30], "layers": [1], "packed": False}
        for asked in (
            huge,
            {"shape": [1, 8], "layers": [99]},
            {"shape": [1, 8], "layers": "x"},
            {"shape": [1, -8]},
            [],
        ):
            connection = connect(address)
            send_object(connection, asked)
            with suppress(OSError, EOFError):
                while True:
                    assert "error" in json.loads(connection.recv_bytes())
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", struct.pack("!iQ", -1, 1 << 62), b"\x00" * 99):
            connection = connect(address, knows=False)
            os.write(connection.fileno(), nonsense)
            kept.append(connection)
        for tokens in (torch.tensor([[VOCAB_SIZE * 99]]), torch.tensor([[-1]])):
            with pytest.raises(UserError, match="outside the vocabulary of"):
                server.features(tokens)
        with pytest.raises(UserError, match="no beginnings of documents"):
            server.features(ROWS[:1].long(), torch.full((1, 16), 3))
        slow = connect(address)  # asks for some MB and reads nothing
        send_object(slow, {"shape": [40, 200], "layers": [0, 1, 2, 3], "packed": False})
        served.send_values(slow, torch.zeros(40, 200, dtype=torch.int32))
        before = time.monotonic()
        for start in range(0, 20, 2):
            assert same(
                server.features(ROWS[start : start + 2].long(), None, LAYERS), expected(target, ROWS[start:][:2])
            )
        assert time.monotonic() - before < 5
        time.sleep(3)  # twice what a write may wait: it is given up, or all would arrive and then nothing
        with pytest.raises((OSError, EOFError)) as ended:
            list(iter(slow.recv_bytes, None))
        assert not isinstance(ended.value, BlockingIOError)


def test_strangers_without_the_key_take_no_place_of_a_training(target, monkeypatch):
    monkeypatch.setattr(states_server, "MOST_STRANGERS", 4)
    monkeypatch.setattr(states_server, "MOST_CONNECTIONS", 1)
    with serving(target) as address, ExitStack() as stack:
        host, port = address.split(":")
        strangers = [stack.enter_context(socket.create_connection((host, int(port)), 10)) for _ in range(40)]
        server = HiddenStates(address, SECRET, 5)
        assert server.features(ROWS[:1].long()).final_hidden.shape[:2] == (1, 16)
        while strangers[0].recv(4096):  # its challenge, and the end
            pass
        with pytest.raises(UserError, match=r"has not answered for .* \(all its 1 connections are taken\)"):
            HiddenStates(address, SECRET, 0.5)


def test_a_server_that_stays_away_ends_the_training_in_one_sentence(target, caplog):
    with serving(target) as address:
        server = HiddenStates(address, SECRET, 0.5)
        rows = ServedRows(tokens=ROWS, server=server, layers=LAYERS)
        assert len(list(SeededLoader(rows.__getitem__, len(rows), 2, seed=1))) == 11
        server._idle.clear()
    with pytest.raises(UserError, match=r"has not answered for \d s \(Connection refused\); start the server"):
        list(SeededLoader(rows.__getitem__, len(rows), 2, seed=1))
    assert sum("does not answer" in record.message for record in caplog.records) == 1


def read_all(address: str, log: Path) -> None:
    """Read batches as a training does, behind those that are noted in the log, until there are enough."""
    rows = ServedRows(tokens=ROWS, server=HiddenStates(address, SECRET, 60), layers=LAYERS)
    loader = SeededLoader(rows.__getitem__, len(rows), 2, seed=3)
    done = log.read_text().split("\n")[:-1] if log.exists() else []
    loader.load_state_dict({"epoch": len(done) // 11, "given": len(done) % 11})
    with log.open("a") as out:
        if done and not log.read_text().endswith("\n"):
            out.truncate(sum(len(line) + 1 for line in done))
        while not log.with_name("enough").exists():
            for batch in loader:
                digest = hashlib.sha256(batch.captured.view(torch.uint8).numpy().data)
                digest.update(batch.final_hidden.view(torch.uint8).numpy().data)
                out.write(f"{batch.numbers} {digest.hexdigest()}\n")
                out.flush()


def serve_in_process(target: TargetModel, address: str) -> None:
    StatesServer(target, "tiny", "32-true", 64, SECRET).run(listen_at(address))


def test_kills_lose_and_double_no_row(target, tmp_path):
    """A server and two trainers, each killed at random moments and started again; 1,000 times with KILLS=1000."""
    n_kills = int(os.environ.get("KILLS", 24))
    context, chance = multiprocessing.get_context("fork"), Random(n_kills)
    with listen_at("127.0.0.1:0") as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    starts = {"server": (serve_in_process, target, address)}
    starts |= {name: (read_all, address, tmp_path / name) for name in ("one", "other")}

    def start(name: str) -> multiprocessing.Process:
        function, *arguments = starts[name]
        process = context.Process(target=function, args=arguments, daemon=True)
        process.start()
        return process

    processes, killed = {name: start(name) for name in starts}, dict.fromkeys(starts, 0)
    while sum(killed.values()) < n_kills:
        time.sleep(chance.uniform(0, 0.1))
        name = chance.choice(list(starts))
        assert processes[name].is_alive()
        os.kill(processes[name].pid, signal.SIGKILL)
        processes[name].join()
        killed[name] += 1
        processes[name] = start(name)
    (tmp_path / "enough").touch()
    for name in ("one", "other"):
        processes[name].join(120)
        assert processes[name].exitcode == 0
    processes["server"].kill()
    found, wanted = [(tmp_path / name).read_text().splitlines() for name in ("one", "other")], []
    loader = SeededLoader(list, len(ROWS), 2, seed=3)
    states = {}
    while len(wanted) < max(map(len, found)):
        for places in loader:
            if tuple(places) not in states:
                digest = hashlib.sha256()
                for one in expected(target, ROWS[places]):
                    digest.update(one.view(torch.uint8).numpy().data)
                states[tuple(places)] = digest.hexdigest()
            wanted.append(f"{places} {states[tuple(places)]}")
    assert min(map(len, found)) > n_kills / 10
    assert all(lines == wanted[: len(lines)] for lines in found)
    assert min(killed.values()) > n_kills / 5
