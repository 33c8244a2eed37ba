"""Running a benchmark: plan, schedule, engines, and the check that outputs are identical."""

from draftwood.bench.run.plan import Plan, absent_peers, check_plan, make_plan
from draftwood.bench.run.runner import run_bench

__all__ = ["Plan", "absent_peers", "check_plan", "make_plan", "run_bench"]
