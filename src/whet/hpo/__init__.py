"""Hyperparameter search with Optuna. Each trial is a run in its own folder, trained in its own process."""
