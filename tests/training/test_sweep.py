"""A sweep of Weights & Biases in its offline mode: the real agent and our command, with a stand-in for the server."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import yaml

from spectrain.config import conf_dir
from tests.test_commands import small  # noqa: F401  a fixture
from tests.training.test_loggers import without_key  # noqa: F401  a fixture


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_each_run_that_an_agent_asks_for_ends_well_with_the_numbers(run, shared, small, without_key, monkeypatch):  # noqa: F811
    """The first is interrupted, the second goes on with it, and the third asks for the same combination again."""
    import wandb  # here, as it takes seconds
    from wandb import wandb_agent
    from wandb.apis.public import sweeps as server

    asked = ["first", "second", "third"]
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_RUN_ID", asked[0])
        patch.setattr("spectrain.train.publish", interrupted)
        assert run("train", "+exp=spire", "logger=wandb", "logger.tags=[sweep]", *small)[0] == 130

    sweep = yaml.safe_load((conf_dir() / "sweep/spire.yaml").read_text())
    typed = dict(option.split("=", 1) for option in [f"target={shared / 'target'}", *small])
    options = {"program": sweep["program"], "args": {name: {"value": value} for name, value in typed.items()}}
    commands = [{"type": "run", "run_id": name} | options for name in asked[1:]] + [{"type": "exit"}]
    codes: list[int | None] = []
    monkeypatch.setenv("WANDB_DIR", str(Path.cwd()))
    monkeypatch.setattr(wandb, "Api", lambda: None)
    monkeypatch.setattr(wandb, "teardown", lambda code=None: codes.append(code))  # with the exit code of each process
    monkeypatch.setattr(server, "_sweep_with_runs", lambda *_: {"config": yaml.safe_dump(sweep)})
    monkeypatch.setattr(server, "_register_agent", lambda *_, **__: {"id": "agent"})
    monkeypatch.setattr(server, "_agent_heartbeat", lambda *heard: [] if heard[-1] else [commands.pop(0)])
    monkeypatch.setattr(wandb_agent.Agent, "POLL_INTERVAL", 0.1)
    wandb_agent.Agent(None, multiprocessing.Queue(), sweep_id="s").run()
    assert codes == [0, 0]

    (path,) = Path("runs").iterdir()
    result = json.loads((path / "result.json").read_text())
    by_gamma = result["gammas"]["greedy"]
    fastest = by_gamma[str(result["fastest_gamma"] or max(map(int, by_gamma)))]["speedup"]["value"]
    numbers = {"eval/speedup": fastest, "eval/tau": result["tau"]["spire"]["16 tokens, greedy"]["value"]}
    logs = {name: sorted(path.glob(f"wandb/offline-run-*/run-{name}.wandb")) for name in asked}
    assert {name: len(attempts) for name, attempts in logs.items()} == {"first": 2, "second": 1, "third": 1}
    for *_, last in logs.values():
        assert all(f"{name}\x82\x01".encode("latin-1") in last.read_bytes() for name in numbers)
        assert all(json.dumps(value).encode() in last.read_bytes() for value in numbers.values())
