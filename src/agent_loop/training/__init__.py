"""Training: advantages, losses, optimiser steps, checkpoints."""
