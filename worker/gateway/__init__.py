"""The REST front door: the OpenAI calls for files, batches and live requests over the queue."""
