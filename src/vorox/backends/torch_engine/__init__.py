"""The PyTorch engine.

Importing it sets how OpenMP threads wait at barriers (``barriers.py``), before torch loads its runtime.
"""

from vorox.backends.torch_engine.device import barriers

barriers.prepare()
