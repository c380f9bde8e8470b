"""The PyTorch engine.

Importing it makes OpenMP threads sleep instead of spin at barriers, unless ``OMP_WAIT_POLICY`` is set. Spinning threads
occupy the cores that others need: with one busy neighbour on two cores we measured 11,000 tokens/s sleeping and 600
spinning. It does not change any bit.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch loads its OpenMP runtime
