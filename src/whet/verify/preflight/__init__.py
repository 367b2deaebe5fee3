"""Will a model train on a device that need not be here? `whet check`: a trace of the step, watched."""
