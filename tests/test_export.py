"""`python -m spectrain.export`: a run as training exported it, lookup methods with their datastores.

DeepSpeed's checkpoints are exported in tests/training/test_strategies.py, where ranks have written some, heads in
tests/test_train_head.py.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from spectrain import load_method
from spectrain.cli import run as run_command
from spectrain.decoding import generate
from spectrain.methods.registry import open_export
from spectrain.target import load_target
from spectrain.training.checkpoints import BestFolder
from tests.conftest import SMALL_TRAINING

KINDS = {
    "spire": [],
    "vanilla": [],
    "target": [f"model.{size}" for size in ("vocab_size=300", "hidden_size=32", "num_hidden_layers=2")],
}
PROMPT = "def read_config_3(path):"
ALLOWED = (".safetensors", ".json", ".jinja", ".md", ".npz", ".py")  # what an export of a run may hold


@pytest.fixture(scope="module")
def trained(shared, tmp_path_factory) -> Path:
    """A folder with a finished run and its export of each kind, `<kind>` and `<kind>-exported`."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind, options in KINDS.items():
            data = (f"target={shared / 'target'}", f"corpus={shared / 'corpus'}", "select.every=0")
            arguments = [f"+exp={kind}", *data, *SMALL_TRAINING, f"run_dir={kind}", f"out={kind}-exported", *options]
            patch.setattr(sys, "argv", ["spectrain.train", *arguments])
            run_command("spectrain.train")
    return folder


def said(typed, *arguments: str) -> str:
    """What a command that was used wrongly says, in one line."""
    code, _, err = typed("export", *arguments)
    assert code == 2, err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_exported_as_training_exported_it(trained, kind, tmp_path, typed):
    out = tmp_path / f"{kind}-exported"
    code, _, err = typed("export", f"run={trained / kind}", f"out={out}")
    assert code == 0, err
    theirs = trained / f"{kind}-exported"
    names = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert names == {str(file.relative_to(theirs)) for file in theirs.rglob("*") if file.is_file()}
    assert all(name.endswith(ALLOWED) for name in names)
    assert {"README.md", "tokenizer.json", "config.json"} <= names
    assert ("decode/custom_generate/generate.py" in names) == (kind != "target")
    for name in names:
        assert (out / name).read_bytes() == (theirs / name).read_bytes(), name
    if kind != "target":
        manifest = json.loads((out / "spectrain.json").read_text())
        assert manifest["kind"] == kind
        assert manifest["trained"] == json.loads((trained / kind / "result.json").read_text())
    else:
        assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
        assert len(AutoTokenizer.from_pretrained(out)) == 300


def test_a_drafter_is_exported_in_the_dtype_that_is_asked_for(trained, tmp_path, typed):
    for dtype in ("float32", "bfloat16"):
        arguments = (f"run={trained / 'spire'}", f"out={tmp_path / dtype}", f"export_dtype={dtype}")
        assert typed("export", *arguments)[0] == 0
    whole, short = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    assert whole.keys() == short.keys()
    assert all(torch.equal(whole[name].bfloat16(), short[name]) for name in whole)
    assert not all(torch.equal(whole[name], short[name].float()) for name in whole)
    trained_bytes = (trained / "spire-exported/model.safetensors").read_bytes()
    assert (tmp_path / "bfloat16/model.safetensors").read_bytes() == trained_bytes  # the default
    line = said(typed, f"run={trained / 'vanilla'}", f"out={tmp_path / 'x'}", "export_dtype=float32")
    assert f"export_dtype=float32 is no option of {trained / 'vanilla'}; remove it" in line


