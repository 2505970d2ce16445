"""Offload: the optimizer steps on the host (``cpu_offload``), or its memory moves there between steps.

Hangs on ``bookkeeping/bucket_store.py: StepOnDevice``, in whose place the optimizer takes ``StepOnHost``: both make
buckets with the same verbs, so that nobody else asks which of the two it is.
"""
