"""Targets: one adapter per model family, all behind the `Target` protocol of `base`."""
