"""The workload, the settings of a plan with their reasons and evidence, and the rules that decide them.

This package does not import torch, so a plan can be made for another machine."""
