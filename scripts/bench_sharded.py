"""What a rank needs to load its share of a target that ranks divide (`target.parallel=tp`).

    torchrun --nproc-per-node 2 scripts/bench_sharded.py --out docs/results/sharded.json

Loads a Llama of 1.2 billion random weights in bfloat16, or `--target`, and reports for each rank the weights that it
keeps and the most memory that was added meanwhile: what the process alone holds, and pages of mapped files, which ranks
of a machine share and the system can drop. On a CPU weights whose slice is whole rows stay there. On GPUs the device's
peak is given, too.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from spectrain.models.packages import target_path
from spectrain.stores.environment import environment
from spectrain.stores.files import write_json
from spectrain.stores.locations import bundled_folder
from spectrain.target.loading import load_target
from spectrain.target.sharded import TensorGroup, tensor_group

SHAPE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128_256}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True}
EVERY_S = 0.005


class Peak(threading.Thread):
    """Watches the memory of this process, in kB: what it holds alone, and pages of files."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stopped, self.before, self.own, self.mapped = threading.Event(), _memory(), 0, 0

    def run(self) -> None:
        while not self.stopped.wait(EVERY_S):
            own, mapped = _memory()
            self.own, self.mapped = max(self.own, own - self.before[0]), max(self.mapped, mapped - self.before[1])


def _memory() -> tuple[int, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Rss"))
    found = {name: int(number) for name, number, _ in lines}
    return found["RssAnon:"] + found["RssShmem:"], found["RssFile:"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or bundled name; a model of random weights is made by default")
    parser.add_argument("--tp", type=int, help="ranks that hold one target together; all by default")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args()
    group = tensor_group(options.tp, "auto")
    with tempfile.TemporaryDirectory() as temporary:
        folder = target_path(options.target) if options.target else made(Path(temporary), group)
        found = measured(folder, options.tp)
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, found)
    if dist.get_rank() == 0:
        result = {"target": options.target or "a Llama of random weights", "tp": group.size, "ranks": ranks}
        for rank, one in enumerate(ranks):
            print(f"rank {rank}: {one}")
        if options.out:
            write_json(options.out, result | {"environment": environment(len(ranks))})
    dist.destroy_process_group()


def made(folder: Path, group: TensorGroup) -> str:
    """Return a folder with a model, which rank zero writes with the tokenizer of a bundled target."""
    if dist.get_rank() == 0:
        config = LlamaConfig(**SHAPE, **HEADS, dtype="bfloat16", bos_token_id=None, eos_token_id=0)
        torch.set_default_dtype(torch.bfloat16)
        LlamaForCausalLM(config).save_pretrained(folder)
        torch.set_default_dtype(torch.float32)
        bundled = bundled_folder("pystdlib-8l")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((bundled / name).read_bytes())
    box = [str(folder)]
    dist.broadcast_object_list(box)
    return box[0]


def measured(folder: str, tp: int | None) -> dict[str, float]:
    """Load this rank's share, and return what it took."""
    peak = Peak()
    peak.start()
    target = load_target(folder, "bfloat16", parallel="tp", tp=tp)
    peak.stopped.set()
    peak.join()
    weights = {id(one): one for one in target.model.parameters()}.values()
    own = sum((one.to_local() if hasattr(one, "to_local") else one).nbytes for one in weights)
    found = {
        "share of the weights": round(own / sum(one.nbytes for one in weights), 4),
        "MiB kept": round(own / 2**20, 1),
        "MiB of its own at the peak": round(peak.own / 2**10, 1),  # without weights that stay where the file is mapped
        "MiB of mapped files at the peak": round(peak.mapped / 2**10, 1),  # which ranks of a machine share
    }
    if target.device.type == "cuda":
        found["device MiB at the peak"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return found


if __name__ == "__main__":
    main()
