"""Local server of the Tinker API: LoRA training, sampling and checkpoints for recipes that others wrote."""
