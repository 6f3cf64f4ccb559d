"""The command ``verl-pivot``."""
