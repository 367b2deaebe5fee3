"""Distributed training with ranks, a launcher, collectives, heartbeats and parallel strategies."""
