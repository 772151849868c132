"""Training in MLX: a tiny target language model, and DFlash drafts for a frozen target.

The same code runs on the Metal, CUDA and CPU backends. ``features``, ``draft``, ``objective`` and
``fit`` know nothing of the demo; ``demo`` puts the parts together and makes the bundled pair.
"""
