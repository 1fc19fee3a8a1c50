"""A flight recorder: every call of a run in a file that survives the process, and the run again from it."""

from blocktable.recording.record import Recorder, record
from blocktable.recording.replay import Call, Change, Replayed, calls, history, play, replay
from blocktable.recording.shrink import Shrunk, shrink

__all__ = ["Call", "Change", "Recorder", "Replayed", "Shrunk", "calls", "history", "play", "record", "replay", "shrink"]
