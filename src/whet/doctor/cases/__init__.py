"""The checks, each table a list of cases: operators, known hazards, parity, resume, speeds, environment."""
