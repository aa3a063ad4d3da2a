"""The numbers of noise that stand for a user's: the size to start from, the cost that is accepted, the largest size."""

DEFAULT_T = 0.05
"""t of `SignalNoise` to start from where none was tuned. The loss of a trained Llama rises from 1.85 to 1.92 at 0.05,
to 2.13 at 0.1 and to 4.44 at 0.2 (`benchmarks/noise_damage.py`); small models that are grown in mid-training gain at
0.05 too, and gain more at 0.1 and 0.2 (`benchmarks/default_noise.py`)."""
DEFAULT_RISE = 0.05
"""The share of what a base has learned that automatic noise may cost, where none is given. A trained Llama goes from 1.66
to 1.88 with it (`benchmarks/auto_noise.py`), and copies are far enough apart to learn different things."""
LARGEST_T = 1.0
"""Noise with the spectral norm of the weight itself; with more, the noise is the model."""
