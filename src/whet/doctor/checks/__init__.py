"""The checks, which are the only part of the doctor that imports torch."""
