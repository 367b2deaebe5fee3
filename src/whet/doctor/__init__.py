"""`whet doctor`, the self-test of a device: operators, known bugs, parity with the CPU, exact resume and speed."""
