"""What a user gets wrong is one sentence that names it and says what to do, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from spectrain import cli
from spectrain.target import TargetModel, load_target
from tests.conftest import SMALL_TRAINING, tiny_model
from tests.models.test_artifacts import export_spire

SPECTRAIN = ("train", "generate", "chat", "serve", "bench", "export", "recommend", "report", "speedup")
PLD = "method=pld prompt=def"
SPIRE = f"+exp=spire corpus={{corpus}} {' '.join(SMALL_TRAINING)}"
# A command with options, and words that its sentence has. {target}, {corpus}, {stored} and {other} are filled in.
MISSPELT = [
    (f"generate {PLD} max_new_tokns=3", "max_new_tokns max_new_tokens"),
    ("chat method=pld sytem=short", "sytem system"),
    ("generate method=speculative prompt=def method.gama=3", "method.gama method.gamma"),
    (f"train {SPIRE} optimzer.lr=1e-3", "optimizer.lr"),
    ("bench methods=[pld] prompts=prompts.jsonl sed=3", "sed seed"),
    ("responses prompts=prompts.jsonl limt=3", "limt limit"),
    ("datastore corpus={corpus} kep=0.5", "kep keep"),
    ("train +exp=spir", "did you mean spire?"),
    ("generate method=spier prompt=x", "did you mean spire?"),
    ("bench methods=[lookahed] prompts=prompts.jsonl", "did you mean lookahead?"),
    (f"generate {PLD} target.dtype=float23", "did you mean float32?"),
    ("train --exp spir", "did you mean spire?"),
    (f"train {SPIRE} trainer=tpu", "tpu gpu"),
    ("bench -m seed=1,2 xyzzy_plugh=3", "xyzzy_plugh --help"),
    ("serve prt=8000", "prt port"),
    ("bench seed", "'seed' name=value"),
    ("bench out=b\udcff", "out= UTF-8"),
    ("bench ~seed", "~seed would remove an option"),
    ("train kind=spire", "+exp=spire"),
    (f"train {SPIRE} own=3", "unknown own"),
    (f"train {SPIRE} +own=3", "unknown own"),
    ("recommend method=pdl", "methods=pdl did you mean pld?"),
    ("generate methods=[pld,sssd] prompt=x", "generate decodes with one method"),
    ("chat method=pld,sssd", "method=pld,sssd has several values -m"),
    ("speedup prompts=prompts.jsonl train=spir", "train=spir did you mean spire?"),
]
WRONG_TYPE = [
    (f"generate {PLD} max_new_tokens=foo", "max_new_tokens foo"),
    (f"generate {PLD} baseline=perhaps", "baseline perhaps"),
    (f"train {SPIRE} max_steps=1.5", "max_steps 1.5"),
    (f"train {SPIRE} optimizer.lr=foo", "optimizer.lr foo"),
    ("bench methods=[pld] prompts=prompts.jsonl batch_size=[]", "batch_size"),
    ("responses prompts=prompts.jsonl max_new_tokens=foo", "max_new_tokens foo"),
    ("datastore corpus={corpus} keep=foo", "keep foo"),
]
OUT_OF_RANGE = [
    (f"generate {PLD} max_new_tokens=-1", "max_new_tokens -1"),
    (f"generate {PLD} sampling.temperature=-1", "temperature -1"),
    (f"generate {PLD} sampling.top_p=2", "top_p 2"),
    (f"generate {PLD} method.draft_tokens=0", "draft_tokens 0"),
    (f"train {SPIRE} data.batch_size=0", "batch_size 0"),
    (f"train {SPIRE} optimizer.lr=nan", "lr nan"),
    (f"train {SPIRE} data.row_tokens=512", "row_tokens 512 context"),
    (f"train {SPIRE} data.batch_size=5000", "batch 5000"),
    (f"train {SPIRE} tau.context_tokens=[100]", "context_tokens row_tokens"),
    (f"train {SPIRE} tau.new_tokens=250", "new_tokens 250 context"),
    (f"train {SPIRE} n_layer=9", "n_layer=9"),
    (f"train {SPIRE} draft_vocab=99999", "draft_vocab=99999"),
    (f"train {SPIRE} draft_vocab=9 input=tied", "draft_vocab input"),
    (f"generate method=autoregressive prompt={'x=1;' * 400}", "prompt max_new_tokens"),
    (f"train {SPIRE} k=9 window_tokens=4", "k=9 window_tokens=4"),
    ("bench methods=[pld] prompts=prompts.jsonl limit=0", "limit 0"),
    ("serve port=99999", "port 99999"),
    ("datastore corpus={corpus} keep=-1", "keep -1"),
    ("export run=no/where weights=worst", "worst best last"),
]
UNKNOWN_METHOD = [
    ("generate method=magic prompt=def", "magic pld"),
    ("chat method=magic", "magic pld"),
    ("bench methods=[magic] prompts=prompts.jsonl", "magic"),
    ("recommend methods=[magic] prompts=prompts.jsonl", "magic"),
    ("generate method=no/where prompt=def", "no/where"),
    ("export method=magic", "magic"),
    ("serve port=0 methods=[magic]", "magic pld"),
]
MISSING_TARGET = [
    (f"generate {PLD} target=no/where", "no/where"),
    ("bench methods=[pld] prompts=prompts.jsonl target=a_file", "a_file"),
    (f"train {SPIRE} target=no/where", "no/where"),
    ("responses prompts=prompts.jsonl target=no/where", "no/where"),
]
SHARED_TARGET = [
    (f"generate {PLD} target.tp=2", "target.tp=2 target.parallel=tp"),
    (f"generate {PLD} target.parallel=tp", "torchrun"),
]
OTHER_TARGET = [
    ("generate method=spire drafter={other} prompt=def", "{other} target"),
    ("bench methods=[spire] drafter={other} prompts=prompts.jsonl", "{other} target"),
    (f"train {SPIRE} init={{other}}", "{other} target"),
    ("generate method={other} prompt=def", "{other} target"),
]
MISSING_FILE = [
    ("generate method=spire prompt=def", "spire drafter=<folder>"),
    ("generate method=spire drafter=no/where prompt=def", "no/where does not exist"),
    ("generate method=pld drafter={other} prompt=def", "{other}"),
    ("bench methods=[pld] prompts=no.jsonl", "no.jsonl"),
    ("generate method=rest datastore=no/where prompt=def", "no/where"),
    (f"train {SPIRE} corpus=no/where", "no/where"),
    ("acceptance responses=no/where", "no/where"),
    ("export run=no/where", "no/where"),
    ("target gguf=no.gguf", "no.gguf"),
    ("target", "gguf package"),
    (f"train {SPIRE} vanilla=no/where", "no/where"),
    (f"train {SPIRE} out=a_file/below", "a_file"),
    ("serve port=0 methods=[pld] log_responses=a_file", "a_file"),
    ("generate method=autoregressive prompt=def chat=true", "chat template"),
    ("report runs=no/where", "no/where"),
]
HALF_WRITTEN = [
    ("generate method=rest datastore=cut_manifest prompt=def", "cut_manifest"),
    ("generate method=rest datastore=no_tokens prompt=def", "no_tokens"),
    ("generate method=rest datastore=short_tokens prompt=def", "short_tokens"),
    ("generate method=spire drafter=cut_weights prompt=def", "cut_weights"),
    ("export run=a_folder", "a_folder"),
]
EMPTY = [
    ("generate method=pld prompt=", "prompt"),
    ("generate method=pld", "prompt"),
    ("bench methods=[pld] prompts=empty.jsonl", "empty.jsonl"),
    ("responses prompts=empty.jsonl", "empty.jsonl"),
    ("bench methods=[pld] prompts=a_file", "a_file"),
    ("train", "+exp=spire"),
]
CASES = [
    *(MISSPELT + WRONG_TYPE + OUT_OF_RANGE + UNKNOWN_METHOD + MISSING_TARGET),
    *(SHARED_TARGET + OTHER_TARGET + MISSING_FILE + HALF_WRITTEN + EMPTY),
]


@pytest.fixture(scope="module")
def inputs(shared, stored, tmp_path_factory) -> Path:
    """Files that are wrong in some way."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "prompts.jsonl").write_text('{"prompt": "def read_config(path):"}\n')
    (folder / "empty.jsonl").touch()
    (folder / "a_file").write_text("neither a model nor prompts\n")
    (folder / "a_folder").mkdir()
    for name in ("cut_manifest", "no_tokens", "short_tokens"):
        shutil.copytree(stored, folder / name)
    cut(folder / "cut_manifest" / "manifest.json")
    (folder / "no_tokens" / "tokens-00000.npy").unlink()
    cut(folder / "short_tokens" / "tokens-00000.npy")
    cut(export_spire(folder / "cut_weights", load_target(shared / "target")) / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory, shared) -> Path:
    """A drafter of another target with the same tokenizer."""
    model = tiny_model("llama", seed=1, vocab_size=300, eos_token_id=0, num_hidden_layers=4)
    target = TargetModel(model, load_target(shared / "target").tokenizer)
    return export_spire(tmp_path_factory.mktemp("other") / "spire", target)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(("typed", "words"), CASES, ids=[typed[:10] + typed[-50:] for typed, _ in CASES])
def test_bad_input_is_one_sentence(typed, words, shared, stored, inputs, other, tmp_path, monkeypatch, capfd):
    shutil.copytree(inputs, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(os.listdir())
    filled = {"corpus": shared / "corpus", "stored": stored, "other": other}
    name, *options = typed.format(**filled).split()
    takes_target = name not in ("report", "target") and "run=" not in typed and "target=" not in typed
    if takes_target:
        options.insert(0, f"target={shared / 'target'}")
    module = f"spectrain.{name}" if name in SPECTRAIN else f"data_prep.{name}"
    monkeypatch.setattr(sys, "argv", [module, *options])
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit) as ended:
        cli.run(module)
    out, err = capfd.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (ended.value.code, out, len(errors)) == (2, "", 1), out + err
    assert "Traceback" not in err
    assert [word for word in words.format(**filled).split() if word not in errors[0]] == [], errors[0]
    assert sorted(os.listdir()) == before
