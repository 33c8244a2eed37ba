"""Tuning: what can be measured once for a model and used ever after."""

from draftwood.tune.explain import Account, Way, best_of, explain, list_ways
from draftwood.tune.machine import Tuned, tune_costs, tune_successors
from draftwood.tune.priors import Measured, measure_priors
from draftwood.tune.static_tree import optimise_tree