def test_a_vanilla_export_is_an_assistant_of_transformers(trained, shared):
    target = AutoModelForCausalLM.from_pretrained(shared / "target")
    assistant = AutoModelForCausalLM.from_pretrained(trained / "vanilla-exported", trust_remote_code=True)
    assert "generate" not in vars(assistant)  # its own, not that of the folder's decode/
    tokenizer = AutoTokenizer.from_pretrained(trained / "vanilla-exported")
    assert assistant.config.vocab_size == target.config.vocab_size
    assert assistant.generation_config.eos_token_id == target.generation_config.eos_token_id
    assert assistant.generation_config.num_assistant_tokens == 5
    inputs = tokenizer(PROMPT, return_tensors="pt")
    drafted = []
    assistant.register_forward_hook(lambda *_: drafted.append(1))
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None}
    alone = target.generate(**inputs, **options)
    assert drafted == []
    assert torch.equal(target.generate(**inputs, assistant_model=assistant, **options), alone)
    assert len(drafted) > 10


@pytest.mark.parametrize("kind", ["spire", "vanilla"])
def test_the_card_says_what_a_reader_needs(trained, kind):
    card = (trained / f"{kind}-exported" / "README.md").read_text()
    manifest = json.loads((trained / f"{kind}-exported" / "spectrain.json").read_text())
    front, _, body = card.removeprefix("---\n").partition("\n---\n")
    meta = OmegaConf.create(front)
    assert meta.base_model == "target"
    assert meta.library_name == {"spire": "spectrain", "vanilla": "transformers"}[kind]
    assert {"speculative-decoding", kind} <= set(meta.tags)
    assert manifest["target_fingerprint"] in body
    assert "256 tokens in 2 optimizer steps" in body  # 2 steps of 2 rows of 64
    assert "5.0%" in body
    modes = {file.stat().st_mode for file in (trained / f"{kind}-exported").rglob("*") if file.is_file()}
    assert len(modes) == 1  # an engine that runs as another user reads the weights as it reads the card
    tau = manifest["trained"]["tau"][{"spire": "spire", "vanilla": "speculative"}[kind]]["16 tokens, greedy"]
    assert f"| {tau['value']:.2f} [{tau['low']:.2f}, {tau['high']:.2f}] |" in body
    assert f'method="{kind}-exported")' in body
    served = [
        '"method":"draft_model","model":"vanilla-exported","num_speculative_tokens":5}',
        "--speculative-algorithm STANDALONE",
        "convert_hf_to_gguf.py vanilla-exported --outfile drafter.gguf",
        "optimum-cli export openvino --model vanilla-exported",
    ]
    assert all((line in body) == (kind == "vanilla") for line in served)


def test_the_best_weights_are_exported_and_the_last_when_asked(trained, tmp_path, typed):
    run = tmp_path / "run"
    shutil.copytree(trained / "spire", run)
    (run / "result.json").unlink()  # as if it were still at work
    best = BestFolder(run / "checkpoints" / "best")
    weights = {name: t + 1 for name, t in best.weights().items()}
    shutil.rmtree(best.path)
    best.offer(1, weights, 2.5)
    for which in ("best", "last"):
        options = f"weights={which}", f"out={tmp_path / which}", "export_dtype=float32"
        code, _, err = typed("export", f"run={run}", *options)
        assert code == 0, err
    first, last = (load_file(tmp_path / which / "model.safetensors") for which in ("best", "last"))
    assert first["norm.weight"].allclose(last["norm.weight"] + 1)
    facts = {which: json.loads((tmp_path / which / "spectrain.json").read_text()) for which in ("best", "last")}
    assert [facts[which]["trained"]["steps"] for which in ("best", "last")] == [1, 2]
    card = (tmp_path / "best" / "README.md").read_text()
    assert "The run is not finished, so there is no table" in card
    assert "Validation expected a tau of 2.50 of them." in card
    assert "2.50" not in (tmp_path / "last" / "README.md").read_text()
    best.offer(1, weights)  # nothing expected: the end of an interrupted attempt, behind which the run went on
    (best.path / "best.json").write_text(json.dumps({"step": 1, "file": "step-00000001.safetensors"}))
    assert typed("export", f"run={run}", f"out={tmp_path / 'newest'}")[0] == 0
    newest = load_file(tmp_path / "newest" / "model.safetensors")
    assert all(newest[name].equal(last[name].bfloat16()) for name in last)


