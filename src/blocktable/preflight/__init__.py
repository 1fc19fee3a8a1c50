"""Will a launch start? The width that the engine's release allocates, judged by what the kernel of that release accepts.

No terminal in here: `judge` answers for one backend, and whoever asks (a command, an engine's plugin) shows it.

>>> from blocktable.contracts import resolve_engine
>>> launch = Launch(resolve_engine("vllm==0.19.1"), "FLASHINFER_MLA", max_model_len=9416, block_size=32)
>>> answer = judge(launch)
>>> answer.verdict, answer.width, answer.error
('refused', 295, 'ValueError: Expected block_num % (128 / block_size) == 0, got block_num=295 and block_size=32')
>>> answer.ways_out[0]
'--max-model-len 9344, or 9441 to 9472'
"""

from collections.abc import Sequence
from dataclasses import replace

from blocktable.preflight.groups import Group
from blocktable.preflight.judgement import Judgement, Verdict, assess
from blocktable.preflight.launch import Connector, Draft, Launch, find_release
from blocktable.preflight.memory import Memory
from blocktable.preflight.model import Model, read_model
from blocktable.preflight.ways import ways_out

__all__ = [
    "Connector",
    "Draft",
    "Group",
    "Judgement",
    "Launch",
    "Memory",
    "Model",
    "Verdict",
    "find_release",
    "judge",
    "read_model",
    "worst",
]


def judge(launch: Launch) -> Judgement:
    """Judge one backend; a refusal comes with ways out, each of which this same function accepts.

    Raises `UnknownName` for a backend that the release does not have. Cost: a few milliseconds; the catalogue is read once.
    """
    answer = assess(launch)
    return replace(answer, ways_out=tuple(ways_out(launch, answer))) if answer.verdict == "refused" else answer


def worst(answers: Sequence[Judgement]) -> Judgement:
    """Return the answer that decides among several: refused before unknown before accepted."""
    return min(answers, key=lambda answer: ("refused", "unknown", "accepted").index(answer.verdict))
