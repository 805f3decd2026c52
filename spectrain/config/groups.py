"""Groups of options that several commands share, and that the packages below the commands read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Le

from spectrain.config.fields import group, option
from spectrain.config.values import Count, FilePath, FilePaths, Names, NonNegative, Positive, Share, Whole
from spectrain.errors import UserError


@dataclass
class Target:
    """The model whose text is decoded."""

    path: FilePath = option(
        "pystdlib-8l", "a bundled checkpoint, smollm2, a folder, or an id on the hub (target=smollm2)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "of its weights and activations; auto: the checkpoint's on a GPU, float32 on a CPU"
    )
    device: str = option("auto", "auto | cpu | cuda | cuda:1")
    engine: Literal["auto", "lean", "transformers"] = option(
        "auto", "the lean decoder knows llama, mistral, qwen2 and qwen3, and auto takes it there"
    )
    graphs: Literal["auto", "none"] = option("auto", "on a GPU steps are recorded as CUDA graphs and replayed")
    compile: Literal["auto", "triton", "none"] = option(
        "auto", "on a GPU steps of the lean decoder run through our own kernels; auto: where Triton is installed"
    )
    parallel: Literal["none", "device_map", "tp"] = option(
        "none",
        "for a target that does not fit one GPU; tp: torchrun's ranks divide its weights; device_map: one process "
        "spreads its layers",
    )
    tp: Whole | None = option(None, "ranks that hold one target together with parallel=tp; null: all")

    def ranks_of_group(self, n_ranks: int) -> int:
        """Return how many of so many ranks hold one target together."""
        if self.tp is not None and self.parallel != "tp":
            raise UserError(f"target.tp={self.tp} is for target.parallel=tp; give it, or remove target.tp")
        return (self.tp or n_ranks) if self.parallel == "tp" else 1


@dataclass
class Sampling:
    """How tokens are drawn."""

    temperature: NonNegative = option(0.0, "0: greedy (sampling.temperature=0.8)")
    top_k: Count = option(0, "0: off")
    top_p: Annotated[Positive, Le(1)] = option(1.0, "1: off")
    min_p: Share = option(0.0, "0: off")
    draws: Literal["auto", "inverse", "shared"] = option(
        "auto",
        "shared: noise fixed by seed, place and token, so that all methods write the same sampled text; auto: shared "
        "where a method drafts trees of a draft model, which gain from it, else inverse",
    )


@dataclass
class Corpus:
    """Chats, prose or source code that is learned from."""

    path: FilePaths | None = option(
        None,
        "a file or folder of chat data, prose or source code, a saved dataset, an id on the hub, responses:<folder>, "
        "or several of these in a list; null: the sources of Python's standard library (corpus=chats.json)",
    )
    weights: list[Positive] | None = option(
        None, "of the paths, in their order: how often each document is read, 0.5 for half of them"
    )
    limits: list[Whole] | None = option(None, "of the paths, in their order: the most documents of each")
    fields: Names | None = option(
        None, "columns of a row that hold its conversation or its texts; null: as docs/data.md says"
    )
    split: str = option("train", "of a saved dataset or a hub dataset")
    subset: str | None = option(None, "of a hub dataset; null: its default")
    held_out_share: Share = option(0.05, "documents that no training and no datastore sees")
    max_documents: Whole | None = option(None, "the most documents to read; null: all")
    decontaminate: FilePaths | None = option(
        None, "prompts of benchmarks; documents that share a run of 13 tokens are left out"
    )

    @property
    def paths(self) -> list[str | None]:
        return self.path if isinstance(self.path, list) else [self.path]

    @property
    def prompt_paths(self) -> list[str]:
        given = self.decontaminate or []
        return given if isinstance(given, list) else [given]

    @property
    def name(self) -> str:
        return ", ".join(path or "the standard library" for path in self.paths)


@dataclass
class Artifacts:
    """What methods draft with; null: the best that fits, below checkpoints/ or as it comes with spectrain."""

    drafter: FilePaths | None = option(None, "folder of a trained drafter, or several in a list")
    head: FilePath | None = option(None, "folder of an acceptance head of +exp=specdecpp")
    datastore: FilePath | None = option(None, "folder made by spectrain datastore")


@dataclass
class Configured(Artifacts):
    """One method with its options, and what it drafts with."""

    method: dict[str, Any] = group(dict)


@dataclass
class Built:
    """What a command writes into a folder of its own."""

    out: FilePath | None = option(None, "folder; null: named by the hash of the options. The same command resumes")
    fresh: bool = option(False, "true: replace what an earlier command left there")


@dataclass
class Server:
    """An OpenAI-compatible server that works for the target."""

    base_url: str | None = option(
        None, "server: http://host:port, with or without /v1; the key is read from the variable OPENAI_API_KEY"
    )
    model: str | None = option(None, "server: the model's name there; null: the only one that it serves")
    concurrency: Whole = option(8, "server: requests at the same time")
    retries: Count = option(5, "server: how often a request is repeated, after pauses that double")
    timeout_s: Positive = option(120.0, "server: seconds per request")


@dataclass
class Hardware:
    """Peaks of a machine, as the files of conf/hardware/ have them."""

    name: str = option("", "of the machine")
    flops_per_s: dict[str, Positive] | None = option(None, "by dtype (bf16, fp32); null: this CPU is measured")
    bytes_per_s: Positive | None = option(None, "of the memory")
    memory_bytes: Positive | None = option(None, "of one GPU")
    link_bytes_per_s: Positive | None = option(None, "of one GPU, to the others of its machine")
    network_bytes_per_s: Positive | None = option(None, "of one GPU, to other machines")
    training_share: Annotated[Positive, Le(1)] = option(1.0, "of the peaks, that kernels of a training reach")
    source: str | None = option(None, "where the numbers are from")


SEED = option(0, "random seed; prompt i uses (seed, i)")
