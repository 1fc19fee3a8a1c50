"""Hypothesis profiles, chosen by HYPOTHESIS_PROFILE: how many examples, and how long the sequences of calls are."""

import os

from hypothesis import HealthCheck, Phase, settings

# The same examples on every run, so that a red build is red again; `long` looks for new ones.
settings.register_profile(
    "default",
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],  # two busy cores are no defect
)
settings.register_profile("plain", settings.get_profile("default"), max_examples=15, stateful_step_count=20)
settings.register_profile(
    "long", settings.get_profile("default"), max_examples=5000, stateful_step_count=80, derandomize=False
)
# Planted faults need finding, not explaining: no time is spent on the smallest example.
settings.register_profile("mutants", settings.get_profile("default"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
