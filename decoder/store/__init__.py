"""The SSD tier of the prefix cache: snapshots of prefixes in files, and an index of them.

blob writes and checks one file, index says what there is, store keeps both within their bounds.
Nothing here loads mlx, so that the command line can look; `codec` beside it turns snapshots into
tensors and back, and does. A prefix's keys and values tell much of the prompt: the folder is the
user's own (mode 0700).
"""
