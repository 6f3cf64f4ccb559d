"""verl_pivot: GPUs that follow the work in RL post-training with generative reward models."""

__version__ = "0.1.0"
