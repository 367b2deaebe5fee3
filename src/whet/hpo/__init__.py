"""Hyperparameter search with Optuna. Every trial is a run folder, trained in its own process."""
