"""Import this before Lightning where torchvision and torch may not belong together; else leave it out.

Lightning imports torchmetrics, which imports torchvision where it is installed. A torchvision for CUDA beside
a torch for CPU fails there over two operators that training never calls: declare them, so that it goes on.
"""

import torch

try:
    import torchvision  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401
except ImportError:
    pass
except RuntimeError:
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor a, Tensor b, float c) -> Tensor")
