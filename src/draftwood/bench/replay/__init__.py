"""Records runs once, and replays them with any drafter without a model."""

from draftwood.bench.replay.commands import record_to, replay_methods
from draftwood.bench.replay.recorder import Recorder, make_recording_drafter, record
from draftwood.bench.replay.recording import RecordedRequest, Recording, load_recording, save_recording
from draftwood.bench.replay.replayer import ReplayResult, check_method, replay
from draftwood.bench.replay.studies import (
    ReplayFigures,
    compute_figures,
    format_figures,
    list_warnings,
    study_contexts,
    study_trajectories,
)
