"""The options of trainings: those that all share, and those of each experiment (`+exp=...`).

Values in brackets are the paper's, or those of seqax, the code that SPIRe's authors trained with (docs/papers.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from spectrain.config.fields import always, group, option
from spectrain.config.groups import SEED, Corpus, Hardware, Target


@dataclass
class Data:
    """Where the rows of a training come from."""

    source: str = MISSING
    row_tokens: int | None = option(None, "L, of a row; null: 1024, or fewer where the text is little", least=2)
    batch_size: int | None = option(
        None, "rows per step, over all ranks together; null: 4, or one for each rank", least=1
    )
    val_rows: int = option(32, "held-out rows per validation", least=1)
    loss_on: str = option(
        "response",
        "what is learned: the tokens of responses and assistant turns, where the text has any. Not +exp=specdecpp",
        one_of=("response", "all"),
    )


@dataclass
class Online(Data):
    """The frozen models run inside the training step, on rows of the corpus."""

    _target_: str = "spectrain.training.sources.Online"
    source: str = "online"
    document_mask: bool = option(False, "true: documents that are packed into a row do not see each other")


@dataclass
class Offline(Data):
    """The outputs of the frozen models were stored beforehand, by data_prep.activations or data_prep.acceptance."""

    _target_: str = "spectrain.training.sources.Offline"
    source: str = "offline"
    path: str | None = option(None, "folder of the store; null: the newest one that fits", path=True)
    verify: bool = option(True, "+exp=spire: read all shards first and compare their sha256; false: their sizes")


@dataclass
class Served(Online):
    """Another process owns the target and computes its hidden states (data_prep.activations serve=true)."""

    _target_: str = "spectrain.training.sources.Served"
    source: str = "served"
    address: str = option("127.0.0.1:7463", "host:port, with the key of SPECTRAIN_KEY; http://host:port: a vLLM")
    timeout_s: float = option(300.0, "without an answer of the server, until the training gives up", above=0)


@dataclass
class Optimizer:
    name: str = option("adamw", "muon: matrices by Muon, the rest by AdamW", one_of=("adamw", "muon"))
    lr: float | None = option(None, "highest learning rate; null: lr_times_width / width of what is trained", above=0)
    lr_times_width: float = option(1.28, "by which the learning rate falls with the width [seqax: 1.536]", above=0)
    weight_decay: float = option(0.1, "[seqax: 0.1]", least=0)
    betas: list[float] = option([0.9, 0.95], "[seqax: 0.9, 0.95]", least=0, below=1)
    warmup_steps: int = option(30, "in which the learning rate rises", least=0)
    warmup_share: float | None = option(None, "of all steps, in place of warmup_steps [seqax: 0.1]", least=0, below=1)
    schedule: str = option("linear", "how the learning rate falls [seqax: cosine]", one_of=("linear", "cosine"))
    final_share: float = option(0.0, "of the highest learning rate, at the last step [seqax: 0.1]", least=0, most=1)


@dataclass
class Trainer:
    """Arguments of lightning.Trainer, of which these are checked here."""

    _target_: str = "lightning.Trainer"
    devices: Any = "auto"
    strategy: Any = "auto"
    precision: Any = "auto"
    more: dict[str, Any] = group(dict)  # the others
    accelerator: str = option("auto", "auto | cpu | gpu")
    num_nodes: int = option(1, "machines", least=1)
    gradient_clip_val: float | None = option(1.0, "largest norm of the gradient [seqax: 1]", above=0)
    accumulate_grad_batches: int | None = option(
        None,
        "batches per optimizer step; null: 1, or on a GPU as few as fit its memory; data.batch_size is divided by it",
        least=1,
    )
    activation_checkpointing: bool | None = option(
        None, "true: blocks run again in the backward pass; null: where not even one row fits a GPU without"
    )
    compile: str = option(
        "auto", "auto: on a GPU blocks and loss are compiled before the first step", one_of=("auto", "none")
    )
    log_every_n_steps: int = option(10, "steps per row of the curve", least=1)
    val_check_interval: int = option(250, "batches per validation", least=1)


@dataclass
class Select:
    """The exported weights are those with the highest expected tau on held-out rows."""

    every: int = option(1, "validations per comparison; 0: the last weights are exported", least=0)


@dataclass
class Tau:
    """What is measured after training, with the real loop, on held-out rows."""

    context_tokens: list[int] | None = option(
        None, "lengths of the contexts; null: a quarter and half of data.row_tokens", least=1
    )
    contexts: int = option(64, "per length", least=1)
    new_tokens: int = option(64, "generated after each context, the paper's G", least=1)
    temperatures: list[float] = option([0.0, 1.0], "0: greedy", least=0)
    batch_size: int = option(8, "contexts decoded together", least=1)
    timed_contexts: int = option(8, "decoded one at a time, to measure tokens/s", least=1)


@dataclass
class Workload:
    """The batches and contexts that a drafter will decode; plan=true and n_layer=auto predict its speedup for them."""

    batch: list[int] = option([1, 8], "rows decoded together", least=1)
    context_tokens: list[int] = option([1024, 8192], "lengths of the context", least=1)


@dataclass
class Train:
    """Train a drafter (+exp=spire, +exp=vanilla), an acceptance head (+exp=specdecpp), or a target (+exp=target)."""

    kind: str = ""  # +exp= sets it
    experiment: dict[str, Any] = group(dict)
    target: Target = group(Target)
    corpus: Corpus = group(Corpus)
    data: Any = None
    trainer: Trainer = group(Trainer)
    logger: dict[str, Any] = group(dict)
    sampling: dict[str, Any] | None = option(
        None, "of +exp=specdecpp: how labels are warped; null: as the responses were drawn"
    )
    seed: int = SEED
    run_dir: str | None = option(None, "null: runs/<kind>-<hash of the options>. The same command resumes", path=True)
    fresh: bool = option(False, "true: delete an earlier run in this folder and start again")
    out: str | None = option(None, "export folder; null: checkpoints/<name of the run>", path=True)
    max_steps: int | None = option(None, "optimizer steps", least=1)
    hours: float | None = option(
        None, "of training steps, if max_steps=null; validation and the measurement of tau come on top", above=0
    )
    plan: bool = option(False, "true: print what the training will take (docs/plan.md), and do not start it")
    hardware: Hardware | None = None
    workload: Workload = group(Workload)
    checkpoint_s: float = option(120.0, "seconds between two checkpoints: what a kill loses at the most", least=0)
    select: Select = group(Select)
    vanilla: str | None = option(None, "folder of a vanilla drafter that is measured for comparison", path=True)
    tau: Tau = group(Tau)
    own: Any = group(dict)  # the experiment's options, an object of a class below; those of all trainings stand above


@dataclass
class Spire:
    """A SPIRe drafter."""

    kind: str = "spire"
    experiment: dict[str, Any] = always({"_target_": "spectrain.training.spire.SpireExperiment"})
    max_steps: int | None = option(None, "optimizer steps; null: as tokens_per_parameter says", least=1)
    tokens_per_parameter: float = option(
        0.9,
        "tokens per trained parameter, but at most ten passes over the text; of the bundled target 8 minutes",
        above=0,
    )
    n_layer: int | str = option(
        2,
        "the target's last blocks that the drafter starts from [quarter: of all]; auto: of 1, 2, 3, 4 and a quarter "
        "what decodes `workload` the fastest, by the throughput model",
        least=1,
        one_of=("auto", "quarter"),
    )
    k: int = option(4, "drafted tokens per rollout [4]", least=1)
    window_tokens: int = option(64, "positions that are seen: t-63 to t [64]", least=1)
    sink_tokens: int = option(1, "first positions of the text, always seen [1]", least=0)
    own_key: bool = option(
        True, "a token sees its own key, too [true]; false: the memories before it alone, as in engines (+engine=vllm)"
    )
    init: str = option("pruned", "pruned, random, or a SPIRe drafter that is trained further [pruned]", path=True)
    input: str = option(
        "projected",
        "projected: W e(token) of the target's embedding e; trained: a table; tied: as in the paper",
        one_of=("projected", "tied", "trained"),
    )
    unembedding: str = option(
        "target", "the target's as it is, or a trained copy; input=tied trains it", one_of=("target", "trained")
    )
    previous_state: bool | None = option(
        None,
        "the input also holds W2 h of the state h one token earlier [false]; null: true, but not with input=tied or "
        "target_activations=false",
    )
    draft_vocab: int | str | None = option(
        None,
        "tokens that it can draft, the most frequent of the training text; auto: those of 99.5 % of it; null: all",
        least=1,
        one_of=("auto",),
    )
    feedback: bool | str = option(
        True, "memories of drafted tokens mix all layers [true]; shared: alike for all blocks", one_of=("shared",)
    )
    memories: str = option("blocks", "the target's states of context [blocks]", one_of=("blocks", "final", "embedding"))
    target_activations: bool = option(
        True, "memories of context tokens are the target's activations [true]; false needs feedback=false"
    )
    loss: str = option("mixed", "distill: omega = 1; hard: the text's tokens", one_of=("mixed", "distill", "hard"))
    shifted_blocks: bool = option(True, "true: from the second epoch on blocks of k begin elsewhere in each [false]")
    omega: float = option(0.5, "share of the cross-entropy in the mixed loss [0.5]", least=0, most=1)
    export_dtype: str = option("bfloat16", "of the exported weights", one_of=("bfloat16", "float32"))
    optimizer: Optimizer = always(Optimizer())


@dataclass
class Vanilla:
    """An ordinary Llama with half the layers and half the width, trained by cross-entropy on the data."""

    kind: str = "vanilla"
    experiment: dict[str, Any] = always({"_target_": "spectrain.training.vanilla.VanillaExperiment"})
    max_steps: int | None = option(None, "optimizer steps; null: as tokens_per_parameter says", least=1)
    tokens_per_parameter: float = option(
        1.2, "tokens per trained parameter, but at most ten passes over the text", above=0
    )
    n_layer: int | None = option(None, "null: half the target's", least=1)
    hidden_size: int | None = option(None, "null: half the target's; the number of heads stays the same", least=1)
    optimizer: Optimizer = always(Optimizer(name="muon"))  # DeepSpeed needs adamw: lr_times_width=0.64 is best


@dataclass
class Head:
    """An acceptance head of a drafter (SpecDec++), from responses of the target."""

    kind: str = "specdecpp"
    experiment: dict[str, Any] = always({"_target_": "spectrain.training.head.HeadExperiment"})
    max_steps: int | None = option(None, "optimizer steps; null: `epochs` passes over the rows", least=1)
    epochs: int = option(3, "passes over the rows [3]", least=1)
    drafter: Any = option(None, "folder of a drafter; null: the newest vanilla one that fits", several=True, path=True)
    responses: str | None = option(None, "folder of data_prep.responses; null: the newest of this target", path=True)
    held_out_share: float = option(0.05, "of the rows, for validation", above=0, below=1)
    rollout_tokens: int = option(10, "of a SPIRe drafter: positions per rollout, with its root", least=2)
    n_blocks: int = option(3, "D, residual blocks of the head [0 .. 4]", least=0, most=4)
    w_rej: float = option(6.0, "weight of rejections in the loss [1, 3, 6, 12]", above=0)
    w_acc: float = option(1.0, "weight of acceptances in the loss [1]", above=0)
    mixing_share: float = option(0.15, "r, the target's own tokens among those that it sees [0.15]", least=0, below=1)
    data: dict[str, Any] = always({"batch_size": 32, "val_rows": 256})
    trainer: dict[str, Any] = always({"precision": "32-true"})  # the frozen models keep their own dtype
    # [lr 5e-5, for states of width 4096]
    optimizer: Optimizer = always(
        Optimizer("adamw", None, 0.256, 0.01, [0.9, 0.999], warmup_steps=0, warmup_share=0.03, schedule="cosine")
    )


@dataclass
class Scratch:
    """A small Llama on the corpus, with a tokenizer of its own; the bundled target was made like this."""

    kind: str = "target"
    experiment: dict[str, Any] = always({"_target_": "spectrain.training.target.TargetExperiment"})
    max_steps: int | None = option(1800, "optimizer steps; an hour on two cores; null: as hours says", least=1)
    model: dict[str, Any] = always(  # arguments of transformers.LlamaConfig: 7.5 M parameters
        {
            "vocab_size": 4096,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        }
    )
    optimizer: Optimizer = always(Optimizer("muon", 4e-3, warmup_steps=60))


SUGGESTED = "spire"  # the drafter that commands tell users to train, and the method of `generate` for it
EXPERIMENTS = {"spire": Spire, "vanilla": Vanilla, "specdecpp": Head, "target": Scratch}
