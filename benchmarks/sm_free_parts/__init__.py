"""The parts of `sm_free.py`: each has `measure`, for a rank, and `show`, which prints and says what was missed."""
