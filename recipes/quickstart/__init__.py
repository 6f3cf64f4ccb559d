"""The quick start: a toy task, a policy and a judge small enough to train on two cores."""
