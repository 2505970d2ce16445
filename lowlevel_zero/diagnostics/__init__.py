"""What is wrong, and where: parameters that have changed hands, inf and NaN, ranks that differ.

Hangs on ``StepObserver``, which the optimizer tells what happens in a step.
"""
