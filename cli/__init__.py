"""The command line: parse, call, print. Importing it imports no mlx."""
