"""Distributed training: ranks, launcher, collectives, heartbeats and parallel strategies."""
