"""The stages, in the order in which they run. Each module has a function `run(device, report)`.

A stage runs on any device. On a CPU its models are tiny, and a transport or a kernel that needs CUDA is replaced by
the one that the package uses on a CPU.
"""

from tests.gpu.stage_process import Stage

STAGES = (
    Stage("engine", "embedded engine against transformers", "tests.gpu.stages.engine", 400),
    Stage(
        "trainer",
        "loss, gradients and optimiser against a plain computation",
        "tests.gpu.stages.trainer",
        400,
    ),
    Stage("memory", "peak of an update against `agent-loop plan`", "tests.gpu.stages.memory", 540),
    Stage(
        "prefix-tree", "attention over prefix trees against single rows", "tests.gpu.stages.prefix_tree", 580
    ),
    Stage("sleep", "sleep and wake of the embedded server", "tests.gpu.stages.sleep", 300),
    Stage("cuda-ipc", "weights through GPU memory to another process", "tests.gpu.stages.cuda_ipc", 300),
    Stage("nccl", "process group, FSDP and broadcast over NCCL", "tests.gpu.stages.nccl", 300),
    Stage("throughput", "tokens per second of engine and trainer", "tests.gpu.stages.throughput", 540),
)
