"""The learning rate as a function of the step alone, so that a resume cannot change it.

Read by ``scaling.train``. Steps count from 0; the step with index s is the (s + 1)-th update.
"""

from __future__ import annotations

import math

from scaling.config.training import ScheduleConfig


def learning_rate(schedule: ScheduleConfig, peak: float, step: int) -> float:
    """Learning rate of the update with index ``step``.

    The warm-up rises linearly and reaches ``peak`` at its last step. Afterwards, with progress p from 0 at the end of
    the warm-up to 1 at the last step and m = ``min_lr_ratio``:

    - ``cosine``: peak * (m + (1 - m) * (1 + cos(pi p)) / 2) (Loshchilov and Hutter, arXiv 1608.03983);
    - ``wsd``: peak until the last ``decay_fraction`` of all steps, then linearly to m * peak (arXiv 2404.06395);
    - ``constant``: peak.

    >>> schedule = ScheduleConfig(steps=10, warmup_steps=2, min_lr_ratio=0.1)
    >>> [round(learning_rate(schedule, 1.0, s), 3) for s in (0, 1, 5, 9)]
    [0.5, 1.0, 0.55, 0.1]
    """
    assert schedule.steps is not None and schedule.warmup_steps is not None, "resolve the config first"
    done = step + 1
    if done <= schedule.warmup_steps:
        return peak * done / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    floor = schedule.min_lr_ratio
    if schedule.kind == "wsd":
        decay_steps = max(1.0, schedule.decay_fraction * schedule.steps)
        left = min(1.0, (schedule.steps - done) / decay_steps)
        return peak * (floor + (1 - floor) * left)
    progress = (done - schedule.warmup_steps) / (schedule.steps - schedule.warmup_steps)
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)
