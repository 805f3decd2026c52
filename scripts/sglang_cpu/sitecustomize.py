"""Let torchvision of PyPI, which is built for CUDA, be imported beside a torch for CPUs. SGLang imports it always.

Python runs this at the start of every process that has this folder in PYTHONPATH.
"""

import sys
from importlib.metadata import version

NAMES = ("nms", "qnms")  # operators that torchvision describes to torch whether or not its library could be loaded


class BeforeTorchvision:
    def find_spec(self, name: str, *_) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None and "+cpu" not in version("torchvision"):
            for operator in NAMES:
                arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{operator}", arguments)


sys.meta_path.insert(0, BeforeTorchvision())
