"""What is wrong, and where: ranks that are missing or differ, parameters that have changed hands, inf and NaN.

Hangs on ``StepObserver``, which the optimizer tells what happens in a step, and on ``ShardGroup.progress``, by which
every collective is begun and waited for: the stall report reads it from a thread of its own, and the debug checks put
one in its place that compares the ranks first.
"""
