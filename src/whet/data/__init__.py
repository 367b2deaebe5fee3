"""Which samples a step sees, in which order, cut how, and how they reach the device."""
