"""Constants of the hash; reference, loops and Triton kernels share them. Another value is another curve."""

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: multiples of it lie far apart."""
LEFT, RIGHT = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The two factors of splitmix64's finaliser."""
COLUMN = 0x9E3779B1
"""Near 2^32 over the golden ratio, odd: what a column adds."""
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
"""The factors of the two 32-bit rounds."""
DOMAIN = 0x44524F504F555421
"""Sets these numbers apart from the negatives that are drawn from the same seed and step."""
