"""Runs benchmarks: plan, schedule, engines, and the comparison of outputs."""

from draftwood.bench.run.plan import BenchPlan, check_plan, list_absent_peers, make_plan
from draftwood.bench.run.runner import run_bench
