"""Hidden states from a vLLM, of which a stand-in answers here as vLLM 0.32.0 does; tests/engines has the real one."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spectrain.config.groups import Target
from spectrain.config.training import Train, Trainer
from spectrain.errors import UserError
from spectrain.stores.locations import BUNDLED, bundled_folder
from spectrain.target import TargetModel, load_target
from spectrain.target.loading import open_tables
from spectrain.target.target import FINAL
from spectrain.training import served
from spectrain.training.served_vllm import VllmStates
from spectrain.training.sources import Served
from tests.conftest import tiny_model
from tests.data_prep.conftest import caller, curve, training_options

LAYERS = (2, 3)
ROWS = torch.randint(4, 300, (3, 16), generator=torch.Generator().manual_seed(5))


def states_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """The inputs of all blocks and the state before the last norm, [n, n_layer + 1, D], as hooks see them."""
    found, modules = [], [*model.model.layers, model.model.norm]
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs: found.append([*args, *kwargs.values()][0]), with_kwargs=True
        )
        for module in modules
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack([one[0] for one in found], dim=1)


@dataclass
class StandIn:
    """What answers in place of vLLM, with one fault at most."""

    model: torch.nn.Module
    folder: Path
    layers: tuple[int, ...] = (4, 2, 3)  # in any order
    fault: str = ""
    room: int = 64
    asked: list[list[int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def complete(self, tokens: list[int]) -> dict:
        with self.lock:
            self.asked.append(tokens)
            path = self.folder / f"{len(self.asked)}.safetensors"
            states = states_of(self.model, tokens)[:, list(self.layers)].contiguous()
        held = path.with_name(f"{path.name}.lock").open("w")
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Thread(target=self.write, args=[path, held, states, tokens]).start()  # vLLM answers before it writes
        return {"kv_transfer_params": None if self.fault == "plain" else {"hidden_states_path": str(path)}}

    def write(self, path: Path, held, states: torch.Tensor, tokens: list[int]) -> None:
        time.sleep(0.01)
        if self.fault != "elsewhere":
            other = 1 if self.fault == "other tokens" else 0
            save_file({"hidden_states": states, "token_ids": torch.tensor(tokens) + other}, path)
        if self.fault == "cut":
            path.write_bytes(path.read_bytes()[:-100])
        held.close()


@contextmanager
def serving(engine: StandIn) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def reply(self, status: int, body: dict) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self) -> None:
            if engine.fault == "no vllm":
                return self.reply(200, {"data": []})
            refused = engine.fault == "key" and self.headers["Authorization"] != "Bearer secret"
            self.reply(401 if refused else 200, {"data": [{"id": "tiny", "max_model_len": engine.room}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (body["model"], body["max_tokens"]) == ("tiny", 1)
            if engine.fault == "restarts":
                engine.fault = ""
                return self.reply(503, {})
            self.reply(200, engine.complete(body["prompt"]))

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def target(shared) -> TargetModel:
    return load_target(shared / "target", device="cpu", dtype="float32")


@pytest.fixture
def engine(target, tmp_path) -> StandIn:
    (tmp_path / "states").mkdir()
    return StandIn(target.model, tmp_path / "states")


@pytest.mark.parametrize("fault", ["", "restarts"])
@pytest.mark.parametrize("has_blocks", [True, False])
def test_states_are_the_targets_own(shared, target, engine, fault, has_blocks, caplog):
    opened = target if has_blocks else open_tables(shared / "target", "float32", "cpu")
    assert opened.has_blocks == has_blocks
    layers, slots = (LAYERS, [1, 2, 0]) if has_blocks else ((2, FINAL), [1, 0, 0])  # FINAL: memories=final
    starts = torch.tensor([[0] * 5 + [5] * 11, [0] * 16, [0] * 15 + [15]])
    with serving(engine) as address:
        server = VllmStates(address, 5, opened, str(shared / "target"), layers, 16)
        assert (server.slots, server.dtype) == (slots, "float32")
        engine.fault = fault
        for given, n_documents in ((None, 3), (starts, 5)):
            engine.asked.clear()
            found = server.features(ROWS, given, layers)
            wanted = target.with_capture(layers).features(ROWS, given)
            for one, other in ((found.captured, wanted.captured), (found.final_hidden, wanted.final_hidden)):
                assert one.dtype == torch.bfloat16
                torch.testing.assert_close(one, other.detach().bfloat16(), rtol=2**-7, atol=1e-5)
            assert len(engine.asked) == n_documents
    assert not any(engine.folder.iterdir())
    assert any("answers again" in one.message for one in caplog.records) == (fault == "restarts") or fault


def test_a_bundled_target_is_found_by_its_name(engine):
    path = bundled_folder(BUNDLED)
    engine.model, engine.layers = load_target(path, device="cpu", dtype="float32").model, (6, 7, 8)
    config = Train(trainer=Trainer(accelerator="cpu"), target=Target(path=BUNDLED, dtype="float32"))
    with serving(engine) as address:
        source = Served(address=address, timeout_s=5, row_tokens=16)
        assert source._vllm(config, open_tables(path, "float32", "cpu"), (6, 7)).slots == [0, 1, 2]


@pytest.mark.slow
def test_losses_are_those_of_online_training(shared, target, engine, tmp_path, monkeypatch, capfd):
    learn = caller("spectrain.train", tmp_path, monkeypatch, capfd)
    training = [*training_options(shared), "trainer.precision=32-true", "data.document_mask=true"]
    assert learn(*training, "run_dir=online", "out=exported_online")[0] == 0
    with serving(engine) as address:
        asks = [*training, "data=served", f"data.address={address}"]
        code, _, err = learn(*asks, "run_dir=served", "out=exported_served")
        assert code == 0, err
    for column in ("train/loss", "eval/loss"):
        assert curve("served", column) == pytest.approx(curve("online", column), rel=1e-3)
    assert engine.asked
    assert not any(engine.folder.iterdir())


FAULTS = {
    "plain": 'writes no hidden states; start it with --speculative-config \'{"method": "extract_hidden_states"',
    "layers": "has the states [3, 4], but the drafter reads [2], too; start it with --speculative-config",
    "final": "has the states [2, 3], but the drafter reads [4], too; start it with --speculative-config",
    "other": "has another target than",
    "narrow": "has another target than",
    "elsewhere": "cannot be read here (No such file or directory",
    "cut": "cannot be read here (Error while deserializing header",
    "other tokens": "cannot be read here (it is of other tokens)",
    "short": "takes 15 tokens, but data.row_tokens=16; lower it, or start vLLM with --max-model-len 17",
    "no vllm": "is no vLLM that serves one model; give another",
    "key": "refuses /v1/models: 401",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_bad_vllm_is_one_sentence(shared, target, engine, fault):
    engine.fault = fault
    if fault in ("layers", "final"):
        engine.layers = (3, 4) if fault == "layers" else (2, 3)
    if fault in ("other", "narrow"):
        sizes = {"hidden_size": 64} if fault == "narrow" else {}
        engine.model = tiny_model("llama", 7, vocab_size=300, num_hidden_layers=4, initializer_range=0.05, **sizes)
    engine.room = 16 if fault == "short" else 64
    with serving(engine) as address, pytest.raises(UserError) as raised:
        VllmStates(address, 5, target, str(shared / "target"), LAYERS, 16)
    assert FAULTS[fault] in str(raised.value)
    assert str(raised.value).startswith((f"the vLLM at {address}", f"data.address={address}", "the states that"))


def test_a_key_is_sent_and_a_vllm_that_is_down_is_said(shared, target, engine, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setattr(served, "CONNECT_S", 0.3)
    engine.fault = "key"
    with serving(engine) as address:
        VllmStates(address, 5, target, str(shared / "target"), LAYERS, 16)
    with pytest.raises(UserError, match=r"has not answered for \d s \(Connection refused\); start vLLM with --spec"):
        VllmStates(address, 5, target, str(shared / "target"), LAYERS, 16)
