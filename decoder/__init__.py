"""The decoder: tokens in, tokens out. The only room that imports mlx; it knows no queue.

Importing this package is light. Import what you need from its modules:
`types` (Request, Completion), `loading` (load_decoder), `engine` (Decoder), `errors`.
"""
