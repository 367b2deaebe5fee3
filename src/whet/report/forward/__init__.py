"""Forward a run to a dashboard from a separate process, so that network problems cannot disturb the training run."""
