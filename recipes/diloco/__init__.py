"""Decoupled DiLoCo: training that goes on when islands fail, each island fed by its own lanes."""

import os

# Before numpy and torch are imported: a run and its replay must add in the same order on any number of cores. Two
# threads of BLAS gave other last bits than one from a vocabulary of 16,384 on.
os.environ.setdefault("OMP_NUM_THREADS", "1")
