"""The checks. The only part of the doctor that imports torch."""
