#!/bin/bash
# Train a recipe on a Ray cluster that runs already, from its head node. Planned, not yet run.
#   bash examples/recipes/ray_cluster.sh examples/recipes/qwen3-8b-2x8x80gb.yaml
# On the head node:    ray start --head --port=6379
# On the other nodes:  ray start --address=HEAD:6379
set -euo pipefail

recipe=${1:-examples/recipes/qwen3-8b-2x8x80gb.yaml}
shift || true
ray status
agent-loop train "$recipe" --resume trainer.runtime=ray trainer.ray.address=auto "$@"
