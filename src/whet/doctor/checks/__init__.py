"""The checks; the only part of the doctor that imports torch."""
