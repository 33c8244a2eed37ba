"""The engine: sessions, the step, scheduling, stopping, statistics."""

from draftwood.engine.calibration import NUM_BINS, Calibration, Reliability
from draftwood.engine.engine import Engine
from draftwood.engine.events import BONUS_SOURCE, CycleDetail, TokenEvent, TokenLogprobs
from draftwood.engine.requests import GenerationRequest
from draftwood.engine.session import DRAFTER_STREAM
from draftwood.engine.stats import BRANCH_SOURCE, SPINE_SOURCE, RequestStats
from draftwood.engine.tally import TreeCounts
