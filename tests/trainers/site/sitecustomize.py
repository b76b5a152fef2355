"""Read by each Python process that starts with this folder in PYTHONPATH: makes `import torchvision` work.

A torchvision for CUDA beside a torch for CPU fails over two operators that training never calls: they are
declared before it is imported.
"""

from importlib.util import find_spec

if find_spec("torch") and find_spec("torchvision"):
    import torch

    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor a, Tensor b, float c) -> Tensor")
