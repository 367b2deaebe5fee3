"""The loop: Session, train, schedules, signals, and what is written down while training."""
