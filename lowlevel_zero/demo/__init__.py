"""The demo: a byte-level GPT with LayerDrop, trained with ZeRO over the ranks of ``torchrun``.

Start it with ``torchrun --standalone --nproc-per-node 2 -m lowlevel_zero.demo``.
"""
