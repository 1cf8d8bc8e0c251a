"""Planted faults: what the oracles do not see of them, they would not see of a fault of ours either."""

from simulator.mutants.planted_faults import MUTANTS
from simulator.mutants.planting import Mutant, caught_by, planted

__all__ = ["MUTANTS", "Mutant", "caught_by", "planted"]
