"""verl_pivot: GPUs that follow the work in RL post-training with generative reward models."""

__version__ = "0.1.0"

import logging

# verl sets the root logger to ERROR in its workers; what a user must know about slots is a warning.
_logger = logging.getLogger(__name__)
if _logger.level == logging.NOTSET:
    _logger.setLevel(logging.WARNING)
