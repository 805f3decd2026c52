"""The commands as a user types them, on a tiny target: what they print, write, refuse and resume."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning import Callback
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from spectrain.data.texts import train_tokenizer
from spectrain.target import load_target
from spectrain.training import fit as fitting
from spectrain.training.drafters import DrafterTraining
from spectrain.training.runs import RunFolder, read_csv
from spectrain.training.sums import ValidationSums
from tests.conftest import SMALL_TRAINING
from tests.models.test_artifacts import export_vanilla

GENERATE = ("generate", "prompt=def read_config(path):", "max_new_tokens=20")


@pytest.fixture
def small(shared) -> list[str]:
    steps = ("max_steps=6", "trainer.val_check_interval=4", "corpus.held_out_share=0.3")
    return [f"corpus={shared / 'corpus'}", *SMALL_TRAINING, *steps, "tau.context_tokens=[16,32]"]


def test_spire_is_trained_measured_exported_and_used(run, small, tmp_path):
    code, out, _ = run("train", "+exp=vanilla", *small, "out=vanilla")
    assert code == 0
    assert "speculative" in out
    assert AutoModelForCausalLM.from_pretrained("vanilla").config.num_hidden_layers == 2
    before = Path("vanilla/model.safetensors").stat().st_mtime_ns
    code, _, err = run("train", "+exp=vanilla", *small, "out=vanilla")
    assert code == 2
    assert "finished" in err
    assert "fresh=true" in err
    code, _, err = run("train", "+exp=vanilla", *small, "out=vanilla", "fresh=true")
    assert code == 0, err
    assert Path("vanilla/model.safetensors").stat().st_mtime_ns > before

    code, out, err = run("train", "+exp=spire", *small, "vanilla=vanilla")
    assert code == 0, err
    assert all(
        word in out for word in ("autoregressive", "speculative", "spire", "16 tokens, greedy", "32 tokens, T=1")
    )
    (folder,) = Path("checkpoints").iterdir()
    assert {f.name for f in folder.iterdir()} >= {"model.safetensors", "config.json", "spectrain.json", "README.md"}
    result = json.loads((Path("runs") / folder.name / "result.json").read_text())
    assert result["tokens"] == 6 * 2 * 64
    assert result["tau"]["spire"]["16 tokens, greedy"]["value"] >= 1
    assert list(Path("runs").glob("*/metrics/version_0/metrics.csv"))

    code, out, err = run(*GENERATE, "method=spire", "baseline=true")
    assert code == 0, err
    assert out.startswith("def read_config(path):")
    assert all(word in out for word in ("tau", "tokens/s", "x autoregressive decoding"))
    code, out, err = run(*GENERATE, "method=auto")
    assert code == 0, err
    assert re.search(r"steps: \w+ \d+ %", out)
    assert "autoregressive decoding" not in out  # a comparison is asked for
    code, out, err = run(
        "generate", "method=speculative", "drafter=vanilla", "prompt=def f", "sampling=t1", "max_new_tokens=9"
    )
    assert code == 0, err


def test_a_drafter_is_trained_further(run, typed, small):
    """From the weights and for the tokens that it has, and its input is not fitted anew."""
    code, _, err = run("train", "+exp=spire", *small, "draft_vocab=100", "window_tokens=32", "out=first")
    assert code == 0, err
    further = ["train", "+exp=spire", *small, "max_steps=2", "tau.context_tokens=[16]", "init=first"]
    code, _, err = run(*further, "window_tokens=32", "optimizer.lr=1e-12", "out=same")
    assert code == 0, err
    first, same = load_file("first/model.safetensors"), load_file("same/model.safetensors")
    sources = [json.loads(file.read_text()) for file in Path("runs").glob("*/source.json")]
    (begun,) = [source for source in sources if "init" in source]
    assert begun["init"][0] == "first"
    assert first.keys() == same.keys()
    assert all(torch.equal(first[name], same[name]) for name in first)
    earlier = json.loads(Path("first/spectrain.json").read_text())["trained"]
    before = json.loads(Path("same/spectrain.json").read_text())["trained"]["before"]
    assert (earlier["before"], before) == ([], [{"drafter": "first", "steps": 6, "tokens": earlier["tokens"]}])
    assert f"- before that, as `first`, {earlier['tokens']:,} tokens in 6 steps\n" in Path("same/README.md").read_text()
    refused = {
        "n_layer=1": "init=first has other options; give window_tokens=32 n_layer=2",
        "input=trained": "init=first has other options; give window_tokens=32 input=projected",
        "previous_state=false": "init=first has other options; give window_tokens=32 previous_state=true",
        "draft_vocab=200": "init=first has draft_vocab=100, not 200; draft_vocab=null keeps it, or give fewer",
        "draft_vocab=auto": "init=first has draft_vocab=100, not auto; draft_vocab=null keeps it, or give fewer",
        "init=nowhere": "init=nowhere does not exist; give an existing folder or a Hugging Face id",
    }
    for option, message in refused.items():
        code, _, err = run(*further, option, "out=refused")
        assert (code, message in err) == (2, True), err
    assert not Path("refused").exists()
    adapted = ["window_tokens=32", "draft_vocab=50", "+engine=vllm"]
    code, _, err = run(*further, *adapted, "out=fewer", "run_dir=fewer-run")
    assert code == 0, err
    made = json.loads(Path("fewer/config.json").read_text())
    assert (made["own_key"], made["sink_tokens"]) == (False, 0)
    code, _, err = run(*further[:-1], "init=fewer", "window_tokens=32", "out=refused")
    assert (code, "init=fewer has other options; give sink_tokens=0 own_key=false" in err) == (2, True), err
    assert load_file("fewer/model.safetensors")["kept"].tolist() == first["kept"][:50].tolist()
    Path("fewer-run/result.json").unlink()  # as if it had not finished
    code, _, err = typed("export", "run=fewer-run", "out=unfinished")
    assert code == 0, err
    assert json.loads(Path("unfinished/spectrain.json").read_text())["trained"]["before"] == before


def test_what_is_exported_and_measured_is_the_best_not_the_last(run, small, monkeypatch):
    expected, compute = iter([2.5, 2.25]), ValidationSums.compute  # at step 4, at the end
    monkeypatch.setattr(ValidationSums, "compute", lambda one: compute(one) | {"eval/tau_expected": next(expected)})
    code, _, err = run("train", "+exp=spire", *small, "run_dir=r", "out=made")
    assert code == 0, err
    result = json.loads(Path("r/result.json").read_text())
    assert result["steps"] == 6
    assert result["selected"] == {"step": 4, "expected": 2.5}
    curve = read_csv(Path("r/metrics/version_0/metrics.csv"))
    assert result["metrics"] == {name: value for name, value in curve[3].items() if name.startswith("eval/")}
    kept, made = (
        load_file(name) for name in ("r/checkpoints/best/step-00000004.safetensors", "made/model.safetensors")
    )
    assert all(torch.equal(made[name], kept[f"drafter.{name}"].to(made[name].dtype)) for name in made)


def test_a_run_killed_behind_its_export_ends_by_the_same_command(run, small, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    sizes = ["model.vocab_size=300", "model.hidden_size=32", "model.intermediate_size=48", "model.num_hidden_layers=2"]
    arguments = ["+exp=target", *small, *sizes, "run_dir=r", "out=made"]
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", die)
        code, _, err = run("train", *arguments)
    assert (code, err.splitlines()[-1]) == (130, "interrupted; run the same command again")
    assert AutoModelForCausalLM.from_pretrained("made").dtype == torch.bfloat16
    assert len(AutoTokenizer.from_pretrained("made")) == 300
    (before,) = Path("made").glob("*.safetensors")
    weights = before.read_bytes()
    code, _, err = run("train", *arguments)  # though out= exists
    assert code == 0, err
    assert before.read_bytes() == weights
    assert [attempt["done_steps"] for attempt in json.loads(Path("r/run.json").read_text())["attempts"]] == [0, 6]
    code, _, err = run("train", "+exp=spire", *small, "run_dir=other", "out=made")
    assert code == 2
    assert "out=made exists already" in err


def test_an_interrupted_run_goes_on_exactly_by_the_same_command(run, small, monkeypatch):
    """Before its first step, where the fitted input is kept, and in the middle."""

    class Interrupt(Callback):
        def on_train_start(self, trainer, module):
            if not is_fitted:
                raise SystemExit(9)

        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    arguments = ["+exp=spire", *small]
    assert run("train", *arguments, "run_dir=whole", "out=whole_out")[0] == 0
    callbacks = fitting.callbacks
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "callbacks", lambda *given: [*callbacks(*given), Interrupt()])
        is_fitted = False
        assert run("train", *arguments, "run_dir=cut", "out=cut_out")[0] == 9
        assert Path("cut/checkpoints/begun.pt").is_file()
        is_fitted = True
        patch.setattr(DrafterTraining, "begin", None)
        code, _, err = run("train", *arguments, "run_dir=cut", "out=cut_out")
    assert code == 130
    assert "interrupted at step 4" in err
    assert not Path("cut_out").exists()
    arguments.append("fresh=true")  # an unfinished run goes on all the same
    assert run("train", *arguments, "run_dir=cut", "out=cut_out")[0] == 0
    whole, cut = (load_file(f"{name}_out/model.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    numbers = [json.loads(Path(name, "result.json").read_text())["tau"] for name in ("whole", "cut")]
    assert numbers[0] == numbers[1]
    assert not Path("cut/checkpoints/begun.pt").exists()


def test_an_interrupted_run_goes_on_with_no_other_target(run, small, shared):
    arguments = ["+exp=spire", *small, "max_steps=2"]
    assert run("train", *arguments)[0] == 0
    (result,) = Path("runs").glob("*/result.json")
    result.unlink()
    source = json.loads((result.parent / "source.json").read_text())
    for name in ("target", "corpus"):
        (result.parent / "source.json").write_text(json.dumps({**source, name: "0" * 16}))
        code, _, err = run("train", *arguments)
        assert code == 2
        assert f"was started with {name} 0000000000000000" in err


@pytest.mark.slow
def test_two_ranks_train_and_one_exports(shared, small, tmp_path):
    """Two CPU ranks, started by Lightning itself: real processes."""
    command = [sys.executable, "-m", "spectrain.train", "+exp=spire", f"target={shared / 'target'}", *small]
    options = ["trainer.devices=2", "trainer.strategy=ddp", "max_steps=3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("exported to") == 1
    (result,) = tmp_path.glob("runs/*/result.json")
    assert json.loads(result.read_text())["tokens"] == 3 * 2 * 64  # a batch is shared out


def test_a_drafter_with_another_tokenizer_is_refused(run, shared):
    export_vanilla(Path("vanilla"), load_target(shared / "target"))
    shutil.copytree(shared / "target", "words")
    train_tokenizer(["other words entirely, " * 50], 300).save_pretrained("words")
    code, _, err = run("generate", "method=speculative", "drafter=vanilla", "prompt=x", target="words")
    assert code == 2
    assert "the draft model's tokenizer" in err
    assert "Traceback" not in err


def test_a_chat_model_is_given_its_template_unless_told_otherwise(run, shared):
    shutil.copytree(shared / "target", "chat")
    tokenizer = AutoTokenizer.from_pretrained("chat")
    tokenizer.chat_template = "{% for m in messages %}class {{ m['content'] }}:\n    def {% endfor %}"
    tokenizer.save_pretrained("chat")
    options = ["method=autoregressive", "prompt=Reader", "max_new_tokens=12"]
    found = {}
    for chat in ("auto", "true", "false"):
        code, out, err = run("generate", *options, f"chat={chat}", target="chat")
        found[chat] = out.rpartition("\n\n")[0]  # what follows has seconds
        assert code == 0, err
    assert found["auto"] == found["true"] != found["false"]
    assert found["auto"].startswith("Reader\n\n")
    assert run("generate", *options, target="chat")[1].startswith(found["auto"])
    assert not run("generate", *options)[1].startswith("Reader\n\n")  # a target without a template


def test_a_prompt_is_typed_or_read_from_a_file_or_from_a_pipe(run, monkeypatch):
    options = ("generate", "method=autoregressive", "max_new_tokens=12")
    typed = text_of(run(*options, "prompt=def é(path):")[1])
    Path("asked.txt").write_text("def é(path):\n", encoding="utf-8")
    assert text_of(run(*options, "prompt=@asked.txt")[1]) == typed
    for given in (["prompt=-"], []):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("def é(path):\n".encode())))
        assert text_of(run(*options, *given)[1]) == typed
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert run(*options)[::2] == (2, "error: prompt=- is no UTF-8 text; give one\n")
    assert "no.txt cannot be read" in run(*options, "prompt=@no.txt")[2]


def text_of(out: str) -> str:
    return out.partition(" tokens (")[0]  # behind it stands what a clock says


def test_stop_texts_end_what_is_printed(run):
    text = run(*GENERATE, "method=autoregressive")[1].split("\n\n")[0]
    stop = re.search(r"\w{2}", text[24:], re.ASCII)[0]
    code, out, err = run(*GENERATE, "method=pld", "method.max_nodes=4", f"stop=[{stop}]")
    assert (code, out.split("\n\n")[0]) == (0, text[: text.index(stop, 22)]), err
    assert "(stop)" in out
