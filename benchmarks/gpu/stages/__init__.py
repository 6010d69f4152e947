"""The stages, by value: what comes last is left out when the time is over.

Each module has a function `run(device, report)`. A stage runs on any device. On a CPU its models are tiny, and a
transport or a kernel that needs CUDA is replaced by the one that the package uses on a CPU.
"""

from benchmarks.gpu.stage_process import Stage


def _stage(name: str, title: str, *, limit_s: float) -> Stage:
    return Stage(name, title, f"{__name__}.{name.replace('-', '_')}", limit_s)


STAGES = (
    _stage("demo", "ten steps of the task of `make demo`", limit_s=90),
    _stage("engine", "embedded engine against transformers", limit_s=90),
    _stage("decode", "tokens per second of the embedded engine", limit_s=120),
    _stage("update", "tokens per second and memory of the trainer", limit_s=100),
    _stage("trainer", "loss, gradients and optimiser against a plain computation", limit_s=60),
    _stage("prefix-tree", "training on prefix trees against single rows", limit_s=120),
    _stage("slow-tools", "rollouts steps ahead against step by step", limit_s=90),
    _stage("cuda-ipc", "weights through GPU memory to another process", limit_s=60),
    _stage("sleep", "sleep and wake of the embedded server", limit_s=60),
    _stage("nccl", "process group, FSDP and broadcast over NCCL", limit_s=60),
    _stage("pretrained", "GRPO on a pretrained model", limit_s=120),
    _stage("vllm", "a vLLM server against transformers", limit_s=120),
    _stage("memory", "peak of an update against `agent-loop plan`, by setting", limit_s=120),
)
