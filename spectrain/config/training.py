"""The options of trainings: those that all share, and those of each experiment (`+exp=...`).

Values in brackets are the paper's, or those of seqax, the code that SPIRe's authors trained with (docs/papers.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le
from omegaconf import MISSING

from spectrain.config.fields import always, group, option
from spectrain.config.groups import SEED, Corpus, Hardware, Target
from spectrain.config.values import Count, FilePath, FilePaths, NonNegative, Part, Positive, Seed, Several, Share, Whole


@dataclass
class Data:
    """Where the rows of a training come from."""

    source: str = MISSING
    row_tokens: Several | None = option(
        None, "L, of a row; null: as the store has, or 1024, or fewer where the text is little"
    )
    batch_size: Whole | None = option(None, "rows per step, over all ranks together; null: 4, or one for each rank")
    val_rows: Whole = option(32, "held-out rows per validation")
    loss_on: Literal["response", "all"] = option(
        "response",
        "what is learned: the tokens of responses and assistant turns, where the text has any. Not +exp=specdecpp",
    )


@dataclass
class Online(Data):
    """The frozen models run inside the training step, on rows of the corpus."""

    _target_: str = "spectrain.training.sources.Online"
    source: str = "online"
    document_mask: bool = option(False, "true: documents that are packed into a row do not see each other")


@dataclass
class Offline(Data):
    """The outputs of the frozen models were stored beforehand, by spectrain activations or spectrain acceptance."""

    _target_: str = "spectrain.training.sources.Offline"
    source: str = "offline"
    path: FilePath | None = option(None, "folder of the store; null: the newest one that fits")
    verify: bool = option(True, "+exp=spire: read all shards first and compare their sha256; false: their sizes")


@dataclass
class Served(Online):
    """Another process owns the target and computes its hidden states (spectrain activations serve=true)."""

    _target_: str = "spectrain.training.sources.Served"
    source: str = "served"
    address: str = option("127.0.0.1:7463", "host:port, with the key of SPECTRAIN_KEY; http://host:port: a vLLM")
    timeout_s: Positive = option(300.0, "without an answer of the server, until the training gives up")


@dataclass
class Optimizer:
    name: Literal["adamw", "muon"] = option("adamw", "muon: matrices by Muon, the rest by AdamW")
    lr: Positive | None = option(None, "highest learning rate; null: lr_times_width / width of what is trained")
    lr_times_width: Positive = option(1.28, "by which the learning rate falls with the width [seqax: 1.536]")
    weight_decay: NonNegative = option(0.1, "[seqax: 0.1]")
    betas: list[Share] = option([0.9, 0.95], "[seqax: 0.9, 0.95]")
    warmup_steps: Count = option(30, "in which the learning rate rises")
    warmup_share: Share | None = option(None, "of all steps, in place of warmup_steps [seqax: 0.1]")
    schedule: Literal["linear", "cosine"] = option("linear", "how the learning rate falls [seqax: cosine]")
    final_share: Part = option(0.0, "of the highest learning rate, at the last step [seqax: 0.1]")


@dataclass
class Trainer:
    """Arguments of lightning.Trainer, of which these are checked here."""

    _target_: str = "lightning.Trainer"
    devices: Any = "auto"
    strategy: Any = "auto"
    precision: Any = "auto"
    more: dict[str, Any] = group(dict)  # the others
    accelerator: str = option("auto", "auto | cpu | gpu")
    num_nodes: Whole = option(1, "machines")
    gradient_clip_val: Positive | None = option(1.0, "largest norm of the gradient [seqax: 1]")
    accumulate_grad_batches: Whole | None = option(
        None,
        "batches per optimizer step; null: 1, or on a GPU as few as fit its memory; data.batch_size is divided by it",
    )
    activation_checkpointing: bool | None = option(
        None, "true: blocks run again in the backward pass; null: where not even one row fits a GPU without"
    )
    compile: Literal["auto", "none"] = option(
        "auto", "auto: on a GPU blocks and loss are compiled before the first step"
    )
    log_every_n_steps: Whole = option(10, "steps per row of the curve")
    val_check_interval: Whole = option(250, "batches per validation")


@dataclass
class Select:
    """The exported weights are those with the highest expected tau on held-out rows."""

    every: Count = option(1, "validations per comparison; 0: the last weights are exported")


@dataclass
class Tau:
    """What is measured after training, with the real loop, on held-out rows."""

    context_tokens: list[Whole] | None = option(
        None, "lengths of the contexts; null: a quarter and half of data.row_tokens"
    )
    contexts: Whole = option(64, "per length")
    new_tokens: Whole = option(64, "generated after each context, the paper's G")
    temperatures: list[NonNegative] = option([0.0, 1.0], "0: greedy")
    batch_size: Whole = option(8, "contexts decoded together")
    timed_contexts: Whole = option(8, "decoded one at a time, to measure tokens/s")


@dataclass
class Train:
    """Train a drafter (+exp=spire, eagle3, dflash, vanilla), an acceptance head (specdecpp), or a target (target)."""

    kind: str = ""  # +exp= sets it
    experiment: dict[str, Any] = group(dict)
    target: Target = group(Target)
    corpus: Corpus = group(Corpus)
    data: Any = None
    hours: Positive | None = option(
        None, "that all of it takes, if max_steps=null: loading, steps, validation and the measurement of tau"
    )
    max_steps: Whole | None = option(None, "optimizer steps")
    plan: bool = option(False, "true: print what the training will take (docs/plan.md), and do not start it")
    out: FilePath | None = option(None, "export folder; null: checkpoints/<name of the run>")
    run_dir: FilePath | None = option(None, "null: runs/<kind>-<hash of the options>. The same command resumes")
    fresh: bool = option(False, "true: delete an earlier run in this folder and start again")
    checkpoint_s: NonNegative = option(120.0, "seconds between two checkpoints: what a kill loses at the most")
    seed: Seed = SEED
    vanilla: FilePath | None = option(None, "folder of a vanilla drafter that is measured for comparison")
    trainer: Trainer = group(Trainer)
    select: Select = group(Select)
    tau: Tau = group(Tau)
    logger: dict[str, Any] = group(dict)
    sampling: dict[str, Any] | None = option(
        None, "of +exp=specdecpp: how labels are warped; null: as the responses were drawn"
    )
    hardware: Hardware | None = None
    own: Any = group(dict)  # the experiment's options, an object of a class below; those of all trainings stand above


@dataclass
class OwnBlocks:
    """What trainings of drafters of our own blocks share."""

    max_steps: Whole | None = option(None, "optimizer steps; null: as tokens_per_parameter says")
    tokens_per_parameter: Positive = option(0.9, "tokens per trained parameter, but at most ten passes over the text")
    epochs: Positive | None = option(
        None, "passes over the training rows, where max_steps and hours are null; null: as tokens_per_parameter says"
    )
    draft_vocab: Whole | Literal["auto"] | None = option(
        None, "tokens that it can draft, the most frequent of what is learned; auto: those of 99.5 % of it; null: all"
    )
    omega: Part = option(0.5, "share of the cross-entropy in the mixed loss [SPIRe: 0.5]")
    export_dtype: Literal["bfloat16", "float32"] = option("bfloat16", "of the exported weights")
    optimizer: Optimizer = always(Optimizer())


@dataclass
class Spire(OwnBlocks):
    """A SPIRe drafter."""

    kind: str = "spire"
    experiment: dict[str, Any] = always({"_target_": "spectrain.training.spire.SpireExperiment"})
    tokens_per_parameter: Positive = option(
        0.9, "tokens per trained parameter, but at most ten passes over the text; of the bundled target 8 minutes"
    )
    n_layer: Whole | Literal["quarter"] = option(
        2, "the target's last blocks that the drafter starts from [quarter: of all]"
    )
    k: Whole = option(4, "drafted tokens per rollout [4]")
    window_tokens: Whole = option(64, "positions that are seen: t-63 to t [64]")
    sink_tokens: Count = option(1, "first positions of the text, always seen [1]")
    own_key: bool = option(
        True, "a token sees its own key, too [true]; false: the memories before it alone, as in engines (+engine=vllm)"
    )
    init: FilePath = option("pruned", "pruned, random, or a SPIRe drafter that is trained further [pruned]")
    input: Literal["projected", "tied", "trained"] = option(
        "projected", "projected: W e(token) of the target's embedding e; trained: a table; tied: as in the paper"
    )
    unembedding: Literal["target", "trained"] = option(
        "target", "the target's as it is, or a trained copy; input=tied trains it"
    )
    previous_state: bool | None = option(
        None,
        "the input also holds W2 h of the state h one token earlier [false]; null: true, but not with input=tied or "
        "target_activations=false",
    )
    feedback: bool | Literal["shared"] = option(
        True, "memories of drafted tokens mix all layers [true]; shared: alike for all blocks"
    )
    memories: Literal["blocks", "final", "embedding"] = option("blocks", "the target's states of context [blocks]")
    target_activations: bool = option(
        True, "memories of context tokens are the target's activations [true]; false needs feedback=false"
    )
    loss: Literal["mixed", "distill", "hard"] = option("mixed", "distill: omega = 1; hard: the text's tokens")
    shifted_blocks: bool = option(True, "true: from the second epoch on blocks of k begin elsewhere in each [false]")


@dataclass
class Eagle3(OwnBlocks):
    """An EAGLE-3 drafter."""

    kind: str = "eagle3"
    experiment: dict[str, Any] = always({"_target_": "spectrain.training.eagle3.Eagle3Experiment"})
    ttt_steps: Whole = option(4, "tokens of each draft in training, and by default in decoding [7]")
    roots_every: Whole = option(
        1,
        "N: a draft begins at every N-th token [1: each token is learned at every depth]; as ttt_steps: each token at "
        "one depth per epoch, and a step takes a fraction of the time",
    )
    window_tokens: Whole | None = option(
        None, "positions that are seen, up to the token's own; null: all [null], or as the drafter of init= does"
    )
    target_layers: list[Count] | None = option(
        None, "blocks of the target whose inputs are read, from 0; null: 2, the middle one, and the third last [null]"
    )
    intermediate_size: Whole | None = option(None, "width of its MLP; null: the target's [null]")
    norm_before_residual: bool = option(False, "true: the residual stream begins with the normed state [false]")
    norm_before_fc: bool = option(False, "true: one norm over the target's states together [false]")
    fc_norm: bool = option(False, "true: a norm for each of the target's states [false; EAGLE-3.1: true]")
    norm_output: bool = option(False, "true: the next token reads the normed state [false; EAGLE-3.1: true]")
    init: FilePath = option(
        "pruned",
        "pruned: begins as the target's last block, with its input fitted; random; or an EAGLE-3 drafter that is "
        "trained further, also another project's [random]",
    )
    unembedding: Literal["trained", "target"] = option(
        "trained", "trained: it begins as the target's rows of the tokens that it can draft; target: they stay so"
    )
    draft_vocab: Whole | Literal["auto"] | None = option(
        "auto", "tokens that it can draft, the most frequent of what is learned; auto: those of 99.5 % of it; null: all"
    )
    loss: Literal["soft", "distill", "mixed", "tv", "lk", "hard"] = option(
        "soft",
        "soft: cross-entropy within the draft vocabulary, but where the target's most likely token is outside [soft]; "
        "distill: there, too; mixed: as +exp=spire; tv: total variation; lk: -log acceptance; hard: the text's tokens",
    )
    decay: Annotated[Part, Gt(0)] = option(0.8, "weight of a drafted token over the one before it [0.8]")


@dataclass
class DFlash(OwnBlocks):
    """A DFlash drafter, which drafts a block of tokens at once."""

    kind: str = "dflash"
    experiment: dict[str, Any] = always({"_target_": "spectrain.training.dflash.DFlashExperiment"})
    n_layer: Whole = option(5, "its blocks [5]")
    block_tokens: Several = option(16, "of a block, with its root: it drafts one token fewer [16]")
    roots_every: Whole = option(8, "blocks begin at every so many-th token, elsewhere in each epoch [512 per row]")
    mask_token: Count | None = option(
        None, "the token that stands for those to be drafted; null: the tokenizer's mask token, or the last token"
    )
    target_layers: list[Count] | None = option(
        None, "blocks of the target whose inputs are read; null: as many as n_layer, evenly spaced [null]"
    )
    intermediate_size: Whole | None = option(None, "width of its MLPs; null: the target's [null]")
    init: FilePath = option("random", "random, or a DFlash drafter that is trained further, also another project's")
    unembedding: Literal["trained", "target"] = option(
        "target", "target: the target's rows of the tokens that it can draft; trained: it begins as these [target]"
    )
    loss: Literal["soft", "mixed", "distill", "tv", "lk", "hard"] = option("hard", "as +exp=eagle3 has it [hard]")
    decay_tokens: Positive = option(7.0, "of a draft, in which the weight of a token in the loss falls to 1 / e [7]")


@dataclass
class Vanilla:
    """An ordinary Llama with half the layers and half the width, trained by cross-entropy on the data."""

    kind: str = "vanilla"
    experiment: dict[str, Any] = always({"_target_": "spectrain.training.vanilla.VanillaExperiment"})
    max_steps: Whole | None = option(None, "optimizer steps; null: as tokens_per_parameter says")
    tokens_per_parameter: Positive = option(1.2, "tokens per trained parameter, but at most ten passes over the text")
    epochs: Positive | None = option(
        None, "passes over the training rows, where max_steps and hours are null; null: as tokens_per_parameter says"
    )
    n_layer: Whole | None = option(None, "null: half the target's")
    hidden_size: Whole | None = option(None, "null: half the target's; the number of heads stays the same")
    optimizer: Optimizer = always(Optimizer(name="muon"))  # DeepSpeed needs adamw: lr_times_width=0.64 is best


@dataclass
class Head:
    """An acceptance head of a drafter (SpecDec++), from responses of the target."""

    kind: str = "specdecpp"
    experiment: dict[str, Any] = always({"_target_": "spectrain.training.head.HeadExperiment"})
    max_steps: Whole | None = option(None, "optimizer steps; null: `epochs` passes over the rows")
    epochs: Whole = option(3, "passes over the rows [3]")
    drafter: FilePaths | None = option(None, "folder of a drafter; null: the newest vanilla one that fits")
    responses: FilePath | None = option(None, "folder made by spectrain responses; null: the newest of this target")
    held_out_share: Annotated[Share, Gt(0)] = option(0.05, "of the rows, for validation")
    rollout_tokens: Several = option(10, "of a SPIRe drafter: positions per rollout, with its root")
    n_blocks: Annotated[Count, Le(4)] = option(3, "D, residual blocks of the head [0 .. 4]")
    w_rej: Positive = option(6.0, "weight of rejections in the loss [1, 3, 6, 12]")
    w_acc: Positive = option(1.0, "weight of acceptances in the loss [1]")
    mixing_share: Share = option(0.15, "r, the target's own tokens among those that it sees [0.15]")
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
    max_steps: Whole | None = option(1800, "optimizer steps; an hour on two cores; null: as hours says")
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
EXPERIMENTS = {"spire": Spire, "eagle3": Eagle3, "dflash": DFlash}
EXPERIMENTS |= {"vanilla": Vanilla, "specdecpp": Head, "target": Scratch}