def test_without_out_the_name_is_the_runs(trained, tmp_path, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert typed("export", f"run={trained / 'spire'}")[0] == 0
    assert (tmp_path / "exported" / "spire" / "spectrain.json").is_file()
    assert "exported/spire exists already" in said(typed, f"run={trained / 'spire'}")


def test_what_cannot_be_exported_is_said_and_nothing_is_written(trained, tmp_path, typed):
    def refused(run: Path, out: Path = tmp_path / "out", *more: str) -> str:
        return said(typed, f"run={run}", f"out={out}", *more)

    run = tmp_path / "run"
    assert "does not exist" in refused(tmp_path / "nowhere")
    shutil.copytree(trained / "spire", run)
    assert "exists already" in refused(run, tmp_path)
    for inside in (run, run / "new", tmp_path / "x" / ".." / "run" / "deep" / "er"):
        assert "lies inside the run" in refused(run, inside)
    assert "weights=worst must be best or last" in refused(run, tmp_path / "out", "weights=worst")
    assert "give one of run=" in said(typed)
    assert "give one of run=" in refused(run, tmp_path / "out", "method=pld")

    begun = (run / "source.json").read_text()
    (run / "source.json").write_text(json.dumps({"target": "0" * 16}))
    assert "was started with target 0000000000000000" in refused(run)
    (run / "source.json").write_text(begun)

    shutil.rmtree(run / "checkpoints" / "best")
    (checkpoint,) = (run / "checkpoints").glob("*.ckpt")
    checkpoint.unlink()
    assert "has no checkpoint yet" in refused(run)
    assert not (tmp_path / "out").exists()
    assert not (run / "new").exists()


def lookup(shared, stored, *more: str, method: str = "rest") -> list[str]:
    return [f"method={method}", f"target={shared / 'target'}", f"datastore={stored}", *more]


def test_a_lookup_method_is_exported_with_its_datastore_and_drafts_as_before(shared, stored, tmp_path, typed):
    from spectrain.methods.rest import build

    out = tmp_path / "rest"
    code, _, err = typed("export", *lookup(shared, stored, f"out={out}", "method.min_suffix=1", "method.max_nodes=65"))
    assert code == 0, err
    target = load_target(shared / "target", device="cpu")
    prompt = target.tokenizer(PROMPT)["input_ids"]
    drafters = load_method(out, target), build(target, str(stored), min_suffix=1)
    ours, theirs = (generate(target, drafter, [prompt], 30, stop_token_ids=())[0] for drafter in drafters)
    assert ours.tokens == theirs.tokens
    assert ours.drafted == theirs.drafted
    assert sum(ours.drafted) > 0
    assert load_method(out, target, max_nodes=5).max_nodes == 5
    names = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert "decode/custom_generate/generate.py" in names
    kept = (*ALLOWED, ".npy", "corpus.jsonl")
    assert all(name.endswith(kept) for name in names)
    card = (out / "README.md").read_text()
    assert (
        f'SPECTRAIN_LOOKUP=rest vllm serve {shared / "target"} --speculative-config \'{{"method":"custom_class"' in card
    )
    assert "--speculative-ngram-external-corpus-path rest/corpus.jsonl" in card


def test_a_method_without_a_datastore_is_a_few_files(shared, tmp_path, typed):
    out = tmp_path / "pld"
    assert typed("export", "method=pld", f"target={shared / 'target'}", f"out={out}")[0] == 0
    assert not (out / "datastore").exists()
    assert "algorithm NGRAM" not in (out / "README.md").read_text()
    load_method(out, load_target(shared / "target", device="cpu"))
    assert open_export(out, None).max_nodes == 11  # an engine has no forwards that could be timed


def test_a_lookup_method_that_no_engine_can_use_is_said(shared, stored, tmp_path, typed):
    def refused(*arguments: str) -> str:
        line = said(typed, *arguments, f"out={tmp_path / 'out'}")
        assert not (tmp_path / "out").exists()
        return line

    for method in ("logitspec", "spectra", "lookahead", "spire", "magicdec"):
        assert "export one of anpd, pld, rest, spectra_retrieval, sssd" in refused(
            *lookup(shared, stored, method=method)
        )
    assert "with last_logits=true needs" in refused(*lookup(shared, stored, "method.last_logits=true", method="sssd"))
    assert "max_nodes=1 must be" in refused(*lookup(shared, stored, "method.max_nodes=1"))
    assert "is nothing that this method takes" in refused(*lookup(shared, stored, method="pld"))
    assert "is of the tokenizer of" in refused(f"datastore={stored}", "method=rest")  # the bundled target's
    assert "does not exist" in refused(*lookup(shared, tmp_path / "nowhere"))


def test_a_spire_export_holds_what_vllm_reads_and_is_written_anew_from_an_old_one(trained, shared, tmp_path, typed):
    exported, old, out = trained / "spire-exported", tmp_path / "old", tmp_path / "new"
    assert (exported / "vllm/model.safetensors").samefile(exported / "model.safetensors")
    command = """'{"method":"eagle3","model":"spire-exported/vllm","num_speculative_tokens":"""
    assert command in (exported / "README.md").read_text()
    shutil.copytree(exported, old)  # as spectrain exported before: neither the folder, nor the field, nor the command
    shutil.rmtree(old / "vllm")
    for name in ("config.json", "README.md"):
        text = (old / name).read_text()
        (old / name).write_text(re.sub(r'  "own_key": true,\n|In vLLM 0.32.*?```bash.*?```', "", text, flags=re.DOTALL))
    (old / "README.md").open("a").write("No other engine runs this kind of drafter.\n")
    load_method(str(old), load_target(shared / "target"))  # our loop still opens it
    options = f"drafter={old}", f"target={shared / 'target'}", f"out={out}"
    assert typed("export", *options, "attention=exact")[0] == 0
    again, now = (json.loads((folder / "vllm/config.json").read_text()) for folder in (out, exported))
    assert again == now | {"attention": "exact"}
    assert load_file(out / "vllm/target.safetensors").keys() == {"target.norm", "target.embedding"}
    assert (out / "config.json").read_bytes() == (exported / "config.json").read_bytes()
    assert '"method":"eagle3","model":"new/vllm"' in (out / "README.md").read_text()
    assert not (old / "vllm").exists()
    assert typed("export", f"drafter={out}", options[1], f"out={tmp_path / 'newer'}")[0] == 0
    assert '"model":"newer/vllm"' in (tmp_path / "newer/README.md").read_text()
    assert len({file.stat().st_mode for file in out.rglob("*") if file.is_file()}) == 1  # all can be read by others


def test_a_drafter_that_vllm_cannot_run_is_exported_without_its_folder_and_the_card_says_why(
    trained, shared, tmp_path, typed, caplog
):
    old, out = tmp_path / "old", tmp_path / "new"
    shutil.copytree(trained / "spire-exported", old)
    config = json.loads((old / "config.json").read_text())
    config |= {"target_activations": False, "feedback": False, "previous_state": False}
    (old / "config.json").write_text(json.dumps(config))
    weights = load_file(old / "model.safetensors")
    kept = {name: one for name, one in weights.items() if not name.startswith(("feedback", "previous"))}
    save_file(kept, old / "model.safetensors")
    (old / "README.md").write_text("No other engine runs this kind of drafter.\n")
    options = f"drafter={old}", f"target={shared / 'target'}"
    assert typed("export", *options, f"out={out}")[0] == 0
    assert not (out / "vllm").exists()
    why = "it was trained with target_activations=false, and vLLM gives a drafter the target's states alone"
    assert (out / "README.md").read_text() == f"No other engine runs this drafter: {why}.\n"
    line = said(typed, *options, f"out={tmp_path / 'x'}", "attention=exact")
    assert line == f"error: attention=exact is for vLLM, which cannot run this drafter: {why}; remove it"
