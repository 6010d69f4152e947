"""Custom weight loader, which runs in SGLang's schedulers and receives weights from the trainer."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent_loop.weights.receiver import WeightReceiver

NAME = "agent_loop.servers.sglang.loader.load"
"""Import path of the loader, which is also its `load_format`."""

_receivers: dict[int, WeightReceiver] = {}


def payload(handle_json: str, *, report_folder: Path) -> str:
    """Return the arguments of `load` in the form of serialized tensors, which SGLang passes to the loader."""
    text = json.dumps({"handle": handle_json, "report_folder": str(report_folder)})
    named = [("agent_loop", torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]
    return base64.b64encode(pickle.dumps(named)).decode("ascii")


def load(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Receive all weights, then load them into the model.

    Never raises, because an exception would end the scheduler. The result is written to the report folder, in one file
    per rank. See `read_reports`.
    """
    ((_, tensor),) = named_tensors
    message = json.loads(tensor.cpu().numpy().tobytes())
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    report: dict[str, Any] = {"error": "", "is_mixed": False}
    try:
        if rank not in _receivers:
            _receivers[rank] = WeightReceiver(rank=rank, merges_on=next(model.parameters()).device)
        weights = _receivers[rank].receive(message["handle"])
    except Exception as error:  # noqa: BLE001  (reported to the server, which raises it)
        report["error"] = str(error)
    else:
        try:
            model.load_weights(iter(weights))
        except Exception as error:  # noqa: BLE001  (as above)
            report = {"error": f"{type(error).__name__}: {error}", "is_mixed": True}
    (Path(message["report_folder"]) / str(rank)).write_text(json.dumps(report), encoding="utf-8")


def read_reports(folder: Path) -> list[tuple[str, bool]]:
    """Return for each rank that reported: its error, if any, and whether it has a part of the new weights."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.iterdir())]
    return [(str(report["error"]), bool(report["is_mixed"])) for report in reports]
