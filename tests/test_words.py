"""What users of other tools type: their words, flags and lists become our options, or are met with the right one."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from spectrain.cli import composed, option_names
from spectrain.config import COMMANDS, conf_dir, help, options_of, paths_of, plain
from spectrain.config.overrides import ALIASES, did_you_mean, in_our_words
from spectrain.errors import UserError, nearest
from spectrain.stores.named import check_names
from spectrain.training.runs import hashed

# Commands with what is typed to them, and the options that are meant.
GUESSES = {
    "train": {
        "learning_rate": "optimizer.lr",
        "lr": "optimizer.lr",
        "weight_decay": "optimizer.weight_decay",
        "warmup_steps": "optimizer.warmup_steps",
        "warmup_ratio": "optimizer.warmup_share",
        "lr_scheduler_type": "optimizer.schedule",
        "optim": "optimizer.name",
        "batch_size": "data.batch_size",
        "per_device_train_batch_size": "data.batch_size",
        "micro_batch_size": "data.batch_size",
        "num_train_epochs": "epochs",
        "dataset": "corpus",
        "train-file": "corpus",
        "model_name_or_path": "target",
        "base_model": "target",
        "verifier_name_or_path": "target",
        "modle": "target",
        "max_length": "data.row_tokens",
        "sequence_len": "data.row_tokens",
        "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
        "gradient_checkpointing": "trainer.activation_checkpointing",
        "max_grad_norm": "trainer.gradient_clip_val",
        "logging_steps": "trainer.log_every_n_steps",
        "eval_steps": "trainer.val_check_interval",
        "save_steps": "checkpoint_s",
        "report_to": "logger",
        "output_dir": "out",
        "resume_from_checkpoint": "run_dir",
        "bf16": "trainer.precision",
        "num_gpus": "trainer.devices",
        "ttt_length": "k",
        "draft_vocab_size": "draft_vocab",
        "num_layers": "n_layer",
        "windw": "window_tokens",
    },
    "serve": {
        "model": "target",
        "max_model_len": "max_length",
        "tensor_parallel_size": "target.tp",
        "gpu_memory_utilization": "memory",
        "max_num_seqs": "batch_size",
        "served_model_name": "name",
        "speculative_model": "drafter",
        "dtype": "target.dtype",
        "max_tokens": "max_new_tokens",
        "prt": "port",
    },
    "generate": {
        "num_speculative_tokens": "method.gamma",
        "temperature": "sampling.temperature",
        "assistant_model": "drafter",
        "device": "target.device",
        "promt": "prompt",
    },
    "bench": {"num_prompts": "limit", "dataset_path": "prompts", "dataset": "prompts", "draft": "drafter"},
    "chat": {"max_length": "max_new_tokens", "system_prompt": "system"},
}
EXPERIMENT = {"train": ["+exp=spire"], "generate": ["method=speculative", "prompt=x"]}
ALL = [(command, *pair) for command, guesses in GUESSES.items() for pair in guesses.items()]


@pytest.fixture(scope="module")
def names() -> dict[str, list[str]]:
    return {command: option_names(command, EXPERIMENT.get(command, [])) for command in GUESSES}


@pytest.mark.parametrize(("command", "word", "option"), ALL, ids=[" ".join(one[:2]) for one in ALL])
def test_a_guess_is_taken_or_answered_with_the_option_that_was_meant(command, word, option, names):
    (argument,) = in_our_words([f"--{word}", "7"], command)
    name = argument.partition("=")[0]
    assert option == name or did_you_mean(name, names[command]) == f"; did you mean {option}?"
    assert len(ALL) >= 50


def test_each_word_is_for_an_option_that_exists():
    known = {name for command in COMMANDS for name in option_names(command, EXPERIMENT.get(command, []))}
    known |= set(option_names("train", ["+exp=eagle3"]))
    assert {
        *OmegaConf.load(conf_dir() / "words.yaml"),
        *(one for options in ALIASES.values() for one in options),
    } <= known
    assert nearest("xyzzy", known) == ""


def options(command: str, *arguments: str):
    return options_of(command, composed(command, *arguments))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--exp spire --lr 1e-3 --batch-size=8", "+exp=spire optimizer.lr=1e-3 data.batch_size=8"),
        ("exp=eagle3 num_epochs=2 dataset=x max_length=64", "+exp=eagle3 epochs=2 corpus=x data.row_tokens=64"),
        ("+exp=spire tau.context_tokens=16 --fresh", "+exp=spire tau.context_tokens=[16] fresh=true"),
        ("+exp=spire optimizer.betas=0.9,0.99", "+exp=spire optimizer.betas=[0.9,0.99]"),
    ],
)
def test_a_run_is_named_by_the_options_that_words_stand_for(typed, meant):
    assert hashed(plain(options("train", *typed.split()))) == hashed(plain(options("train", *meant.split())))


def test_runs_of_before_are_named_as_before():
    config = plain(options("train", "+exp=spire"))
    assert "epochs" in config
    assert "epochs" not in hashed(config)
    assert hashed(config | {"epochs": 2.0})["epochs"] == 2.0


def test_either_form_of_method_and_lists_without_brackets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for typed in ("methods=pld,sssd", "methods=[pld,sssd]", "method=pld,sssd"):
        assert options("bench", typed).methods == ["pld", "sssd"]
        assert options("serve", typed).methods == ["pld", "sssd"]
    assert options("recommend", "method=pld").methods == "pld"
    assert options("bench", "method=pld").methods == "all"  # with its options
    assert options("bench", "batch_size=1,16").batch_size == [1, 16]
    for typed in ("methods=pld", "methods=[pld]"):
        assert "PromptLookup" in options("generate", "prompt=x", typed).method["_target_"]
    with pytest.raises(UserError, match="generate decodes with one method, not "):
        in_our_words(["methods=[pld,sssd]"], "generate")
    assert options("generate", "prompt=x", "stop=END,a b").stop == ["END", "a b"]
    assert options("generate", "--prompt", "a=b").prompt == "a=b"
    assert in_our_words(["-m", "methods=pld,sssd", "--cfg", "job"], "bench") == [
        "-m",
        "methods=pld,sssd",
        "--cfg",
        "job",
    ]
    assert options("serve", "drafter=a,b").drafter == "a,b"
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert options("serve", "drafter=a,b").drafter == ["a", "b"]


def test_commands_that_decode_leave_the_target_open_and_others_take_the_bundled_one():
    taken = {name: options(name, *NEEDED.get(name, ())) for name in COMMANDS}
    open_ = {name for name, one in taken.items() if getattr(getattr(one, "target", None), "path", "") is None}
    assert open_ == {
        "chat",
        "generate",
        "serve",
        "bench",
        "recommend",
        "speedup",
        "export",
    }  # of which export reads one's config
    assert taken["train"].target.path == taken["datastore"].target.path == "pystdlib-8l"
    assert options("chat", "target=bundled").target.path == "pystdlib-8l"


NEEDED = {"train": ["+exp=spire"], "check": ["drafter=x"], "speedup": ["prompts=x"]}


@pytest.mark.parametrize(
    ("command", "argument"),
    [
        ("generate", "target=/no/where"),
        ("generate", "drafter=./no where"),
        ("serve", "methods=lookahed"),
        ("bench", "prompts=no.jsonl"),
        ("train", "corpus=../no/where"),
        ("train", "vanilla=no/where"),
        ("chat", "datastore=no/where"),
    ],
)
def test_what_is_nowhere_is_refused_before_torch_is_imported(command, argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = options(command, *NEEDED.get(command, ()), argument)
    with pytest.raises(UserError, match="does not exist|is unknown; did you mean lookahead"):
        check_names(paths_of(command), given)
    check_names(paths_of(command), options(command, *NEEDED.get(command, ())))


def test_help_names_each_option_once_and_explains_brackets(capsys):
    help.show_options("train", in_our_words(["--exp", "spire"], "train"))
    said = capsys.readouterr().out
    assert said.count("\n  max_steps=") == 1
    assert "[in brackets]" in said
    help.show_options("chat", [])
    said = capsys.readouterr().out
    assert "Target(" not in said
    assert "The values below. (default)" in said
