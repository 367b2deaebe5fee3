"""Hyperparameter search: Optuna proposes, every trial is a run folder trained in its own process."""
