"""Plans: the workload, the settings with their reasons and evidence, and the rules that decide them.

This package does not import torch, so that a plan can be made for another machine.
"""
