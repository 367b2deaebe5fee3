"""Positions to learn from, on disk and memory-mapped.

packing      boards in a quarter of their bytes
splitting    which games are for training, which for judging
manifest     what a set of positions says about itself
importing    records become such a set
position_set reading it back, batch by batch, also turned and mirrored
"""
