"""Who trains it, one file each: `run(work, pace, spec)` makes steps and tells the pace of each."""
