"""The training loop: Session, train, schedules, checkpoints, callbacks and the event log."""
