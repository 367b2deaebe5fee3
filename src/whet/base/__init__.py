"""The ground floor: errors, units, the environment, and the frozen record every fact is made of."""
