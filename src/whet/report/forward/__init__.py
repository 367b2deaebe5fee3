"""A run forwarded to a dashboard: a process of its own reads the folder, so that no network can touch a training.

target       what a dashboard must be able to do, and what is told to it
forwarding   the loop: waits, collects, sends, tries again
rows         the events of a run as one row of numbers for each step
open         the dashboards there are: to_mlflow, to_trackio, to_wandb
"""
