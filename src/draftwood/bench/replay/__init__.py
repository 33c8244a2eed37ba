"""Runs that were written down once, and drafters tried on them again and again, without a model."""

from draftwood.bench.replay.recorder import Tape, record, recording_drafter
from draftwood.bench.replay.recording import RecordedRequest, Recording, load_recording, save_recording
from draftwood.bench.replay.replayer import Replay, check_method, replay
from draftwood.bench.replay.scale import Figures, context_study, figure_notes, figure_rows, figures_of, trajectory_study
from draftwood.bench.replay.study import record_to, replay_methods

__all__ = [
    "Figures",
    "RecordedRequest",
    "Recording",
    "Replay",
    "Tape",
    "check_method",
    "context_study",
    "figure_notes",
    "figure_rows",
    "figures_of",
    "load_recording",
    "record",
    "record_to",
    "recording_drafter",
    "replay",
    "replay_methods",
    "save_recording",
    "trajectory_study",
]
