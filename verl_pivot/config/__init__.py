"""Configuration: dataclasses (``schema``), hydra groups (YAML beside this file) and checks (``checks``)."""
