"""Decoupled DiLoCo: training that goes on when islands fail, each island fed by its own lanes."""
