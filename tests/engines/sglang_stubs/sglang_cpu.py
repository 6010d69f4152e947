"""Declaration of two operators of torchvision's compiled part, so that a CPU build of torch can import torchvision.

A `.pth` file imports this module at the interpreter's start. It has no effect before torchvision is imported.
"""

import sys
from importlib.abc import MetaPathFinder

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries = []


class _DeclaresOperators(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                library.define(operator)
            _libraries.append(library)
        return None


sys.meta_path.insert(0, _DeclaresOperators())
