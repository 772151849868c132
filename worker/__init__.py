"""The worker: from the queue to the decoder and back.

`contract` holds every record and key that crosses a process; `service` is the loop to read first.
"""
